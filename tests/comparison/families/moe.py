"""A mixture of experts, one expert on each worker: tokens on all, or a part of them on each.

`Mixture` is one layer on tokens [count, DIM]: a router, the two best of four experts, and a shared
one, between two linears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from discolab import Session, ccl, compare, note
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

from .case import Bug, Right, State, place, process_group, uneven

DIM, HIDDEN, EXPERTS, COUNT = 16, 24, 4, 32


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weight of each expert for each token; of all but two it is zero."""
        best, index = self.gate(x).softmax(-1).topk(2)
        best = best / best.sum(-1, keepdim=True)
        return torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, index, best)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = Router(), Expert()
        self.experts = nn.ModuleDict({str(number): Expert() for number in range(EXPERTS)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x)
        y = torch.zeros_like(x)
        for number, expert in self.experts.items():
            y = y + weights[:, int(number), None] * expert(x)
        return y + self.shared(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.moe, self.head = Layer(), nn.Linear(DIM, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.moe(self.norm(x))
        return self.head(x)


# -- an expert on each worker, all tokens on all ---------------------------------------------------


class ExpertParallel(Layer):
    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me, bug = place()[0], self.bug
        if bug == "router rounded on one" and me == 3:
            weights = self.router(x.bfloat16().float())
        else:
            weights = self.router(x)
        if bug == "noise on one" and me == 1:
            weights = weights + 0.05 * torch.rand_like(weights)
        if bug != "router's gradient":
            weights = dist_fn.copy_to_region(weights)
        if bug == "router's gradient twice":
            weights = dist_fn.copy_to_region(weights)
        mine = (me + 1) % EXPERTS if bug == "other expert's weights" else me
        into = x if bug == "no copy" else dist_fn.copy_to_region(x)
        y = self.experts[str(me)](into)
        weight = weights[:, mine, None]
        if bug == "capacity on one" and me == 2:
            weight = weight * (weight.ne(0).cumsum(0) <= 8)
        y = weight * y
        if bug == "weighted twice":
            y = weight * y
        if bug == "NaN on one" and me == 0:
            y = y / weight * weight
        if bug == "shared on each":
            return dist_fn.reduce_from_region(y + self.shared(x))
        if bug == "no all-reduce":
            return y + self.shared(x)
        if bug == "ccl.all_reduce":
            return ccl.all_reduce(y) + self.shared(x)
        y = dist_fn.reduce_from_region(y)
        if bug == "summed twice":
            y = dist_fn.reduce_from_region(y)
        if bug == "shared forgotten":
            return y
        return y + self.shared(x)


def expert_parallel(state: State, bug: str, dtype: torch.dtype = torch.float32) -> Mixture:
    model = Mixture().to(dtype)
    model.load_state_dict(state)
    me = place()[0]
    layer = model.moe
    mine = layer.experts[str(me)]
    if bug == "experts swapped" and me >= 2:
        mine.load_state_dict(layer.experts[str(5 - me)].state_dict())
    if bug == "stale bias" and me == 1:
        with torch.no_grad():
            mine.down.bias[3] += 0.25
    layer.experts = nn.ModuleDict({str(me): mine})
    layer.__class__ = ExpertParallel
    layer.bug = bug
    if bug == "one in double rate":
        layer.register_forward_hook(lambda _m, _a, y: F.dropout(y, 0.1) if me == 1 else y)
    return model


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(COUNT, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)


def reference_of(dtype: torch.dtype = torch.float32) -> Mixture:
    return uneven(Mixture(), 3).to(dtype)  # type: ignore[return-value]


def ep(bug: str = "", **options: Any) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = reference_of()
        model = session.call_packed(expert_parallel, reference.state_dict(), bug)
        return compare(reference, model, tokens(), **options)

    return run


# -- an expert on each worker, a part of the tokens on each: all-to-all ----------------------------


class Exchanged(Layer):
    """Each token goes to all experts, as pieces that are exchanged, and comes back weighted."""

    bug = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me, n = place()
        weights = self.router(x)
        there = torch.cat([x] * n)  # a copy for each expert
        there = dist_fn.all_to_all(there, 0)
        y = self.experts[str(me)](there)
        y = dist_fn.all_to_all(y, 0).view(n, len(x), DIM)
        if self.bug == "experts in another order":
            y = y.roll(1, 0)
        if self.bug == "not sent back":
            y = self.experts[str(me)](there).view(n, len(x), DIM)
        return (weights.t().unsqueeze(-1) * y).sum(0) + self.shared(x)


def exchanged(state: State, bug: str) -> Mixture:
    model = expert_parallel(state, "")
    model.moe.__class__ = Exchanged
    model.moe.bug = bug
    for name, parameter in model.named_parameters():
        if "experts" not in name and not (
            bug == "a gradient not synchronised" and name == "moe.router.gate.weight"
        ):
            parameter.register_hook(ccl.all_reduce)
        if "experts" in name and bug == "experts' gradients summed too":
            parameter.register_hook(ccl.all_reduce)
    return model


def a2a(bug: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = reference_of()
        model = session.call_packed(exchanged, reference.state_dict(), bug)
        return compare(reference, model, tokens(), layouts={"input": "shard(0)"})

    return run


# -- functional, with notes ------------------------------------------------------------------------


def functional_reference(state: State) -> Callable[[torch.Tensor], torch.Tensor]:
    p = {name: value.clone().requires_grad_() for name, value in state.items()}

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(F.linear(x, p["embed.weight"], p["embed.bias"]), (DIM,))
        scores = note("scores", F.linear(h, p["moe.router.gate.weight"]).softmax(-1))
        up = [F.silu(F.linear(h, p[f"moe.experts.{e}.up.weight"])) for e in range(EXPERTS)]
        y = [
            scores[:, e, None] * F.linear(up[e], p[f"moe.experts.{e}.down.weight"])
            for e in range(EXPERTS)
        ]
        return note("mixed", torch.stack(y).sum(0)) @ p["head.weight"].t()

    return forward


def functional_parallel(state: State, bug: str) -> Callable[[torch.Tensor], torch.Tensor]:
    me, _ = place()
    p = {name: value.clone().requires_grad_() for name, value in state.items()}

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(F.linear(x, p["embed.weight"], p["embed.bias"]), (DIM,))
        logits = F.linear(h, p["moe.router.gate.weight"])
        if bug == "softmax of the part":
            scores = dist_fn.gather_from_region(dist_fn.scatter_to_region(logits).softmax(-1))
        else:
            scores = logits.softmax(-1)
        scores = note("scores", scores)
        if bug != "no copy":
            scores, h = dist_fn.copy_to_region(scores), dist_fn.copy_to_region(h)
        up = F.silu(F.linear(h, p[f"moe.experts.{me}.up.weight"]))
        y = scores[:, me, None] * F.linear(up, p[f"moe.experts.{me}.down.weight"])
        if bug == "average":
            y = dist_fn.all_reduce(y, "avg")
        elif bug != "no all-reduce":
            y = dist_fn.reduce_from_region(y)
        y = note("mixed", y)
        return y @ p["head.weight"].t()

    return forward


def functional(bug: str = "") -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        state = {name: p.detach() for name, p in reference_of().named_parameters()}
        program = session.call_packed(functional_parallel, state, bug)
        return compare(functional_reference(state), program, tokens())

    return run


# -- the batch is cut: DDP -------------------------------------------------------------------------


def divide(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= place()[1]


def data_parallel(state: State, bug: str) -> nn.Module:
    process_group()
    model = Mixture()
    model.load_state_dict(state)
    if bug == "one not synchronised":
        model.head.bias.requires_grad_(False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if bug == "averaged again":
        for parameter in model.moe.shared.parameters():
            parameter.register_post_accumulate_grad_hook(divide)
    if bug == "changed after the wrapping" and place()[0] == 2:
        with torch.no_grad():
            model.norm.weight.mul_(1.5)
    return wrapped


def ddp(bug: str = "", **options: Any) -> Callable[[Session], ProgramComparison]:
    def run(session: Session) -> ProgramComparison:
        reference = reference_of()
        model = session.call_packed(data_parallel, reference.state_dict(), bug)
        return compare(reference, model, tokens(), layouts={"input": "shard(0)"}, **options)

    return run


MOE = r"moe"
BUGS = (
    Bug(
        "experts not summed",
        "ep",
        "forward",
        ep("no all-reduce"),
        (MOE,),
        (r"all-reduce is missing",),
    ),
    Bug("experts summed twice", "ep", "forward", ep("summed twice"), (MOE,), (r"4 times|off by",)),
    Bug(
        "shared expert added before the sum",
        "ep",
        "forward",
        ep("shared on each"),
        (MOE,),
        (r"3 × the output of moe\.shared",),
    ),
    Bug(
        "shared expert forgotten",
        "ep",
        "forward",
        ep("shared forgotten"),
        (MOE,),
        (r"-1 × the output of moe\.shared|did not run moe\.shared",),
    ),
    Bug("weights of another expert's", "ep", "forward", ep("other expert's weights"), (MOE,)),
    Bug("weighted twice", "ep", "forward", ep("weighted twice"), (MOE,)),
    Bug("capacity on one worker only", "ep", "forward", ep("capacity on one"), (MOE,)),
    Bug(
        "0 / 0 for tokens that one worker has not",
        "ep",
        "forward",
        ep("NaN on one"),
        (MOE,),
        (r"NaN",),
    ),
    Bug(
        "router's input rounded on one worker",
        "ep",
        "forward",
        ep("router rounded on one"),
        (r"moe\.router(\.gate)?\.input",),
        (r"worker 3.*bfloat16",),
        (3,),
    ),
    Bug("noise on the router's weights on one worker", "ep", "forward", ep("noise on one"), (MOE,)),
    Bug(
        "two experts swapped",
        "ep",
        "weights",
        ep("experts swapped"),
        (r"moe\.experts\.2\.up\.weight", r"moe\.experts\.2\.up\.bias"),
        (r"worker 2 holds the reference's moe\.experts\.3\.up",),
        (2,),
    ),
    Bug(
        "an expert's bias is stale in one element",
        "ep",
        "weights",
        ep("stale bias"),
        (r"moe\.experts\.1\.down\.bias",),
        (),
        (1,),
    ),
    Bug(
        "router's gradient not summed",
        "ep",
        "backward",
        ep("router's gradient"),
        (r"moe\.router\.grad", r"moe\.router\.gate.*grad"),
        (r"missing",),
    ),
    Bug(
        "router's gradient summed twice",
        "ep",
        "backward",
        ep("router's gradient twice"),
        (r"moe\.router\.grad", r"moe\.router\.gate.*grad"),
        (r"4 times the reference",),
    ),
    Bug(
        "experts' input gradient not summed",
        "ep",
        "backward",
        ep("no copy"),
        (r"moe\.input\.grad", r"norm\.grad"),
        (r"missing",),
    ),
    Bug(
        "`ccl.all_reduce` of the experts in training",
        "ep",
        "backward",
        ep("ccl.all_reduce"),
        (r"moe.*grad", MOE),
        (r"ccl\.all_reduce|no gradient",),
        None,
    ),
    Bug(
        "all-to-all: experts in another order",
        "ep",
        "forward",
        a2a("experts in another order"),
        (MOE,),
    ),
    Bug("all-to-all: not sent back", "ep", "forward", a2a("not sent back"), (MOE,)),
    Bug(
        "all-to-all: router's gradient not synchronised",
        "ep",
        "backward",
        a2a("a gradient not synchronised"),
        (r"moe\.router\.gate\.weight\.grad",),
        (r"of this gradient is missing",),
    ),
    Bug(
        "all-to-all: experts' gradients summed too",
        "ep",
        "backward",
        a2a("experts' gradients summed too"),
        (r"moe\.experts\..*\.grad",),
        (),
        None,
    ),
    Bug(
        "functional: softmax over the part",
        "ep",
        "forward",
        functional("softmax of the part"),
        (r"scores",),
    ),
    Bug(
        "functional: experts not summed",
        "ep",
        "forward",
        functional("no all-reduce"),
        (r"mixed",),
        (r"all-reduce is missing",),
    ),
    Bug(
        "functional: experts averaged",
        "ep",
        "forward",
        functional("average"),
        (r"mixed",),
        (r"reference / 4",),
    ),
    Bug(
        "functional: gradient of the scores not summed",
        "ep",
        "backward",
        functional("no copy"),
        (r"scores\.grad",),
        (r"missing",),
    ),
    Bug(
        "DDP: some gradients averaged again",
        "dp",
        "backward",
        ddp("averaged again"),
        (r"moe\.shared\.(down|up)\.(weight|bias)\.grad",),
        (r"reference / 4",),
    ),
    Bug(
        "DDP: a parameter frozen",
        "dp",
        "backward",
        ddp("one not synchronised"),
        (r"head\.bias\.grad",),
        (r"no gradient",),
    ),
    Bug(
        "DDP: weights changed on one worker",
        "dp",
        "weights",
        ddp("changed after the wrapping"),
        (r"norm\.weight",),
        (r"1\.5 times",),
        (2,),
    ),
)

RIGHT = (
    Right("an expert on each worker", "ep", ep()),
    Right("forward only", "ep", ep(backward=False)),
    Right("all-to-all", "ep", a2a()),
    Right("functional, with notes", "ep", functional()),
    Right("DDP", "dp", ddp()),
    Right("DDP, a mean as loss", "dp", ddp(loss=lambda y: y.square().mean())),
    Right("DDP, a sum as loss", "dp", ddp(loss=lambda y: y.square().sum())),
)
