"""A state-space mixer with gates (Mamba's kind) and a mixture of experts, two of eight for a token.

The mixer over channels (tensor parallel) or over the sequence: each worker takes the last state, and
the last inputs of the convolution, from the worker before it. The experts over the workers: each
token goes to the worker of its experts and back.
"""

# ruff: noqa: E501 - a bug is a piece of the text, as it stands there

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import linear, pad, silu, softplus

from discolab import Session, ccl, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from tests.comparison.second_set.planted import Bug

WIDTH, INNER, STATE, RANK, TAPS, EXPERTS, HIDDEN, LENGTH = 24, 32, 4, 4, 3, 8, 16, 16


def scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """``h = exp(dt a) h + dt b x``, and what is read of it at each step; the last h too."""
    out = []
    for t in range(x.shape[1]):
        decay = (dt[:, t, :, None] * a).exp()
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        out.append((h * c[:, t, None]).sum(-1))
    return torch.stack(out, 1), h


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_x, self.in_z = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.conv = nn.Conv1d(INNER, INNER, TAPS, groups=INNER)
        self.x_proj = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(RANK, INNER)
        self.a_log = nn.Parameter(torch.rand(INNER, STATE))
        self.d = nn.Parameter(torch.rand(INNER))
        self.out = nn.Linear(INNER, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_x(u), self.in_z(u)
        x = silu(self.conv(pad(x.mT, (TAPS - 1, 0))).mT)
        dt, b, c = self.x_proj(x).split([RANK, STATE, STATE], -1)
        dt = softplus(self.dt_proj(dt))
        y, _ = scan(x, dt, -self.a_log.exp(), b, c, x.new_zeros(x.shape[0], INNER, STATE))
        y = note("scanned", y) + self.d * x
        return self.out(y * silu(z))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.up(x)))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, chosen = linear(x, self.weight).softmax(-1).topk(2, -1)
        return gates / gates.sum(-1, keepdim=True), chosen


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            where, slot = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, where, expert(x[where]) * gates[where, slot, None])
        return y


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(WIDTH), Mixer()
        self.norm2, self.mixture = nn.LayerNorm(WIDTH), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mixture(self.norm2(x).flatten(0, 1)).view_as(x)


# Over the workers


def me() -> int:
    return current_worker().rank


def world() -> int:
    return current_worker().world_size


def part(x: Tensor, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(x.detach().chunk(world(), dim)[me()].clone())


class ChannelMixer(Mixer):
    """Channels of the mixer over the workers."""

    def __init__(self, whole: Mixer) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())
        for layer in (self.in_x, self.in_z, self.dt_proj):
            layer.weight, layer.bias = part(layer.weight), part(layer.bias)
        self.conv = nn.Conv1d(INNER // world(), INNER // world(), TAPS, groups=INNER // world())
        self.conv.weight, self.conv.bias = part(whole.conv.weight), part(whole.conv.bias)
        self.x_proj.weight, self.out.weight = part(self.x_proj.weight, 1), part(self.out.weight, 1)
        self.a_log, self.d = part(self.a_log), part(self.d)

    def forward(self, u: Tensor) -> Tensor:
        u = dist_fn.copy_to_region(u)
        x, z = self.in_x(u), self.in_z(u)
        x = silu(self.conv(pad(x.mT, (TAPS - 1, 0))).mT)
        parameters = dist_fn.reduce_from_region(self.x_proj(x))
        parameters = dist_fn.copy_to_region(parameters)
        dt, b, c = parameters.split([RANK, STATE, STATE], -1)
        dt = softplus(self.dt_proj(dt))
        y, _ = scan(x, dt, -self.a_log.exp(), b, c, x.new_zeros(*x.shape[::2], STATE))
        y = note("scanned", y) + self.d * x
        y = dist_fn.reduce_from_region(linear(y * silu(z), self.out.weight))
        return y + self.out.bias


class SequenceMixer(Mixer):
    """The sequence over the workers."""

    def __init__(self, whole: Mixer) -> None:
        super().__init__()
        self.load_state_dict(whole.state_dict())

    def forward(self, u: Tensor) -> Tensor:
        x, z = self.in_x(u), self.in_z(u)
        x = self.before(x, x[:, -(TAPS - 1) :])
        x = silu(self.conv(x.mT).mT)
        dt, b, c = self.x_proj(x).split([RANK, STATE, STATE], -1)
        dt = softplus(self.dt_proj(dt))
        state = x.new_zeros(x.shape[0], INNER, STATE)
        if me() > 0:
            state = dist_fn.recv(state, me() - 1)
        y, state = scan(x, dt, -self.a_log.exp(), b, c, state)
        if me() < world() - 1:
            y = y + dist_fn.send(state, me() + 1)
        y = note("scanned", y) + self.d * x
        return self.out(y * silu(z))

    def before(self, x: Tensor, last: Tensor) -> Tensor:
        """`x` behind the last inputs of the worker before."""
        halo = torch.zeros_like(last)
        if me() < world() - 1:
            x = x + dist_fn.send(last, me() + 1)
        if me() > 0:
            halo = dist_fn.recv(halo, me() - 1)
        return torch.cat([halo, x], 1)


class SplitMixture(nn.Module):
    """Experts over the workers, tokens too: they go to their experts and back."""

    def __init__(self, whole: Mixture) -> None:
        super().__init__()
        self.router = Router()
        self.router.load_state_dict(whole.router.state_dict())
        self.local = EXPERTS // world()
        first = me() * self.local
        self.experts = nn.ModuleDict()
        for e in range(first, first + self.local):
            self.experts[str(e)] = Expert()
            self.experts[str(e)].load_state_dict(whole.experts[e].state_dict())

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x)
        order = chosen.flatten().argsort(stable=True)
        sent = x.repeat_interleave(2, 0)[order]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        table = ccl.all_gather(counts[None])
        to = counts.view(world(), -1).sum(1).tolist()
        mine = table.view(world(), world(), -1)[:, me()]
        come = mine.sum(1).tolist()
        got = dist_fn.all_to_all(sent, input_split_sizes=to, output_split_sizes=come)
        first = me() * self.local
        whose = (
            torch.arange(first, first + self.local)
            .repeat(world())
            .repeat_interleave(mine.flatten())
        )
        out = torch.zeros_like(got)
        for e, expert in self.experts.items():
            where = (whose == int(e)).nonzero()[:, 0]
            out = out.index_add(0, where, expert(got[where]))
        back = dist_fn.all_to_all(out, input_split_sizes=come, output_split_sizes=to)
        back = back[order.argsort()]
        return (back.view(-1, 2, WIDTH) * gates[..., None]).sum(1)


