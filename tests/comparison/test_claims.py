"""What `discolab.compare` does not claim where it can't know, and what a step of training shows."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from discolab import Session, ccl, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison
from tests.comparison.families.case import place

pytestmark = pytest.mark.one_process


# -- stages, replicas and micro-batches ------------------------------------------------------------


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 12), nn.GELU())
        self.second = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


def _one_step(model: Stages, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(model(x), y).backward()


def _staged(model: Stages, parts: int, bug: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Two stages of two replicas each, a replica's half of the batch in so many micro-batches."""
    me, _ = place()
    stage, replica = divmod(me, 2)
    mine = x.chunk(2)[replica].chunk(parts), y.chunk(2)[replica].chunk(parts)
    for some, wanted in zip(*mine, strict=True):
        if stage == 0:
            h = model.first(some)
            ccl.send(h.detach(), me + 2)
            grad = torch.empty_like(h)
            ccl.recv(grad, me + 2)
            h.backward(grad)
        else:
            h = torch.empty(len(some), 12)
            ccl.recv(h, me - 2)
            h.requires_grad_()
            (F.mse_loss(model.second(h), wanted) / parts).backward()
            assert h.grad is not None
            ccl.send(h.grad * (bug != "zero" or replica == 0), me - 2)
    if bug == "alone" and stage == 1:
        return
    for parameter in (model.first, model.second)[stage].parameters():
        assert parameter.grad is not None
        group = [2 * stage, 2 * stage + 1]
        parameter.grad = ccl.all_reduce(parameter.grad, "avg", group=group)


def staged(session: Session, parts: int, bug: str = "") -> ProgramComparison:
    torch.manual_seed(0)
    model = Stages()
    held = session.call_packed(copy.deepcopy, model)
    run = session.call_packed(lambda own: partial(_staged, own, parts, bug), held)
    inputs = torch.randn(8, 6), torch.randn(8, 3)
    return compare(partial(_one_step, model), run, inputs, module=held, session=session)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_of_replicas_raise_no_alarm(four: Session, parts: int) -> None:
    found = staged(four, parts)
    assert found.agrees, found
    assert len(found.gradients) >= 6
    if parts > 1:
        assert "which part of the batch" in " ".join(p.problem for p in found.unmatched)


def test_a_bug_behind_micro_batches_of_replicas_is_found_in_the_gradients(four: Session) -> None:
    first = staged(four, 2, "zero").first
    assert first is not None
    assert first.point.name == "first.0.weight.grad"
    first = staged(four, 2, "alone").first
    assert first is not None
    assert first.point.name == "second.2.weight.grad"
    assert "the all-reduce of this gradient is missing" in first.causes[0]
    assert first.ranks == (2, 3)


def test_the_title_and_the_counts_do_not_contradict_each_other(four: Session) -> None:
    def nothing(x: torch.Tensor) -> None:
        return None

    shown = repr(compare(nothing, nothing, torch.randn(4, 3), session=four))
    assert "nothing that it computes was compared" in shown
    assert "compared: 1 input of the program" in shown


# -- factors ---------------------------------------------------------------------------------------


def test_a_factor_alone_is_no_certain_cause(four: Session) -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 1

    first = compare(ours, theirs, torch.randn(5, 4), session=four).first
    assert first is not None
    assert "is 0.5 times the reference (perhaps 1/√4" in first.causes[0]


# -- an optimizer's step in the program ------------------------------------------------------------


def _trained(model: nn.Module, factor: float, after: float, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)
    optimizer.step()
    optimizer.zero_grad()
    result: torch.Tensor = model(x) * after
    return result


def trained(session: Session, factor: float) -> ProgramComparison:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    held = session.call_packed(copy.deepcopy, model)
    run = session.call_packed(lambda own: partial(_trained, own, factor, 1.0), held)
    program = partial(_trained, model, 1.0, 1.0)
    return compare(program, run, torch.randn(5, 4), module=held, session=session)


def test_behind_a_step_the_parameters_may_differ(four: Session) -> None:
    assert trained(four, 1.0).agrees
    first = trained(four, 1.5).first
    assert first is not None
    assert first.point.words == "output of #2"
    assert "its parameters differ since an optimizer's step before this call, or" in first.place


# -- gradients -------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """A softmax over a set, of which each worker has a part."""

    def __init__(self, sharded: str = "") -> None:
        super().__init__()
        self.k, self.v, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.sharded = sharded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.k(x).tanh().exp()
        total, size = (weights * self.v(x)).sum(1), weights.sum(1)
        if self.sharded:
            add: Any = getattr(dist_fn, self.sharded)
            total, size = add(total), add(size)
        result: torch.Tensor = self.head(total / size)
        return result


def _pooled(state: dict[str, torch.Tensor], add: str) -> Pooled:
    model = Pooled(add)
    model.load_state_dict(state)
    for name, parameter in model.named_parameters():
        if not name.startswith("head"):
            parameter.register_hook(lambda grad: ccl.all_reduce(grad.contiguous()))
    return model


