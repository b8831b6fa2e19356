"""Data of which workers take their parts, and what is as it is on all of them."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import discolab
from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

BATCH, WIDTH = 16, 8


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.up, self.down = (
            nn.Linear(1, WIDTH),
            nn.Linear(6, WIDTH),
            nn.Linear(WIDTH, 6),
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.time(t[:, None]).sin())


class Pair(nn.Module):
    """A contrastive loss with a temperature, and one that all rows have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, WIDTH), nn.Linear(4, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> None:
        a, b = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        logits = self.scale.exp() * a @ b.T
        spread = discolab.note("spread", logits.softmax(-1).mean(0).square().sum())
        (F.cross_entropy(logits, torch.arange(len(x))) + 0.1 * spread).backward()


def mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.gelu(x @ a + b) @ c


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


class Strided(Denoiser):
    def __init__(self, whole: Denoiser) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: ccl.all_reduce(grad))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = t[me() :: world()]
        y = super().forward(x[me() :: world()], t)
        return (
            dist_fn.gather_from_region(y, 0)
            .unflatten(0, (world(), -1))
            .transpose(0, 1)
            .flatten(0, 1)
        )


class Parts(Pair):
    def __init__(self, whole: Pair) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())

    def forward(self, x: Tensor, y: Tensor) -> None:
        x, y = x.chunk(world())[me()], y.chunk(world())[me()]
        a, b = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        every = dist_fn.all_gather(b)
        logits = self.scale.exp() * a @ every.T
        mean = dist_fn.all_reduce(logits.softmax(-1).mean(0)) / world()
        spread = discolab.note("spread", mean.square().sum())
        (F.cross_entropy(logits, torch.arange(len(x)) + me() * len(x)) + 0.1 * spread).backward()
        for parameter in self.parameters():
            parameter.grad = ccl.all_reduce(parameter.grad, "avg")


def split_mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = dist_fn.copy_to_region(x)
    h = F.gelu(x @ a.chunk(world(), 1)[me()] + b.chunk(world())[me()])
    return dist_fn.reduce_from_region(h @ c.chunk(world())[me()])


# Programs


def strided(sess: Session) -> Any:
    torch.manual_seed(5)
    model = Denoiser()
    return compare(
        model, sess.call_packed(Strided, model), (torch.randn(BATCH, 6), torch.rand(BATCH))
    )


def parts(sess: Session) -> Any:
    torch.manual_seed(6)
    model = Pair()
    return compare(
        model, sess.call_packed(Parts, model), (torch.randn(BATCH, 6), torch.randn(BATCH, 4))
    )


def functional(sess: Session) -> Any:
    torch.manual_seed(7)
    inputs = (torch.randn(3, 8), torch.randn(8, 16), torch.randn(16), torch.randn(16, 8))
    return compare(mlp, split_mlp, inputs, session=sess)


RIGHT = ["strided", "parts", "functional"]

HARMLESS: list[Bug] = []

BUGS = [
    Bug(
        "times are taken in a row, the rest in strides",
        "strided",
        "        t = t[me() :: world()]\n",
        "        t = t.chunk(world())[me()]\n",
        "input of time",
        "all",
        "the rows of x and t are not the same",
        found=r"time(\.input)?|down\.input",
    ),
    Bug(
        "the gradient of the scale is not averaged",
        "parts",
        '            parameter.grad = ccl.all_reduce(parameter.grad, "avg")\n',
        '            if parameter is not self.scale:\n                parameter.grad = ccl.all_reduce(parameter.grad, "avg")\n',
        "gradient of the parameter scale",
        "all",
        "the all-reduce of this gradient is missing",
        found=r"scale\.grad",
        accept="the all-reduce of this gradient is missing",
    ),
    Bug(
        "the gradient of an average over workers is not summed",
        "parts",
        "mean = dist_fn.all_reduce(",
        "mean = dist_fn.reduce_from_region(",
        "gradient of what one and other give",
        "all",
        "the backward of the average lacks its sum",
        found=r"(one|other)(\.input|\.weight|\.bias)?\.grad",
    ),
    Bug(
        "x goes to the split weights as it is",
        "functional",
        "    x = dist_fn.copy_to_region(x)\n",
        "",
        "gradient of x",
        "all",
        "an all-reduce is missing in backward",
        found=r"input\.0\.grad",
        accept="an all-reduce is missing in backward",
    ),
]

SAID = {"times are taken in a row, the rest in strides": "rows lie in two orders"}
UNSAID = {
    "times are taken in a row, the rest in strides": "first operation that differs|that both run the first"
}
