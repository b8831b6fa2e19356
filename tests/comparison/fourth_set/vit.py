"""A vision transformer: strips of the picture over the workers, or its width."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

PATCH, SIDE, WIDTH, HEADS, CLASSES = 4, 32, 16, 4, 5
COLUMNS = SIDE // PATCH


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> list[Tensor]:
        return [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        ]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.proj(attend(q, k, v))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            Mlp(),
        )
        self.scale1, self.scale2 = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attn(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(COLUMNS * COLUMNS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def embed(self, pictures: Tensor) -> Tensor:
        return self.patches(pictures).flatten(2).mT + self.positions

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.embed(pictures)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.norm(x)))


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(tensor: Tensor, dim: int = 0, segments: int = 1) -> nn.Parameter:
    pieces = [piece.chunk(world(), dim)[me()] for piece in tensor.detach().chunk(segments, dim)]
    return nn.Parameter(torch.cat(pieces, dim).clone())


class StripAttention(Attention):
    """Queries of the own patches, keys and values of all."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        k = dist_fn.gather_from_sequence_region(k, 2)
        v = dist_fn.gather_from_sequence_region(v, 2)
        return self.proj(attend(q, k, v))


class Strips(ViT):
    """Each worker has some rows of patches."""

    def __init__(self, whole: ViT) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn = StripAttention()
        self.to(whole.head.weight.dtype).load_state_dict(whole.state_dict())
        self.positions = part(whole.positions)
        for name, parameter in self.named_parameters():
            if not name.startswith(("head", "positions")):
                parameter.register_hook(lambda grad: ccl.all_reduce(grad.contiguous()))

    def pool(self, x: Tensor) -> Tensor:
        return dist_fn.reduce_from_region(x.sum(1)) / COLUMNS**2

    def forward(self, pictures: Tensor) -> Tensor:
        return super().forward(dist_fn.scatter_to_region(pictures, 2))


class WideAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(dist_fn.copy_to_region(x))
        y = linear(attend(q, k, v), self.proj.weight)
        return dist_fn.reduce_from_region(y) + self.proj.bias


class WideMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        h = gelu(self.up(dist_fn.copy_to_region(x)))
        return dist_fn.reduce_from_region(linear(h, self.down.weight)) + self.down.bias


class Wide(ViT):
    """Heads, hidden features and the channels of the patches over the workers."""

    def __init__(self, whole: ViT) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn, block.mlp = WideAttention(), WideMlp()
        self.to(whole.head.weight.dtype).load_state_dict(whole.state_dict())
        self.patches.weight, self.patches.bias = (
            part(whole.patches.weight),
            part(whole.patches.bias),
        )
        for block in self.blocks:
            attn, mlp = block.attn, block.mlp
            attn.qkv.weight, attn.qkv.bias = part(attn.qkv.weight, 0, 3), part(attn.qkv.bias, 0, 3)
            attn.proj.weight = part(attn.proj.weight, 1)
            mlp.up.weight, mlp.up.bias = part(mlp.up.weight), part(mlp.up.bias)
            mlp.down.weight = part(mlp.down.weight, 1)

    def embed(self, pictures: Tensor) -> Tensor:
        mine = self.patches(dist_fn.copy_to_region(pictures)).flatten(2).mT
        return dist_fn.gather_from_region(mine, 2) + self.positions


# Programs


def run(sess: Session, kind: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(21)
    model, pictures = ViT().to(dtype), torch.randn(2, 3, SIDE, SIDE, dtype=dtype)
    return compare(model, sess.call_packed(kind, model), pictures)


def strips(sess: Session) -> Any:
    return run(sess, Strips)


def wide(sess: Session) -> Any:
    return run(sess, Wide)


def half(sess: Session) -> Any:
    return run(sess, Wide, torch.bfloat16)


RIGHT = ["strips", "wide", "half"]

HARMLESS = [
    Bug(
        "the mean before the sum over the strips",
        "strips",
        "        return dist_fn.reduce_from_region(x.sum(1)) / COLUMNS**2\n",
        "        return dist_fn.reduce_from_region(x.mean(1) / world())\n",
    ),
    Bug(
        "a part of the bias on each worker before the sum",
        "half",
        "        return dist_fn.reduce_from_region(linear(h, self.down.weight)) + self.down.bias\n",
        "        return dist_fn.reduce_from_region(linear(h, self.down.weight) + dist_fn.copy_to_region(self.down.bias) / world())\n",
    ),
]

BUGS = [
    Bug(
        "strips cut across the picture",
        "strips",
        "dist_fn.scatter_to_region(pictures, 2)",
        "dist_fn.scatter_to_region(pictures, 3)",
        "blocks.0: input, forward",
        "all",
        "cut along the columns, though the positions are those of rows",
        found=r"blocks\.0\.input",
    ),
    Bug(
        "keys of the own strip only",
        "strips",
        "        k = dist_fn.gather_from_sequence_region(k, 2)\n        v = dist_fn.gather_from_sequence_region(v, 2)\n",
        "",
        "blocks.0.attn: input of proj, forward",
        "all",
        "a softmax over a part",
        found=r"blocks\.0\.attn\.proj\.input",
    ),
    Bug(
        "values' gradient stays on each worker",
        "strips",
        "        v = dist_fn.gather_from_sequence_region(v, 2)\n",
        "        v = dist_fn.gather_from_region(v, 2)\n",
        "blocks.1.attn.qkv: gradient of its output, backward",
        "all",
        "the adjoint is a reduce-scatter",
        found=r"blocks\.1\.attn\.qkv\.grad",
    ),
    Bug(
        "worker 3 adds a bias twice",
        "wide",
        "        return dist_fn.reduce_from_region(linear(h, self.down.weight)) + self.down.bias\n",
        "        return dist_fn.reduce_from_region(linear(h, self.down.weight)) + self.down.bias * (1 + me() // 3)\n",
        "blocks.0.mlp: output, forward",
        (3,),
        "worker 3 adds the bias twice",
        found=r"blocks\.0\.mlp",
        accept=r"off by 1 × the bias blocks\.0\.mlp\.down\.bias: it is added twice",
    ),
    Bug(
        "gradient through other workers' patches missing",
        "half",
        "        mine = self.patches(dist_fn.copy_to_region(pictures)).flatten(2).mT\n",
        "        mine = self.patches(pictures).flatten(2).mT\n",
        "patches: gradient of its input, backward",
        "all",
        "f is missing: each worker has the gradient through its own channels",
        found=r"(patches\.input|input)\.grad",
        accept="an all-reduce is missing in backward",
    ),
    Bug(
        "the second half of the heads is scaled by the whole width",
        "half",
        "        y = linear(attend(q, k, v), self.proj.weight)\n",
        "        y = linear(attend(q / (2 if me() > 1 else 1), k, v), self.proj.weight)\n",
        "blocks.0.attn: output, forward (its proj isn't called)",
        "all",
        "the scores of workers 2 and 3 are half",
        found=r"blocks\.0\.attn",
        accept=r"is 0\.5 times the reference",
    ),
]
