"""Rows dealt in other orders: a batch in strides, a sequence in zigzag."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 32, 16


def rotated(x: Tensor, places: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = places[:, None] / 100.0 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).float()
        q, k = rotated(self.heads(self.q(x)), places), rotated(self.heads(self.k(x)), places)
        y = F.scaled_dot_product_attention(q, k, self.heads(self.v(x)), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def summed(model: nn.Module) -> None:
    """Each worker has a part of the rows, and a term of the gradients."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: ccl.all_reduce(grad))


class Strided(Model):
    """Each worker has every fourth row of the batch."""

    def __init__(self, whole: Model) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        summed(self)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids[me() :: world()])


class Gathered(Strided):
    """The same, and all rows in their order in the end."""

    def forward(self, ids: Tensor) -> Tensor:
        out = dist_fn.gather_from_region(super().forward(ids), 0)
        return out.unflatten(0, (world(), -1)).transpose(0, 1).flatten(0, 1)


def mine(x: Tensor, dim: int) -> Tensor:
    """A chunk from the begin, and one from the end."""
    chunks = x.chunk(2 * world(), dim)
    return torch.cat([chunks[me()], chunks[-1 - me()]], dim)


class ZigzagAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1] * world()
        places = mine(torch.arange(length), 0)
        order = torch.cat(
            [
                torch.cat(
                    [torch.arange(length).chunk(2 * world())[i] for i in (r, 2 * world() - 1 - r)]
                )
                for r in range(world())
            ]
        )
        q = rotated(self.heads(self.q(x)), places.float())
        k = rotated(self.heads(self.k(x)), places.float())
        k, v = (dist_fn.gather_from_sequence_region(t, 2) for t in (k, self.heads(self.v(x))))
        seen = order[None, :] <= places[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).flatten(2))


class Zigzag(Model):
    """Each worker has two chunks of the sequence, which together are as much work for all."""

    def __init__(self, whole: Model) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = ZigzagAttention()
        self.load_state_dict(whole.state_dict())
        summed(self)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(mine(ids, 1))


# Programs


def run(sess: Session, kind: Any) -> Any:
    torch.manual_seed(7)
    model = Model()
    return compare(model, sess.call_packed(kind, model), torch.randint(64, (BATCH, LENGTH)))


def strided(sess: Session) -> Any:
    return run(sess, Strided)


def gathered(sess: Session) -> Any:
    return run(sess, Gathered)


def zigzag(sess: Session) -> Any:
    return run(sess, Zigzag)


RIGHT = ["strided", "gathered", "zigzag"]

HARMLESS: list[Bug] = []

BUGS = [
    Bug(
        "rows come back in the order of workers",
        "gathered",
        "return out.unflatten(0, (world(), -1)).transpose(0, 1).flatten(0, 1)",
        "return out",
        "the result, forward",
        "all",
        "rows are gathered in another order than they were dealt in",
        found=r"output",
    ),
    Bug(
        "a chunk's places are those of a row",
        "zigzag",
        "q = rotated(self.heads(self.q(x)), places.float())",
        "q = rotated(self.heads(self.q(x)), me() * x.shape[1] + torch.arange(x.shape[1]).float())",
        "blocks.0.attention, between q and o, forward",
        "all",
        "queries are rotated as if the sequence were split in a row",
        found=r"blocks\.0\.attention(\.o\.input)?",
    ),
    Bug(
        "the mask is that of a sequence in a row",
        "zigzag",
        "seen = order[None, :] <= places[:, None]",
        "seen = torch.arange(length)[None, :] <= (me() * x.shape[1] + torch.arange(x.shape[1]))[:, None]",
        "blocks.0.attention, between q and o, forward",
        "all",
        "queries see other keys",
        found=r"blocks\.0\.attention(\.o\.input)?",
    ),
    Bug(
        "gradients of strided rows are not summed",
        "strided",
        "        self.load_state_dict(whole.state_dict())\n        summed(self)\n\n    def forward(self, ids: Tensor) -> Tensor:\n        return super().forward(ids[me() :: world()])",
        "        self.load_state_dict(whole.state_dict())\n\n    def forward(self, ids: Tensor) -> Tensor:\n        return super().forward(ids[me() :: world()])",
        "gradients of the parameters, backward",
        "all",
        "the all-reduce of gradients is missing",
        found=r"head\.(weight|bias)\.grad",
        accept="the all-reduce of this gradient is missing",
    ),
    Bug(
        "worker 2 has another epsilon, rows in strides",
        "strided",
        "return super().forward(ids[me() :: world()])",
        "self.blocks[1].norm2.eps = 0.5 if me() == 2 else 1e-5\n        return super().forward(ids[me() :: world()])",
        "blocks.1.norm2: output, forward",
        (2,),
        "another epsilon",
        found=r"blocks\.1\.norm2",
    ),
]
