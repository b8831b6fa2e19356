"""`discolab.compare`: it says "agrees" only of what was compared, and finds what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import discolab
from discolab import Session, compare, note
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison
from tests.comparison.transformer import make_reference, make_sharded, place, tokens

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    with discolab.make_session(2, "threads", devices="cpu", timeout=30) as session:
        yield session


Program = Callable[[torch.Tensor], Any]


def run(session: Session, ours: Program, theirs: Program) -> ProgramComparison:
    return compare(ours, theirs, X, session=session)


def spoiled(x: torch.Tensor, value: float) -> torch.Tensor:
    y = x.clone()
    y[0, 0] = value
    return y


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (lambda x: x * math.inf, lambda x: -x * math.inf, "infinite"),
        (lambda x: x / 0, lambda x: x / 0 - x / 0, "NaN"),
        (lambda x: x / 0 - x / 0, lambda x: x, "the reference holds NaN"),
        (lambda x: spoiled(x, math.nan), lambda x: spoiled(x * 2, math.nan), "2 times"),
        (lambda x: spoiled(x, 1e7), lambda x: spoiled(x * 1.5, 1e7), ""),
        (lambda x: x.masked_fill(x > 0, -1e9), lambda x: (3 * x).masked_fill(x > 0, -1e9), ""),
        (lambda x: (x * 2).mean(), lambda x: (x * 3).mean(), "result of the program"),
        (lambda x: x, lambda x: x if place()[0] == 0 else None, "worker 1 has none"),
        (lambda x: None, lambda x: x, "the reference gives None, workers 0,1 give a tensor"),
        (lambda x: 3.5, lambda x: 3.6, ""),
        (lambda x: {"n": 3}, lambda x: {"n": 3 + place()[0]}, ""),
        (lambda x: "a", lambda x: "b", "the reference gives 'a', workers 0,1 give 'b'"),
        (lambda x: {"a": x, "b": -x}, lambda x: {"a": x}, "(b)"),
        (lambda x: x.long() + 2**60, lambda x: x.long() + 2**60 + 1, ""),
        (lambda x: note("h", x * 3) * 0, lambda x: note("h", x) * 0, "note 'h'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_is_not_said_to_agree(
    two: Session, ours: Program, theirs: Program, words: str
) -> None:
    found = run(two, ours, theirs)
    assert not found
    assert found.first is not None
    assert words in str(found.first)


def test_values_are_matched_by_their_keys(two: Session) -> None:
    found = run(two, lambda x: {"a": x, "b": -x}, lambda x: {"b": -x, "a": x})
    assert found.agrees, found
    assert len(found.gradients) == 3
    assert run(two, lambda x: (x, "s", None), lambda x: (x, "s")).agrees
    assert run(two, lambda x: {"w|": {"grad": x}}, lambda x: {"w|": {"grad": x}}).agrees


def test_the_title_says_if_not_all_was_compared(two: Session) -> None:
    more = run(two, lambda x: {"a": x}, lambda x: {"a": x, "b": x})
    assert "✓ agrees where it could be compared" in repr(more)
    assert "only on the workers: result (b)" in more.notes
    odd = run(two, lambda x: (x, object()), lambda x: (x, object()))
    assert "✓ agrees where it could be compared" in repr(odd)
    nothing = run(two, lambda x: None, lambda x: None)
    assert not nothing
    assert "nothing that it computes was compared" in repr(nothing)


def test_other_dtypes_and_nan_on_both_sides_are_told(two: Session) -> None:
    found = run(two, lambda x: x * 2, lambda x: x.double() * 2)
    assert any("dtypes differ: workers float64, reference float32" in n for n in found.notes)
    found = run(two, lambda x: spoiled(x, math.nan), lambda x: spoiled(x, math.nan))
    assert found.agrees
    assert any("NaN on both sides" in n for n in found.notes)


class Net(nn.Module):
    """Two layers; `bug` is what one worker does."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.bug = nn.Linear(4, 4), nn.Linear(4, 4), bug
        if bug == "frozen" and place()[0] == 1:
            self.a.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.bug == "skip" and place()[0] == 1:
            return x
        if self.bug == "more":
            self.b(x)
        return self.b(x)


def test_a_gradient_that_one_worker_has_not(two: Session) -> None:
    found = compare(Net(), two.call_packed(Net, "frozen"), X)
    assert found.first is not None
    assert found.first.ranks == (1,)
    assert "worker 1 has no gradient of it" in str(found.first)


def test_a_parameter_that_one_worker_has_not(two: Session) -> None:
    def without() -> nn.Module:
        model = Net()
        if place()[0] == 1:
            bias = model.a.bias.detach()
            model.a.bias = None
            model.a.register_forward_hook(lambda module, args, output: output + bias)
        return model

    found = compare(Net(), two.call_packed(without), X, backward=False)
    assert "worker 1 has no parameter a.bias" in found.notes
    assert "✓ agrees\n" not in repr(found)


def test_a_module_that_one_worker_does_not_run(two: Session) -> None:
    found = compare(Net(), two.call_packed(Net, "skip"), X)
    assert found.first is not None
    assert "worker 1 did not run b" in found.first.causes
    found = compare(Net(), two.call_packed(Net, "more"), X)
    assert "the reference does not call b#2, the workers do" in found.notes


