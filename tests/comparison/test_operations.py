"""What a comparison finds inside a module or a function: operation by operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import discolab
from discolab import Session, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison.operations import OperationRecorder, match_operations, other_operations
from tests.comparison.families.case import place
from tests.comparison.families.others import Wide, WideParallel, outstanding, wide_by_hand


@pytest.fixture(scope="module", params=["threads", "processes"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with discolab.make_session(2, request.param, devices="cpu", timeout=60) as session:
        yield session


def reference(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    h = F.relu(F.linear(x, up))
    y = F.linear(h, down)
    return x + y.tanh()


def forgetful(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    me, n = place()
    h = F.relu(F.linear(x, up.chunk(n)[me]))
    y = F.linear(h, down.chunk(n, 1)[me])  # nothing sums this up
    return x + y.tanh()


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (16, 8), (8, 16))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def test_a_sum_that_functional_code_forgets(session: Session) -> None:
    found = compare(reference, forgetful, inputs(), session=session)
    assert found.first is not None
    assert found.first.point.kind == "result"
    assert "operation linear at " in found.first.place
    assert "an all-reduce is missing" in "\n".join(found.first.causes)


def test_rounding_is_measured_wherever_workers_are(session: Session) -> None:

    def cancels(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sum(-1).log() - x.logsumexp(-1)) * 1e3

    def otherwise(x: torch.Tensor) -> torch.Tensor:
        return (x.double().exp().sum(-1).log() - x.double().logsumexp(-1)).float() * 1e3

    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)) * 3
    found = compare(cancels, otherwise, x, session=session, backward=False)
    assert found.agrees, found
    assert any("than rounding does to the reference itself" in note for note in found.notes)
    found = compare(cancels, lambda x: otherwise(x) + 0.1, x, session=session, backward=False)
    assert not found.agrees


def test_operations_are_matched_by_name_and_order() -> None:
    def named(*names: str) -> list[tuple[str, str, str]]:
        return [(f"operation|{n}:{name}", name, "") for n, name in enumerate(names)]

    ours = named("linear", "gelu", "linear", "add")
    theirs = named("linear", "mul", "gelu", "linear", "sub", "add")
    assert match_operations(ours, [theirs]) == [{
        "0:linear": "0:linear", "2:gelu": "1:gelu", "3:linear": "2:linear", "5:add": "3:add"
    }]  # fmt: skip
    loop = named("getitem", "mul", "getitem", "mul", "stack")
    part = named("getitem", "mul", "stack", "getitem")
    other = named("getitem", "mul", "stack")
    matched = match_operations(loop, [part, other])
    for labels in matched:
        assert sorted(label[2:] for label in labels.values()) == ["mul", "stack"]
    odd = named("linear", "silu", "linear", "add")
    assert other_operations(ours, [ours, odd]) == [("1:gelu", "silu", "", [1])]
    assert other_operations(ours, [odd, odd]) == []


def test_what_runs_after_a_call_that_has_raised_is_not_inside_it() -> None:
    class Raises(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"{x.cos().sum():.1f}")

    class Catches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tried, self.other = Raises(), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                self.tried(x)
            return self.other(x).sin()

    model, recorder = Catches(), OperationRecorder("tried")
    with recorder.recording(model):
        model(torch.ones(1, 2))
    assert [name for _, name, _ in recorder.operations] == ["cos", "sum"]


@pytest.mark.slow
def test_a_bug_among_values_that_rounding_sets_apart(session: Session) -> None:
    model = outstanding(Wide())
    x = torch.randn(2, 64, 384, generator=torch.Generator().manual_seed(0))

    def late(state: dict[str, torch.Tensor]) -> Wide:
        made = wide_by_hand(state, torch.float32)
        made.layer[3].__class__ = BiasInside
        return made

    found = compare(model, session.call_packed(late, model.state_dict()), x)
    assert found.first is not None
    assert found.first.module.startswith("layer.3")
    assert "bias layer.3.down.bias" in "\n".join(found.first.causes)


class BiasInside(WideParallel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.attend(dist_fn.copy_to_region(x)), self.dense.weight)
        x = self.norm1(x + dist_fn.reduce_from_region(y) + self.dense.bias)
        y = self.down(F.gelu(self.up(dist_fn.copy_to_region(x))))
        return self.norm2(x + dist_fn.reduce_from_region(y))
