"""Heads dealt in turn, and a scale that is folded into a weight: other parameters, same result."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, SIZE = 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mixed(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.out = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return self.out(x)


# Over the workers


def dealt(weight: Tensor, dim: int = 0) -> nn.Parameter:
    """Every fourth head."""
    me, n = current_worker().rank, current_worker().world_size
    rows = torch.arange(weight.shape[dim]).reshape(-1, n, SIZE)[:, me].flatten()
    return nn.Parameter(weight.detach().index_select(dim, rows).clone())


class SplitAttention(Attention):
    def __init__(self, whole: Attention) -> None:
        super().__init__()
        for name in ("q", "k", "v"):
            mine, its = getattr(self, name), getattr(whole, name)
            mine.weight, mine.bias = dealt(its.weight), dealt(its.bias)
        self.o.weight, self.o.bias = (
            dealt(whole.o.weight, 1),
            nn.Parameter(whole.o.bias.detach().clone()),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixed(dist_fn.copy_to_region(x))
        return dist_fn.reduce_from_region(F.linear(y, self.o.weight)) + self.o.bias


class SplitBlock(Block):
    def __init__(self, whole: Block) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.attention = SplitAttention(whole.attention)


class Scaled(nn.Module):
    """A norm with a scale, and what comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Folded(Scaled):
    """The norm's scale is a part of the next weight."""

    def __init__(self, whole: Scaled) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        me, n = current_worker().rank, current_worker().world_size
        up = whole.up.weight.detach() * whole.norm.weight.detach()
        nn.init.ones_(self.norm.weight)
        self.up.weight = nn.Parameter(up.chunk(n)[me].clone())
        self.up.bias = nn.Parameter(whole.up.bias.detach().chunk(n)[me].clone())
        self.down.weight = nn.Parameter(whole.down.weight.detach().chunk(n, 1)[me].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        h = torch.relu(self.up(dist_fn.copy_to_region(self.norm(x))))
        return x + dist_fn.reduce_from_region(F.linear(h, self.down.weight)) + self.down.bias


# Programs


def folded(sess: Session) -> Any:
    torch.manual_seed(4)
    model = Scaled()
    return compare(model, sess.call_packed(Folded, model), torch.randn(2, 6, WIDTH))


def heads(sess: Session) -> Any:
    torch.manual_seed(2)
    model = Block()
    return compare(model, sess.call_packed(SplitBlock, model), torch.randn(2, 6, WIDTH))


RIGHT = ["heads", "folded"]

HARMLESS: list[Bug] = []

BUGS = [
    Bug(
        "keys in a row where the others are dealt",
        "heads",
        "mine.weight, mine.bias = dealt(its.weight), dealt(its.bias)",
        "mine.weight, mine.bias = dealt(its.weight), dealt(its.bias)\n            if name == 'k':\n                mine.weight = nn.Parameter(its.weight.detach().chunk(4)[current_worker().rank].clone())",
        "attention.k: weight, or its output",
        "all",
        "keys of other heads than queries",
        found=r"attention\.(k|q)(\.weight)?",
    ),
    Bug(
        "columns of the output in a row",
        "heads",
        "dealt(whole.o.weight, 1)",
        "nn.Parameter(whole.o.weight.detach().chunk(4, 1)[current_worker().rank].clone())",
        "attention.o: weight; or those of q, k, v",
        "all",
        "heads are multiplied with the columns of others",
        found=r"attention(\.q\.weight|\.o.*)?",
    ),
    Bug(
        "a bias of o on every worker, heads dealt",
        "heads",
        "return dist_fn.reduce_from_region(F.linear(y, self.o.weight)) + self.o.bias",
        "return dist_fn.reduce_from_region(F.linear(y, self.o.weight, self.o.bias))",
        "attention: output, forward",
        "all",
        "the bias is added on every worker before the sum",
        found=r"attention",
        accept=r"off by 3 × the bias attention\.o\.bias",
    ),
    Bug(
        "no copy_to_region, heads dealt",
        "heads",
        "y = self.mixed(dist_fn.copy_to_region(x))",
        "y = self.mixed(x)",
        "attention: gradient of its input, backward",
        "all",
        "the gradient of the input is not summed",
        found=r"(attention(\.[qkv])?\.input|norm)\.grad",
        accept="all-reduce is missing in backward",
    ),
    Bug(
        "one number of a bias is another, behind a folded scale",
        "folded",
        "self.up.bias = nn.Parameter(whole.up.bias.detach().chunk(n)[me].clone())",
        "self.up.bias = nn.Parameter(whole.up.bias.detach().chunk(n)[me].clone())\n        self.up.bias.data[1] += float(me == 2)",
        "parameter up.bias",
        (2,),
        "one element of worker 2's bias",
        found=r"up\.bias",
    ),
    Bug(
        "a bias is added twice, behind a folded scale",
        "folded",
        "F.linear(h, self.down.weight)) + self.down.bias",
        "F.linear(h, self.down.weight)) + 2 * self.down.bias",
        "the result, forward",
        "all",
        "the bias of down is added twice",
        found=r"output",
        accept=r"off by 1 × the bias down\.bias: it is added twice",
    ),
]
