"""A denoiser: residual convolutions with the time, attention to a text; its channels over the workers."""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import conv2d, group_norm, interpolate, linear, mse_loss, silu
from torch.nn.functional import scaled_dot_product_attention as sdpa

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

CHANNELS, GROUPS, TIME, TEXT, HEADS = 16, 4, 8, 6, 4


def waves(t: Tensor) -> Tensor:
    angles = t[:, None] * torch.arange(1, TIME // 2 + 1, dtype=t.dtype)
    return torch.cat([angles.sin(), angles.cos()], -1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.time = nn.Linear(TIME, CHANNELS)
        self.norm = nn.GroupNorm(GROUPS, CHANNELS)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.norm(self.conv1(x) + self.time(t)[..., None, None])
        return x + self.conv2(silu(h))


class Listen(nn.Module):
    """Attention of the picture to a text."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (
            nn.Linear(CHANNELS, CHANNELS, bias=False),
            nn.Linear(TEXT, CHANNELS, bias=False),
        )
        self.v, self.out = nn.Linear(TEXT, CHANNELS, bias=False), nn.Linear(CHANNELS, CHANNELS)

    def mixed(self, x: Tensor, text: Tensor) -> Tensor:
        parts = self.q(x.flatten(2).mT), self.k(text), self.v(text)
        q, k, v = (p.unflatten(-1, (-1, CHANNELS // HEADS)).transpose(1, 2) for p in parts)
        return sdpa(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return x + self.out(self.mixed(x, text)).mT.unflatten(2, x.shape[2:])


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, CHANNELS, 3, padding=1), Residual()
        self.pool = nn.Conv2d(CHANNELS, CHANNELS, 2, 2)
        self.middle, self.up = Listen(), Residual()
        self.join = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        self.last = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        t = waves(t)
        skip = self.down(self.first(x), t)
        h = self.middle(self.pool(skip), text)
        h = interpolate(h, scale_factor=2)
        return self.last(self.up(self.join(torch.cat([h, skip], 1)), t))


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(tensor: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(world(), dim)[me()].clone())


class CutResidual(Residual):
    def cut(self) -> None:
        for layer in (self.conv1, self.time, self.norm):
            layer.weight, layer.bias = part(layer.weight), part(layer.bias)
        self.conv2.weight = part(self.conv2.weight, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(dist_fn.copy_to_region(x))
        h = h + self.time(dist_fn.copy_to_region(t))[..., None, None]
        h = silu(group_norm(h, GROUPS // world(), self.norm.weight, self.norm.bias))
        h = conv2d(h, self.conv2.weight, None, padding=1)
        return x + dist_fn.reduce_from_region(h) + self.conv2.bias[:, None, None]


class CutListen(Listen):
    def cut(self) -> None:
        for layer in (self.q, self.k, self.v):
            layer.weight = part(layer.weight)
        self.out.weight = part(self.out.weight, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        h = self.mixed(dist_fn.copy_to_region(x), dist_fn.copy_to_region(text))
        y = dist_fn.reduce_from_region(linear(h, self.out.weight)) + self.out.bias
        return x + y.mT.unflatten(2, x.shape[2:])


class Cut(Denoiser):
    def __init__(self, whole: Denoiser) -> None:
        super().__init__()
        self.down, self.middle, self.up = CutResidual(), CutListen(), CutResidual()
        self.to(whole.last.weight.dtype).load_state_dict(whole.state_dict())
        for layer in (self.down, self.middle, self.up):
            layer.cut()


# A step of training, and the average of the weights


def step(model: Denoiser, x: Tensor, t: Tensor, text: Tensor) -> dict[str, Tensor]:
    return trained(model, x, t, text, lambda gradient: gradient)


def trained(model: Denoiser, x: Tensor, t: Tensor, text: Tensor, joined: Any) -> dict[str, Tensor]:
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        mse_loss(model(x, t, text), x).backward()
        for parameter in model.parameters():
            parameter.grad = joined(parameter.grad)
        optimizer.step()
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.lerp_(parameter.detach(), 0.25)
    return {"weight": model.last.weight.detach().clone(), "average": average[0]}


def data_parallel_step(model: Denoiser, x: Tensor, t: Tensor, text: Tensor) -> dict[str, Tensor]:
    return trained(model, x, t, text, lambda gradient: ccl.all_reduce(gradient, "avg"))


# Programs


def seeded(dtype: torch.dtype = torch.float32) -> tuple[Denoiser, tuple[Tensor, ...]]:
    torch.manual_seed(44)
    x, t, text = torch.randn(4, 3, 8, 8), torch.rand(4) * 3, torch.randn(4, 5, TEXT)
    return Denoiser().to(dtype), (x.to(dtype), t.to(dtype), text.to(dtype))


def channels(sess: Session, dtype: torch.dtype = torch.float32) -> Any:
    model, given = seeded(dtype)
    return compare(model, sess.call_packed(Cut, model), given)


def half(sess: Session) -> Any:
    return channels(sess, torch.bfloat16)


def training(sess: Session) -> Any:
    model, given = seeded()
    held = sess.call_packed(copy.deepcopy, model)
    run = sess.call_packed(partial, data_parallel_step, held)
    return compare(partial(step, model), run, given, module=held, layouts={"input": Shard(0)})


RIGHT = ["channels", "half", "training"]

HARMLESS = [
    Bug(
        "a part of the bias on each worker before the sum, of a convolution",
        "channels",
        "        return x + dist_fn.reduce_from_region(h) + self.conv2.bias[:, None, None]\n",
        "        bias = dist_fn.copy_to_region(self.conv2.bias)[:, None, None] / world()\n        return x + dist_fn.reduce_from_region(h + bias)\n",
    ),
]

BUGS = [
    Bug(
        "the norm over all channels of a worker as many groups",
        "channels",
        "group_norm(h, GROUPS // world(), self",
        "group_norm(h, GROUPS // 2, self",
        "down: output (inner modules aren't called), forward",
        "all",
        "two groups of two channels on each worker",
        found=r"down",
    ),
    Bug(
        "the time's gradient stays on each worker",
        "channels",
        "self.time(dist_fn.copy_to_region(t))",
        "self.time(t)",
        "up: gradient of its input t",
        "all",
        "f is missing",
        found=r"up\.time\.input\.grad|up\.input[^.]*\.grad|input.*\.grad|up\.1\.grad|up\.input\.1\.grad",
        accept="an all-reduce is missing in backward",
    ),
    Bug(
        "the residual is summed, too, in bfloat16",
        "half",
        "        return x + dist_fn.reduce_from_region(h) + self.conv2.bias[:, None, None]\n",
        "        return dist_fn.reduce_from_region(x + h) + self.conv2.bias[:, None, None]\n",
        "down: output, forward",
        "all",
        "the residual counts four times",
        found=r"down",
        accept=r"off by 3 × the (input of down|output of first)",
    ),
    Bug(
        "keys of worker 1's heads are those of worker 0",
        "half",
        "        for layer in (self.q, self.k, self.v):\n            layer.weight = part(layer.weight)\n",
        "        whole = self.k.weight.detach().clone()\n        for layer in (self.q, self.k, self.v):\n            layer.weight = part(layer.weight)\n        if me() == 1:\n            self.k.weight = nn.Parameter(whole.chunk(world())[0])\n",
        "parameter middle.k.weight",
        (1,),
        "worker 1 holds worker 0's part",
        found=r"middle\.k\.weight",
        accept="worker 1 holds worker 0's part",
    ),
    Bug(
        "gradients are summed where the loss is a mean",
        "training",
        'ccl.all_reduce(gradient, "avg")',
        "ccl.all_reduce(gradient)",
        "the first call after the step",
        "all",
        "steps are four times too large",
        found=r"first#2",
    ),
    Bug(
        "worker 2 takes half of each step",
        "training",
        'ccl.all_reduce(gradient, "avg")',
        'ccl.all_reduce(gradient, "avg") / (1 + (me() == 2))',
        "the first call after the step, on worker 2: first#2",
        (2,),
        "the gradients that the step used are half there",
        found=r"first#2",
    ),
]