class Stage(nn.Module):
    """A layer on each of two workers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(4, 4), nn.Linear(4, 4)
        setattr(self, "ab"[place()[0]], layers[place()[0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if place()[0] == 0:
            return dist_fn.send(self.a(x), 1)
        return self.b(dist_fn.recv(torch.empty(6, 4), 0))


def test_a_pipeline_that_returns_the_tokens_of_send(two: Session) -> None:
    found = compare(Net(), two.call_packed(Stage), X)
    assert found.agrees, found
    assert {p.name for p in found.gradients if p.kind == "parameter"} == {
        "a.weight.grad", "a.bias.grad", "b.weight.grad", "b.bias.grad"
    }  # fmt: skip
    assert "✓ agrees where it could be compared" in repr(found)
    assert any("worker 0 has no b" in text for text in found.notes)


def test_averaged_gradients_are_no_terms_of_a_sum(two: Session) -> None:
    def averaged() -> nn.Module:
        model = Net()
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad / 2)
        return model

    found = compare(Net(), two.call_packed(averaged), X)
    assert found.first is not None
    assert found.first.point.name == "b.weight.grad"
    assert "is the reference / 2: averaged" in str(found.first)


def test_a_small_later_difference_does_not_blame_terms_that_are_right(two: Session) -> None:
    reference = make_reference()

    def drifting(state: dict[str, torch.Tensor]) -> nn.Module:
        model = make_sharded(state)

        def drift(parameter: torch.Tensor) -> None:
            parameter.grad[0, 0] *= 1.01

        model.blocks[1].attn.q.weight.register_post_accumulate_grad_hook(drift)
        return model

    found = compare(reference, two.call_packed(drifting, reference.state_dict()), tokens())
    assert found.first is not None
    assert found.first.point.name == "blocks.1.attn.q.weight.grad"
    assert "all-reduce" not in str(found.first)


def test_workers_that_hold_the_same_part_are_told_together() -> None:
    with discolab.make_session(4, "threads", devices="cpu", timeout=30) as session:
        x = torch.randn(8, 3)
        found = compare(lambda x: x * 2, lambda x: (x * 2)[:2], x, session=session)
    assert found.first is not None
    assert "workers 1-3 hold worker 0's part" in str(found.first)


def test_values_inside_a_compiled_module_are_left_out(two: Session) -> None:
    def compiled() -> Any:
        return torch.compile(Net(), backend="eager")

    found = compare(Net(), two.call_packed(compiled), X, backward=False)
    assert found, found


class Failing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such head")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")


@pytest.mark.parametrize(
    ("reference", "inputs", "words"),
    [
        (Net(), (), ["forward, called as Net():", "missing 1 required positional argument"]),
        (Net(), (X, 3), ["called as Net(float32[6, 4], 3):", "takes 2 positional arguments"]),
        (Failing(), X, ["ValueError: no such head (", "test_presence.py:", "in forward)"]),
        (
            lambda x: NoBackward.apply(x),
            X,
            ["in backward: RuntimeError: no way back (", "backward)"],
        ),
    ],
)
def test_a_reference_that_fails_is_told_in_a_line(
    two: Session, reference: Any, inputs: Any, words: list[str]
) -> None:
    with pytest.raises(discolab.ArgumentError) as caught:
        compare(reference, lambda *args: X.clone().requires_grad_(), inputs, session=two)
    told = str(caught.value)
    assert "\n" not in told
    for word in words:
        assert word in told
    assert caught.value.__cause__ is not None


class Rows(nn.Module):
    """A part of an MLP, whose terms are summed by who calls `down`."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.factor = nn.Identity(), factor
        self.up = nn.Linear(up.shape[1], up.shape[0], bias=False)
        self.down = nn.Linear(down.shape[1], down.shape[0], bias=False)
        self.up.weight, self.down.weight = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x * self.factor)
        if self.factor == 1.0:
            return self.down(self.up(x).relu())
        return dist_fn.reduce_from_region(self.down(self.up(dist_fn.copy_to_region(x)).relu()))


def test_terms_behind_a_difference_are_shown_as_a_sum(two: Session) -> None:
    torch.manual_seed(0)
    up, down = torch.randn(8, 4), torch.randn(4, 8)

    def part() -> nn.Module:
        me, n = place()
        return Rows(up.chunk(n)[me].clone(), down.chunk(n, 1)[me].clone(), 1.01)

    found = compare(Rows(up, down), two.call_packed(part), X)
    assert found.first is not None
    assert found.first.point.name == "first.input"
    points = {p.name: p for p in (*found.points, *found.gradients)}
    assert points["down"].layout == "Partial(sum)"
    assert not points["down"].agrees
    assert found.worst is not None
    assert found.worst.relative < 0.1


class Lossy(nn.Module):
    """Gives a loss that depends little on what its module has."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.inner, self.off = nn.Identity(), off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 + 1e-3 * self.inner(x + self.off * x.flip(0)).square().mean()


def test_a_loss_that_agrees_to_its_tolerance_excuses_nothing(two: Session) -> None:
    found = compare(Lossy(0.0), two.call_packed(Lossy, 0.2), X, backward=False)
    result = found.points[-1]
    assert result.kind == "result"
    assert result.agrees
    assert found.first is not None
    assert found.first.point.name == "inner.input"
