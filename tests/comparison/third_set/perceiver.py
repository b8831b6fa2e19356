"""Latents that look at an input of which each worker has a part: a softmax in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

LATENTS, LENGTH, FEATURES, WIDTH, HEADS, CLASSES = 6, 32, 5, 16, 2, 4


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        q, k, v = heads(self.q(z)), heads(self.k(h)), heads(self.v(h))
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.latents = nn.Parameter(torch.randn(LATENTS, WIDTH))
        self.norm, self.cross = nn.LayerNorm(WIDTH), Cross()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.positions
        z = self.latents.expand(len(x), -1, -1)
        z = z + self.cross(self.norm(z), h)
        z = z + self.down(gelu(self.up(z)))
        return self.head(z.mean(1))


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


class SplitCross(Cross):
    """Keys and values over the workers: each has the numerator and denominator of its part."""

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        q = dist_fn.copy_to_region(self.q(z))
        q, k, v = heads(q), heads(self.k(h)), heads(self.v(h))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).float()
        largest = scores.detach().amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        scale = (largest - ccl.all_reduce(largest, "max")).exp()
        total = dist_fn.reduce_from_region(weights.sum(-1, keepdim=True) * scale)
        y = dist_fn.reduce_from_region(weights @ v.float() * scale) / total
        return self.o(y.to(z.dtype).transpose(1, 2).flatten(2))


class ShardedPerceiver(Perceiver):
    def __init__(self, whole: Perceiver) -> None:
        super().__init__()
        self.cross = SplitCross()
        self.to(whole.head.weight.dtype).load_state_dict(whole.state_dict())
        rows = whole.positions.detach().chunk(world())[me()]
        self.positions = nn.Parameter(rows.clone())
        for layer in (self.embed, self.cross.k, self.cross.v):
            for parameter in layer.parameters():
                parameter.register_hook(lambda grad: ccl.all_reduce(grad))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(dist_fn.scatter_to_region(x, 1))


# Programs


def parts(sess: Session, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(13)
    model, x = Perceiver().to(dtype), torch.randn(3, LENGTH, FEATURES, dtype=dtype)
    return compare(model, sess.call_packed(ShardedPerceiver, model), x)


def half(sess: Session) -> Any:
    return parts(sess, torch.bfloat16)


RIGHT = ["parts", "half"]

HARMLESS = [
    Bug(
        "the largest of all first",
        "half",
        "        largest = scores.detach().amax(-1, keepdim=True)\n",
        "        largest = ccl.all_reduce(scores.detach().amax(-1, keepdim=True), 'max')\n",
    ),
]

BUGS = [
    Bug(
        "parts of the softmax aren't rescaled",
        "half",
        '        scale = (largest - ccl.all_reduce(largest, "max")).exp()\n',
        "        scale = 1.0\n",
        "cross: input of o, forward",
        "all",
        "each worker's weights are relative to its own largest score",
        found=r"cross\.o\.input",
    ),
    Bug(
        "the denominator is averaged",
        "parts",
        "        y = dist_fn.reduce_from_region(weights @ v.float() * scale) / total",
        "        y = dist_fn.reduce_from_region(weights @ v.float() * scale) / (total / world())",
        "cross: input of o, forward",
        "all",
        "four times too large: a scale of 1/4 too much in the denominator",
        found=r"cross\.o\.input",
        accept="is 4 times the reference",
    ),
    Bug(
        "positions of the first part on each worker",
        "parts",
        "whole.positions.detach().chunk(world())[me()]",
        "whole.positions.detach().chunk(world())[0]",
        "positions, parameter",
        (1, 2, 3),
        "workers 1-3 hold worker 0's part",
        found="positions",
        accept="worker 0's part",
    ),
    Bug(
        "gradient of the queries not summed",
        "parts",
        "        q = dist_fn.copy_to_region(self.q(z))\n",
        "        q = self.q(z)\n",
        "cross.q: gradient of its output",
        "all",
        "copy_to_region is missing: each worker has the gradient of its part",
        found=r"cross\.q\.grad",
        accept="missing in backward|all-reduce is missing",
    ),
]