@pytest.mark.parametrize("loss", [None, lambda out: out.square().mean()])
def test_a_sum_with_the_wrong_backward_is_no_mean_over_parts(four: Session, loss: Any) -> None:
    def found(add: str) -> ProgramComparison:
        torch.manual_seed(0)
        model, x = Pooled(), torch.randn(2, 16, 8)
        run = four.call_packed(_pooled, model.state_dict(), add)
        return compare(model, run, x, layouts={"input": Shard(1)}, loss=loss)

    assert found("reduce_from_region").agrees
    wrong = found("all_reduce")
    assert wrong.first is not None
    assert wrong.first.point.words in ("gradient of the output of v", "gradient of the output of k")
    assert "is 4 times the reference" in wrong.first.causes[0]
    assert not wrong.notes


# -- tolerances ------------------------------------------------------------------------------------


def test_a_sum_has_no_wider_tolerance_than_other_values(four: Session) -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    def theirs(factor: float, x: torch.Tensor) -> torch.Tensor:
        part = x.chunk(4)[place()[0]]
        return (part * part).sum() * factor

    torch.manual_seed(0)
    x = torch.rand(64).bfloat16()
    judged = {}
    for factor in (1.0, 0.8):
        result = compare(ours, partial(theirs, factor), x, session=four, backward=False)
        (point,) = [p for p in result.points if p.kind == "result"]
        judged[factor] = point.partial and point.agrees
    assert judged == {1.0: True, 0.8: False}


# -- sparse tensors --------------------------------------------------------------------------------


class Bags(nn.Module):
    """A table with a sparse gradient, and a graph as a sparse buffer."""

    def __init__(self, bug: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 8, mode="sum", sparse=True)
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.bug = bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bags = self.table(x)
        if self.bug and bags.requires_grad:
            bags.register_hook(lambda grad: grad * 2)
        result: torch.Tensor = torch.sparse.mm(self.graph, bags)  # type: ignore[arg-type]
        return result


def _bags(state: dict[str, torch.Tensor], bug: bool) -> Bags:
    model = Bags(bug and place()[0] == 2)
    model.load_state_dict(state)
    return model


def test_sparse_gradients_and_buffers_are_compared(four: Session) -> None:
    model, x = Bags(), torch.randint(0, 30, (4, 3))
    assert compare(model, four.call_packed(_bags, model.state_dict(), False), x).agrees
    found = compare(model, four.call_packed(_bags, model.state_dict(), True), x)
    assert found.first is not None
    assert found.first.point.words == "gradient of the parameter table.weight"
    assert found.first.ranks == (2,)


# -- settings that differ --------------------------------------------------------------------------


class Normed(nn.Module):
    """A norm of which the scale may be applied twice."""

    def __init__(self, eps: float, twice: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=eps)
        nn.init.constant_(self.norm.weight, 2.0)
        if twice:
            self.norm.register_forward_hook(lambda m, _, out: out * m.weight, prepend=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x)
        return result


@pytest.mark.parametrize(
    ("eps", "twice", "cause"), [(1e-1, False, "eps=0.1"), (1e-8, True, ""), (1e-1, True, "perhaps")]
)
def test_a_setting_is_a_cause_where_it_makes_the_difference(
    four: Session, eps: float, twice: bool, cause: str
) -> None:
    found = compare(Normed(1e-7), four.call_packed(Normed, eps, twice), torch.randn(3, 8))
    assert found.first is not None
    assert found.first.point.words == "output of norm"
    told = [words for words in found.first.causes if "eps" in words]
    if not cause:
        assert not told, found
        assert any("eps=1e-08" in note for note in found.notes), found
    else:
        assert cause in told[0], found
        assert told[0].startswith("perhaps: ") == twice, found
        assert not any("eps" in note for note in found.notes), found


class Routed(nn.Module):
    """Each row goes to the expert of its largest element; a worker may have one of the experts."""

    def __init__(self, experts: range, drops: bool = False) -> None:
        super().__init__()
        self.drops = drops
        self.experts = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in experts})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number, expert in self.experts.items():
            rows = (x.argmax(1) == int(number)).nonzero()[:, 0]
            rows = rows[:-1] if self.drops else rows
            y = y.index_add(0, rows, expert(x[rows]))
        return y if len(self.experts) > 1 else dist_fn.all_reduce(y)


def test_an_expert_with_another_number_of_rows_is_named(four: Session) -> None:
    def make(state: dict[str, torch.Tensor]) -> nn.Module:
        rank, _ = place()
        model = Routed(range(rank, rank + 1), drops=rank == 1)
        model.load_state_dict({k: v for k, v in state.items() if k.split(".")[1] == str(rank)})
        return model

    torch.manual_seed(0)
    model, x = Routed(range(4)), torch.randn(32, 4)
    found = compare(model, four.call_packed(make, model.state_dict()), x)
    rows = int((x.argmax(1) == 1).sum())
    assert (
        f"perhaps it begins at the input of experts.1: the shapes fit no layout: [{rows - 1}, 4] "
        f"on worker 1, reference [{rows}, 4]"
    ) in str(found)