class ShardedHybrid(nn.Module):
    def __init__(self, whole: Hybrid, how: str) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(WIDTH), Mixer()
        self.norm2, self.mixture = nn.LayerNorm(WIDTH), Mixture()
        self.load_state_dict(whole.state_dict())
        self.how = how
        if how == "channels":
            self.mixer = ChannelMixer(whole.mixer)
            return
        self.mixer = SequenceMixer(whole.mixer)
        self.mixture = SplitMixture(whole.mixture)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        h = self.norm2(x)
        return x + self.mixture(h.flatten(0, 1)).view_as(x)


# Programs


def seeded() -> tuple[Hybrid, Tensor]:
    torch.manual_seed(3)
    return Hybrid(), torch.randn(1, LENGTH, WIDTH)


def channels(sess: Session, dtype: torch.dtype = torch.float32) -> Any:
    model, x = seeded()
    return compare(model, sess.call_packed(ShardedHybrid, model, "channels"), x)


def backward(model: nn.Module, sharded: bool, x: Tensor) -> Tensor:
    """Forward and backward of a step; the gradients of what all workers have are summed."""
    y = model(x)
    (y**2).sum().backward()
    if sharded:
        for name, p in model.named_parameters():
            if "experts" not in name:
                ccl.all_reduce_(p.grad)
    return y.detach()


def sequence(sess: Session) -> Any:
    model, x = seeded()
    sharded = sess.call_packed(ShardedHybrid, model, "sequence")
    run = sess.call_packed(partial, backward, sharded, True)
    layouts = {"input": Shard(1)}
    return compare(partial(backward, model, False), run, x, module=sharded, layouts=layouts)


def mixture(sess: Session) -> Any:
    """The mixture alone; tokens are split over the workers."""
    model, x = seeded()
    sharded = sess.call_packed(lone_mixture, model)
    return compare(model.mixture, sharded, x[0].repeat(4, 1), layouts={"input": Shard(0)})


def lone_mixture(whole: Hybrid) -> nn.Module:
    mixture = ShardedHybrid(whole, "sequence").mixture
    mixture.router.weight.register_hook(lambda grad: ccl.all_reduce(grad))
    return mixture


RIGHT = ["channels", "sequence", "mixture"]

HARMLESS = [
    Bug(
        "experts run in another order",
        "mixture",
        "        for e, expert in self.experts.items():",
        "        for e, expert in reversed(self.experts.items()):",
    ),
    Bug(
        "decay as a power of two",
        "channels",
        "        dt = softplus(self.dt_proj(dt))\n        y, _ = scan(x, dt, -self.a_log.exp(), b, c, x.new_zeros(*",
        "        dt = (1 + self.dt_proj(dt).exp()).log()\n        y, _ = scan(x, dt, -self.a_log.exp(), b, c, x.new_zeros(*",
    ),
]

