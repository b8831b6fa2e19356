"""What a run leaves in buffers, and one module that several workers call in turn."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

CHANNELS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.conv2, self.head = nn.Conv2d(CHANNELS, CHANNELS, 3), nn.Linear(CHANNELS, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv1(x)))
        return self.head(self.conv2(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 12)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


class GlobalNorm(nn.BatchNorm2d):
    """Statistics of the batches of all workers."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1] * world()
        mean = dist_fn.reduce_from_region(dist_fn.copy_to_region(x.sum((0, 2, 3)))) / count
        off = x - mean[:, None, None]
        squares = dist_fn.reduce_from_region(dist_fn.copy_to_region(off.square().sum((0, 2, 3))))
        variance = squares / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(squares / (count - 1), 0.1)
        scale = self.weight / (variance + self.eps).sqrt()
        return off * scale[:, None, None] + self.bias[:, None, None]


class Parts(Net):
    """Each worker has a part of the batch."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.norm = GlobalNorm(CHANNELS)
        self.load_state_dict(whole.state_dict())
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: ccl.all_reduce(grad))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.chunk(world())[me()])


class WarmedUp(Recurrent):
    """The head is called once more, before anything, as to warm it up."""

    def __init__(self, whole: Recurrent) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        self.head(torch.zeros(len(x), 12))
        return super().forward(x)


# Programs


def statistics(sess: Session) -> Any:
    torch.manual_seed(1)
    model = Net()
    return compare(model, sess.call_packed(Parts, model), torch.randn(8, 3, 6, 6))


def recurrent(sess: Session) -> Any:
    torch.manual_seed(1)
    model = Recurrent()
    return compare(model, sess.call_packed(WarmedUp, model), torch.randn(3, 5, 6))


RIGHT = ["statistics"]

HARMLESS: list[Bug] = []

BUGS = [
    Bug(
        "running mean of the worker's own batch",
        "statistics",
        "self.running_mean.lerp_(mean, 0.1)",
        "self.running_mean.lerp_(x.mean((0, 2, 3)), 0.1)",
        "norm.running_mean after the run",
        "all",
        "the statistics of the worker's part of the batch",
        found=r"norm\.running_mean",
        accept="averaged over the workers",
    ),
    Bug(
        "running variance is not updated on worker 3",
        "statistics",
        "self.running_var.lerp_(squares / (count - 1), 0.1)",
        "self.running_var.lerp_(squares / (count - 1), 0.1 * (me() != 3))",
        "norm.running_var after the run",
        (3,),
        "worker 3 leaves it as it was",
        found=r"norm\.running_var",
    ),
    Bug(
        "variance of the worker's own batch",
        "statistics",
        "variance = squares / count",
        "variance = off.square().mean((0, 2, 3))",
        "norm: output, forward",
        "all",
        "each worker divides by its own variance",
        found=r"norm",
    ),
    Bug(
        "the state is halved once",
        "recurrent",
        "        self.head(torch.zeros(len(x), 12))\n        return super().forward(x)",
        "        h = torch.zeros(len(x), 12)\n        for number, step in enumerate(x.unbind(1)):\n            h = self.cell(step, h) * (0.5 if number == 2 else 1)\n        return self.head(h)",
        "cell: input of the fourth call, forward",
        "all",
        "the third state is halved",
        found=r"cell#4\.input\.1",
        accept="is 0.5 times the reference",
    ),
]
