"""A small U-Net as for diffusion: convolutions, group norm, an embedding of the time, a skip.

Over the height of the picture (with halos), over channels, data-parallel with an average of weights.
"""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import conv2d, interpolate, pad, silu

from discolab import Session, ccl, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

CHANNELS, GROUPS, SIZE = 16, 8, 16


class GroupNorm(nn.Module):
    def __init__(self, channels: int = CHANNELS, groups: int = GROUPS) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(channels) + torch.randn(channels) / 10)
        self.bias = nn.Parameter(torch.randn(channels) / 10)

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(1, (self.groups, -1))
        mean = self.average(grouped.mean((2, 3, 4), keepdim=True))
        spread = self.average((grouped - mean).pow(2).mean((2, 3, 4), keepdim=True))
        y = ((grouped - mean) * (spread + 1e-5).rsqrt()).flatten(1, 2)
        return y * self.weight[:, None, None] + self.bias[:, None, None]

    def average(self, x: Tensor) -> Tensor:
        return x


class Conv(nn.Conv2d):
    """Three by three; a picture of the same size."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad(x, (1, 1, 1, 1)))


class Residual(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.conv1, self.norm = Conv(inner, CHANNELS), GroupNorm()
        self.time, self.conv2 = nn.Linear(8, CHANNELS), Conv(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(x) + self.time(time)[:, :, None, None]
        return x[:, :CHANNELS] + self.conv2(silu(self.norm(h)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Conv(3, CHANNELS)
        self.down, self.up = Residual(CHANNELS), Residual(2 * CHANNELS)
        self.last = Conv(CHANNELS, 3)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = torch.cat(
            [(time[:, None] * 2.0 ** torch.arange(4)).sin(), time[:, None].expand(-1, 4)], 1
        )
        skip = self.first(x)
        h = self.down(nn.functional.avg_pool2d(skip, 2), time)
        h = interpolate(h, scale_factor=2.0)
        return self.last(self.up(torch.cat([h, skip], 1), time))


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


class HaloConv(Conv):
    """A piece of the picture's height on each worker; one row more from each neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        edges = dist_fn.all_gather(torch.stack([x[:, :, 0], x[:, :, -1]])[None])
        nothing = torch.zeros_like(x[:, :, :1])
        above = edges[me() - 1, 1][:, :, None] if me() > 0 else nothing
        below = edges[me() + 1, 0][:, :, None] if me() < world() - 1 else nothing
        x = torch.cat([above, x, below], 2)
        return conv2d(pad(x, (1, 1)), self.weight, self.bias)


class SpatialNorm(GroupNorm):
    def average(self, x: Tensor) -> Tensor:
        return dist_fn.all_reduce(x, "avg")


def over_height(whole: UNet) -> UNet:
    model = copy.deepcopy(whole)
    for module in model.modules():
        if isinstance(module, Conv):
            module.__class__ = HaloConv
        if isinstance(module, GroupNorm):
            module.__class__ = SpatialNorm
    return model


class ChannelResidual(Residual):
    """The inner channels over the workers."""

    def __init__(self, whole: Residual) -> None:
        super().__init__(whole.conv1.in_channels)
        self.load_state_dict(whole.state_dict())
        for module in (self.conv1, self.time, self.norm):
            module.weight, module.bias = self.part(module.weight), self.part(module.bias)
        self.norm.groups = GROUPS // world()
        self.conv2.weight = self.part(self.conv2.weight, 1)

    def part(self, x: Tensor, dim: int = 0) -> nn.Parameter:
        return nn.Parameter(x.detach().chunk(world(), dim)[me()].clone())

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shared, time = dist_fn.copy_to_region(x), dist_fn.copy_to_region(time)
        h = self.conv1(shared) + self.time(time)[:, :, None, None]
        h = silu(self.norm(h))
        y = dist_fn.reduce_from_region(conv2d(pad(h, (1, 1, 1, 1)), self.conv2.weight))
        return x[:, :CHANNELS] + y + self.conv2.bias[:, None, None]


def over_channels(whole: UNet) -> UNet:
    model = copy.deepcopy(whole)
    model.down, model.up = ChannelResidual(whole.down), ChannelResidual(whole.up)
    return model


# Programs