BUGS = [
    Bug(
        "parameters of the scan not summed",
        "channels",
        "        parameters = dist_fn.reduce_from_region(self.x_proj(x))",
        "        parameters = self.x_proj(x)",
        "mixer.x_proj: output, forward",
        "all",
        "x_proj is cut by rows and its sum is missing",
        found=r"mixer\.x_proj",
        accept="an all-reduce is missing",
    ),
    Bug(
        "gradient of the scan's parameters not summed",
        "channels",
        "        parameters = dist_fn.copy_to_region(parameters)\n",
        "",
        "mixer.x_proj: gradient of its output, or of the input of dt_proj",
        "all",
        "copy_to_region is missing after the sum: partial gradients",
        found=r"mixer\.(x_proj|dt_proj\.input)\.grad",
        accept="missing in backward",
    ),
    Bug(
        "skip weights not loaded on worker 2",
        "channels",
        "        self.a_log, self.d = part(self.a_log), part(self.d)",
        """        self.a_log, self.d = part(self.a_log), part(self.d)
        if me() == 2:
            self.d.data.fill_(1.0)""",
        "mixer.d, parameter",
        (2,),
        "worker 2 did not load it: all ones",
        found=r"mixer\.d",
        accept="is 1 in every element on worker 2",
    ),
    Bug(
        "bias of out on every worker, functional",
        "channels",
        "        y = dist_fn.reduce_from_region(linear(y * silu(z), self.out.weight))\n        return y + self.out.bias",
        "        y = linear(y * silu(z), self.out.weight) + self.out.bias\n        return dist_fn.reduce_from_region(y)",
        "mixer: output (operation: the sum), forward",
        "all",
        "bias is added on every worker before the sum",
        found="mixer",
        accept=r"3 × the bias mixer\.out\.bias",
    ),
    Bug(
        "the scan starts at zero on each worker",
        "sequence",
        """        if me() > 0:
            state = dist_fn.recv(state, me() - 1)
        y, state = scan(x, dt, -self.a_log.exp(), b, c, state)
        if me() < world() - 1:
            y = y + dist_fn.send(state, me() + 1)
""",
        "        y, state = scan(x, dt, -self.a_log.exp(), b, c, state)\n",
        "note scanned, forward",
        (1, 2, 3),
        "the state of the sequence's earlier part is not handed on",
        found="scanned",
    ),
    Bug(
        "the state comes without its gradient",
        "sequence",
        """            state = dist_fn.recv(state, me() - 1)
        y, state = scan(x, dt, -self.a_log.exp(), b, c, state)
        if me() < world() - 1:
            y = y + dist_fn.send(state, me() + 1)
""",
        """            ccl.recv(state, me() - 1)
        y, state = scan(x, dt, -self.a_log.exp(), b, c, state)
        if me() < world() - 1:
            ccl.send(state.detach(), me() + 1)
""",
        "gradient of mixer.x_proj's output (first value before the scan in backward)",
        (0, 1, 2),
        "the gradient through the state handed on is cut by detach",
        found=r"mixer\.(x_proj|dt_proj)\.grad",
    ),
    Bug(
        "the convolution's halo is the first inputs",
        "sequence",
        "x[:, -(TAPS - 1) :])",
        "x[:, : TAPS - 1])",
        "mixer.conv: input, forward",
        (1, 2, 3),
        "the wrong end of the neighbour's part is sent",
        found=r"mixer\.conv(\.input)?",
    ),
    Bug(
        "tokens come back in the order of experts",
        "mixture",
        "        back = back[order.argsort()]\n",
        "",
        "output of the program, forward",
        "all",
        "the sort by experts is not undone",
        found="output",
    ),
    Bug(
        "tokens come back by the sort applied twice",
        "mixture",
        "back[order.argsort()]",
        "back[order]",
        "output of the program, forward",
        "all",
        "the permutation in place of its inverse",
        found="output",
    ),
    Bug(
        "first experts on all workers",
        "mixture",
        "self.experts[str(e)].load_state_dict(whole.experts[e].state_dict())",
        "self.experts[str(e)].load_state_dict(whole.experts[e - first].state_dict())",
        "experts.2.up.weight, parameter",
        (1,),
        "the index of an expert is local: workers 1-3 hold experts 0 and 1 in place of theirs",
        found=r"experts\.2\.up\.weight",
        accept=r"worker 1 holds the reference's experts\.0\.up\.weight",
    ),
    Bug(
        "gates sum to less than one",
        "mixture",
        "        gates, chosen = self.router(x)\n        order",
        "        gates, chosen = linear(x, self.router.weight).softmax(-1).topk(2, -1)\n        order",
        "router not run; or the output of the program, forward",
        "all",
        "the two gates aren't normalised",
        found="router|output",
    ),
    Bug(
        "no gradient for the router",
        "mixture",
        "* gates[..., None]).sum(1)",
        "* gates.detach()[..., None]).sum(1)",
        "router.weight or router's output, gradient",
        "all",
        "gates are detached",
        found=r"router(\.weight)?\.grad|router\.0\.grad",
        accept="have no gradient of it|does not require grad",
    ),
]
