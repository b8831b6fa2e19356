"""A convolutional network, its channels or rows cut, and a recurrent one, its gates cut.

`Net` works on images [batch, 3, 16, 16]; `Recurrent` on sequences [batch, time, INPUT], with a GRU
cell of its own whose three gates are one weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from discolab import Session, ccl, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

from .case import Bug, Right, State, place, shard_, uneven

CHANNELS, SIZE, CLASSES = 8, 16, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.fc = nn.Linear(CHANNELS, CLASSES)

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.mix(x).relu()
        return self.fc(self.pool(x))


# -- channels cut ----------------------------------------------------------------------------------


class ByChannels(Net):
    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bug, me = self.bug, place()[0]
        x = self.norm(self.stem(dist_fn.copy_to_region(x))).relu()
        if bug == "bias before the sum":
            y = dist_fn.reduce_from_region(self.mix(x))
        else:
            y = F.conv2d(x, self.mix.weight, padding=1)
            if bug == "ccl.all_reduce":
                y = ccl.all_reduce(y)
            elif bug != "no all-reduce":
                y = dist_fn.reduce_from_region(y)
            if bug != "bias forgotten":
                y = y + self.mix.bias[:, None, None]
        if bug == "sign on one" and me == 1:
            y = -y
        return self.fc(self.pool(y.relu()))


def by_channels(state: State, bug: str, dtype: torch.dtype) -> Net:
    model = ByChannels().to(dtype)
    model.load_state_dict(state)
    model.bug = bug
    me, n = place()
    for module, name, dim in (
        (model.stem, "weight", 0), (model.stem, "bias", 0), (model.norm, "weight", 0),
        (model.norm, "bias", 0), (model.mix, "weight", 1),
    ):  # fmt: skip
        shard_(module, name, dim)
    model.norm.num_groups = 2 if bug == "groups" else 1
    model.norm.num_channels = CHANNELS // n
    if bug == "channels reversed on one" and me == 1:
        model.stem.weight = nn.Parameter(model.stem.weight.detach().flip(0))
    if bug == "interleaved channels":
        model.mix.weight = nn.Parameter(state["mix.weight"][:, me::n].clone())
    if bug == "dilation on one" and me == 3:
        model.stem.dilation, model.stem.padding = (2, 2), (2, 2)
    return model


def images(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(4)).to(dtype)


def channels(
    bug: str = "", dtype: torch.dtype = torch.float32
) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Net(), 5).to(dtype)
        model = session.call_packed(by_channels, reference.state_dict(), bug, dtype)
        return compare(reference, model, images(dtype))

    return run


# -- rows of the image cut: halos ------------------------------------------------------------------


class ByRows(Net):
    bug = ""

    def halo(self, x: torch.Tensor) -> torch.Tensor:
        """This worker's rows with one more on each side, zeros at the ends."""
        me, _ = place()
        rows = x.shape[2]
        if self.bug == "no halo":
            return F.pad(x, (0, 0, 1, 1))
        whole = F.pad(dist_fn.gather_from_sequence_region(x, 2), (0, 0, 1, 1))
        first = me * rows
        if self.bug == "halo of the wrong side" and me:
            piece = whole[:, :, first : first + rows + 2]
            return torch.cat([piece[:, :, -1:], piece[:, :, 1:-1], piece[:, :, :1]], 2)
        return whole[:, :, first : first + rows + 2]

    def conv(self, layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        weight, bias = map(dist_fn.copy_to_region, (layer.weight, layer.bias))
        return F.conv2d(self.halo(x), weight, bias, padding=(0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(dist_fn.scatter_to_region(x, 2))
        x = self.mix(self.norm(x).relu()).relu()
        return self.fc(self.pool(x))

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        if self.bug == "mean of sums":
            return dist_fn.reduce_from_region(x.mean((2, 3)))
        if self.bug == "pool of the part":
            return x.mean((2, 3))
        return dist_fn.reduce_from_region(x.mean((2, 3))) / place()[1]


class RowConv(nn.Conv2d):
    net: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[0].conv(self, x)


class RowNorm(nn.GroupNorm):
    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = map(dist_fn.copy_to_region, (self.weight, self.bias))
        groups = x.unflatten(1, (self.num_groups, -1))
        mean = groups.mean((2, 3, 4), keepdim=True)
        square = groups.square().mean((2, 3, 4), keepdim=True)
        if self.bug != "statistics of the part":
            mean, square = (dist_fn.all_reduce(t, "avg") for t in (mean, square))
        y = ((groups - mean) / (square - mean.square() + self.eps).sqrt()).flatten(1, 2)
        return y * weight[:, None, None] + bias[:, None, None]


def by_rows(state: State, bug: str) -> Net:
    model = ByRows()
    model.load_state_dict(state)
    model.bug = bug
    model.norm.__class__ = RowNorm
    model.norm.bug = bug
    for layer in (model.stem, model.mix):
        layer.__class__ = RowConv
        layer.net = [model]
    return model


def rows(bug: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Net(), 5)
        return compare(
            reference, session.call_packed(by_rows, reference.state_dict(), bug), images()
        )

    return run


# -- the batch cut: batch norm ---------------------------------------------------------------------


class Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.stem(x)).relu().mean((2, 3)))


class Synchronised(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = dist_fn.all_reduce(x.mean((0, 2, 3)), "avg")
        square = dist_fn.all_reduce(x.square().mean((0, 2, 3)), "avg")
        y = (x - mean[:, None, None]) / (square - mean.square() + self.eps).sqrt()[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]


def by_batch(state: State, bug: str) -> nn.Module:
    model = Batch()
    model.load_state_dict(state)
    if bug != "batch norm of the part":
        model.norm.__class__ = Synchronised
    if bug == "buffer of one" and place()[0] == 2:
        model.norm.running_mean.add_(1.0)
    for name, parameter in model.named_parameters():
        if bug == "one gradient not synchronised" and name == "stem.bias":
            continue
        parameter.register_hook(ccl.all_reduce)
        if bug == "one gradient twice" and name == "fc.weight":
            parameter.register_hook(ccl.all_reduce)
    if bug == "another part of the batch":
        shift = [1, 0, 2, 3][place()[0]]

        def other(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (ccl.all_gather(args[0].detach()).chunk(place()[1])[shift],)

        model.register_forward_pre_hook(other)
    return model


def batch(bug: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Batch(), 6)
        state = {k: v.clone() for k, v in reference.state_dict().items()}
        x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(4))
        return compare(
            reference, session.call_packed(by_batch, state, bug), x, layouts={"input": "shard(0)"}
        )

    return run


# -- recurrent -------------------------------------------------------------------------------------

INPUT, STATE, TIME = 6, 16, 4


class Cell(nn.Module):
    """A GRU's step; the rows of both weights are the gates r, z and n."""

    def __init__(self) -> None:
        super().__init__()
        self.w_x, self.w_h = (
            nn.Parameter(torch.empty(3 * STATE, INPUT)),
            nn.Parameter(torch.empty(3 * STATE, STATE)),
        )
        self.b = nn.Parameter(torch.empty(3 * STATE))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        xr, xz, xn = F.linear(x, self.w_x, self.b).chunk(3, -1)
        hr, hz, hn = F.linear(h, self.w_h).chunk(3, -1)
        z = (xz + hz).sigmoid()
        return (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = Cell(), nn.Linear(STATE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(len(x), STATE)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.out(h)


class CellParallel(Cell):
    """Each worker has a part of the state; all of it is gathered after each step."""

    bug = ""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        me, n = place()
        x = dist_fn.copy_to_region(x)
        mine = (
            h.chunk(n, -1)[me] if self.bug == "own part by chunk" else dist_fn.scatter_to_region(h)
        )
        if self.bug != "no copy":
            h = dist_fn.copy_to_region(h)
        xr, xz, xn = F.linear(x, self.w_x, self.b).chunk(3, -1)
        hr, hz, hn = F.linear(h, self.w_h).chunk(3, -1)
        z = (xz + hz).sigmoid()
        y = (1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * mine
        y = dist_fn.gather_from_region(y)
        if self.bug == "order of the state":
            y = y.roll(STATE // n, -1)
        return y


class RecurrentParallel(Recurrent):
    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(len(x), STATE)
        if self.bug == "state not reset on one" and place()[0] == 3:
            h = h + 0.3
        for number, step in enumerate(x.unbind(1)):
            if self.bug == "a step skipped on all" and number == 2:
                continue
            h = self.cell(step, h)
            if self.bug == "detached between steps":
                h = h.detach()
        return self.out(h)


def recurrent_parallel(state: State, bug: str, dtype: torch.dtype) -> Recurrent:
    model = RecurrentParallel().to(dtype)
    model.load_state_dict(state)
    model.cell.__class__ = CellParallel
    model.bug = model.cell.bug = bug
    segments = 1 if bug == "gates in one piece" else 3
    for name in ("w_x", "w_h", "b"):
        shard_(model.cell, name, 0, segments)
    if bug == "a gate from another worker":
        with torch.no_grad():
            other = ccl.all_gather(model.cell.b.data).view(4, -1)
            if place()[0] == 2:
                model.cell.b.copy_(other[0])
    return model


def gru(
    bug: str = "", dtype: torch.dtype = torch.float32
) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = uneven(Recurrent(), 7).to(dtype)
        x = torch.randn(5, TIME, INPUT, generator=torch.Generator().manual_seed(8)).to(dtype)
        model = session.call_packed(recurrent_parallel, reference.state_dict(), bug, dtype)
        return compare(reference, model, x)

    return run


class RecurrentStages(Recurrent):
    """Half of the time on workers 0-1, half on 2-3; the state is sent."""

    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me = place()[0]
        half = TIME // 2
        h = x.new_zeros(len(x), STATE)
        if me < 2:
            for step in x[:, :half].unbind(1):
                h = self.cell(step, h)
            return dist_fn.send(h, me + 2)
        came = dist_fn.recv(h, me - 2)
        h = came * 0 if self.bug == "state not taken" else came
        for step in x[:, half:].unbind(1):
            h = self.cell(step, h)
        return self.out(h)


bf16 = torch.bfloat16
BUGS = (
    Bug(
        "no all-reduce behind a convolution of input channels",
        "tp",
        "forward",
        channels("no all-reduce"),
        (r"pool", r"fc\.input", r"fc"),
        (r"all-reduce is missing",),
    ),
    Bug(
        "its bias before the sum",
        "tp",
        "forward",
        channels("bias before the sum"),
        (r"mix", r"fc\.input"),
        (r"3 × the bias mix\.bias",),
    ),
    Bug(
        "its bias before the sum, bfloat16",
        "tp",
        "forward",
        channels("bias before the sum", bf16),
        (r"mix", r"fc\.input"),
        (r"3 × the bias mix\.bias",),
    ),
    Bug(
        "its bias forgotten",
        "tp",
        "forward",
        channels("bias forgotten"),
        (r"mix", r"fc\.input"),
        (r"-1 × the bias mix\.bias",),
    ),
    Bug(
        "its sum by `ccl.all_reduce` in training",
        "tp",
        "backward",
        channels("ccl.all_reduce"),
        (r".*grad", r"fc\.input"),
        (r"ccl\.all_reduce|no gradient",),
        None,
    ),
    Bug("sign of one worker", "tp", "forward", channels("sign on one"), (r"fc\.input",), (), (1,)),
    Bug(
        "groups of a norm over a part of the channels",
        "tp",
        "forward",
        channels("groups"),
        (r"norm",),
        (r"GroupNorm",),
    ),
    Bug(
        "output channels reversed on one worker",
        "tp",
        "weights",
        channels("channels reversed on one"),
        (r"stem\.weight",),
        (r"worker 1|revers|order",),
        (1,),
    ),
    Bug(
        "input channels interleaved",
        "tp",
        "weights",
        channels("interleaved channels"),
        # with two channels a worker it lies as a fused weight of two parts would
        (r"mix\.weight", r"mix", r"fc\.input"),
        (r"every 4th element along dim 1", r"mix\.weight.*segments=2"),
    ),
    Bug(
        "another dilation on one worker",
        "tp",
        "forward",
        channels("dilation on one"),
        (r"stem",),
        (r"worker 3: Conv2d",),
        (3,),
    ),
    Bug("no halo", "sp", "forward", rows("no halo"), (r"stem",)),
    Bug(
        "halo of the wrong side",
        "sp",
        "forward",
        rows("halo of the wrong side"),
        (r"stem",),
        (),
        (1, 2, 3),
    ),
    Bug(
        "norm's statistics of the part", "sp", "forward", rows("statistics of the part"), (r"norm",)
    ),
    Bug("pool sums means", "sp", "forward", rows("mean of sums"), (r"fc\.input",), (r"4 times",)),
    Bug(
        "pool of the part",
        "sp",
        "forward",
        rows("pool of the part"),
        (r"fc\.input",),
        (r"averaged over the workers",),
    ),
    Bug("batch norm of the part", "dp", "forward", batch("batch norm of the part"), (r"norm",)),
    Bug(
        "a running mean of one worker is old",
        "dp",
        "weights",
        batch("buffer of one"),
        (r"norm\.running_mean",),
        (),
        (2,),
    ),
    Bug(
        "one gradient not synchronised",
        "dp",
        "backward",
        batch("one gradient not synchronised"),
        (r"stem\.bias\.grad",),
        (r"of this gradient is missing",),
    ),
    Bug(
        "one gradient summed twice",
        "dp",
        "backward",
        batch("one gradient twice"),
        (r"fc\.weight\.grad",),
        (r"4 times the reference",),
    ),
    Bug(
        "two workers' parts of the batch swapped",
        "dp",
        "forward",
        batch("another part of the batch"),
        (r"(stem\.)?input",),
        (r"worker 0 holds worker 1's part",),
        (0, 1),
    ),
    Bug(
        "GRU: gates cut in one piece",
        "tp",
        "weights",
        gru("gates in one piece"),
        (r"cell\.(w_x|w_h|b)", r"cell"),
        (r"segments=3",),
    ),
    Bug(
        "GRU: state gathered in another order",
        "tp",
        "forward",
        gru("order of the state"),
        (r"cell",),
        (r"in the order 3, 0, 1, 2",),
    ),
    Bug(
        "GRU: state not reset on one worker",
        "tp",
        "forward",
        gru("state not reset on one"),
        (r"cell\.input\.1",),
        (),
        (3,),
    ),
    Bug(
        "GRU: a step skipped", "tp", "forward", gru("a step skipped on all"), (r"cell#3\.input\.0",)
    ),
    Bug(
        "GRU: no copy_to_region",
        "tp",
        "backward",
        gru("no copy"),
        (r"cell#4\.input\.1\.grad", r"cell(#3|#4)?(\.input.*)?\.grad", r"cell\.\w+\.grad"),
        (r"missing",),
    ),
    Bug(
        "GRU: detached between steps",
        "tp",
        "backward",
        gru("detached between steps"),
        (r"cell.*grad",),
        (r"gradient|detach",),
        None,
    ),
    Bug(
        "GRU: a bias of another worker",
        "tp",
        "weights",
        gru("a gate from another worker"),
        (r"cell\.b",),
        (r"worker 2 holds worker 0's part",),
        (2,),
    ),
    Bug(
        "GRU, bfloat16: state gathered in another order",
        "tp",
        "forward",
        gru("order of the state", bf16),
        (r"cell",),
        (r"in the order 3, 0, 1, 2",),
    ),
)

RIGHT = (
    Right("channels cut", "tp", channels()),
    Right("channels cut, bfloat16", "tp", channels(dtype=bf16)),
    Right("rows cut, with halos", "sp", rows()),
    Right("synchronised batch norm", "dp", batch()),
    Right("GRU by its gates", "tp", gru()),
    Right("GRU by its gates, bfloat16", "tp", gru(dtype=bf16)),
    Right("GRU, its own part by chunk, without a copy twice", "tp", gru("own part by chunk")),
)