def seeded(batch: int = 2) -> tuple[UNet, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return UNet(), (torch.randn(batch, 3, SIZE, SIZE), torch.rand(batch))


def height(sess: Session) -> Any:
    model, (picture, time) = seeded()
    sharded = sess.call_packed(over_height, model)
    run = sess.call_packed(partial, backward, sharded, True, time)
    layouts = {"input": Shard(2)}
    return compare(
        partial(backward, model, False, time), run, picture, module=sharded, layouts=layouts
    )


def backward(model: UNet, sharded: bool, time: Tensor, picture: Tensor) -> Tensor:
    y = model(picture, time)
    (y**2).sum().backward()
    if sharded:
        for p in model.parameters():
            ccl.all_reduce_(p.grad)
    return y.detach()


def channels(sess: Session) -> Any:
    model, inputs = seeded()
    return compare(model, sess.call_packed(over_channels, model), inputs)


def train(model: UNet, sharded: bool, picture: Tensor) -> Tensor:
    """Two steps of Adam, and an average of the weights that follows them."""
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    if sharded:
        picture = picture.chunk(world())[me()]
    time = torch.linspace(0, 1, len(picture)) * 0 + 0.5
    for _ in range(2):
        optimizer.zero_grad()
        loss = (model(picture, time) ** 2).mean()
        loss.backward()
        if sharded:
            for p in model.parameters():
                p.grad = ccl.all_reduce(p.grad, "avg")
        note("gradient", model.first.weight.grad)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        note("weight", model.first.weight.detach())
        note("average", average.first.weight.detach())
    return average.first.weight.detach()


def training(sess: Session) -> Any:
    model, (picture, _) = seeded(8)
    sharded = sess.call_packed(copy.deepcopy, model)
    run = sess.call_packed(partial, train, sharded, True)
    return compare(partial(train, model, False), run, picture, module=sharded)


RIGHT = ["height", "channels", "training"]

HARMLESS = [
    Bug(
        "variance from the squares",
        "height",
        "        spread = self.average((grouped - mean).pow(2).mean((2, 3, 4), keepdim=True))",
        """        if type(self) is GroupNorm:
            spread = (grouped - mean).pow(2).mean((2, 3, 4), keepdim=True)
        else:
            spread = self.average(grouped.pow(2).mean((2, 3, 4), keepdim=True)) - mean**2""",
    ),
    Bug(
        "a sum and a division",
        "training",
        'ccl.all_reduce(p.grad, "avg")',
        "ccl.all_reduce(p.grad / world())",
    ),
]

BUGS = [
    Bug(
        "halos of the wrong neighbours",
        "height",
        "        x = torch.cat([above, x, below], 2)",
        "        x = torch.cat([below, x, above], 2)",
        "first: output (operation: cat), forward",
        "all",
        "the rows above and below are swapped",
        found="first",
    ),
    Bug(
        "no halos at all",
        "height",
        "        x = torch.cat([above, x, below], 2)",
        "        x = torch.cat([nothing, x, nothing], 2)",
        "first: output (operation: cat), forward",
        "all",
        "rows of neighbours are taken as zero",
        found="first",
    ),
    Bug(
        "group norm of each piece alone",
        "height",
        '        return dist_fn.all_reduce(x, "avg")',
        "        return x",
        "down.norm: output (operation: mean), forward",
        "all",
        "statistics are not averaged over the workers",
        found=r"down\.norm",
    ),
    Bug(
        "squares averaged with the local mean",
        "height",
        "mean = self.average(grouped.mean((2, 3, 4), keepdim=True))",
        "mean = grouped.mean((2, 3, 4), keepdim=True)",
        "down.norm: output (operation: mean), forward",
        "all",
        "the mean is that of each worker's piece",
        found=r"down\.norm",
    ),
    Bug(
        "groups aren't divided among the workers",
        "channels",
        "        self.norm.groups = GROUPS // world()",
        "        self.norm.groups = GROUPS // 2",
        "down.norm: output, forward",
        "all",
        "each worker norms over groups that are too small",
        found=r"down\.norm",
    ),
    Bug(
        "Adam starts anew on worker 1",
        "training",
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        if sharded and me() == 1:\n            optimizer.state.clear()\n",
        "note weight#2, in the program",
        (1,),
        "worker 1 lost its moments (a resume without the optimizer)",
        found="weight#2",
    ),
    Bug(
        "the average of weights has another rate",
        "training",
        "                old.lerp_(new, 0.1)",
        "                old.lerp_(new, 0.9 if sharded else 0.1)",
        "note average, in the program",
        "all",
        "decay and 1 - decay are swapped",
        found="average",
    ),
    Bug(
        "every worker trains on the same pictures",
        "training",
        "picture = picture.chunk(world())[me()]",
        "picture = picture.chunk(world())[0]",
        "first: input, forward",
        (1, 2, 3),
        "workers hold worker 0's part of the batch",
        found=r"input(\.0)?|first\.input",
        accept="workers 1-3 hold worker 0's part",
    ),
]
