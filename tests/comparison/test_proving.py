"""The place of a difference is proved by a run with the reference's value there."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from discolab import Session, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from discolab.comparison.recorder import ActivationRecorder


class Twice(nn.Module):
    """Two layers, of which the workers' first one leaves the scale to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor, self.wrong = 1.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(note("between", self.first(x) / self.factor) * self.factor) + self.wrong


def twice(state: dict[str, Tensor], factor: float, wrong: float) -> Twice:
    model = Twice()
    model.load_state_dict(state)
    model.factor, model.wrong = factor, wrong
    return model


def test_a_value_that_the_program_makes_up_for_is_passed_by(four: Session) -> None:
    model = Twice()
    found = compare(model, four.call_packed(twice, model.state_dict(), 2.0, 0.5), torch.randn(3, 4))
    assert found.first is not None
    assert found.first.point.kind in ("output", "result")
    assert found.first.proved
    assert any("note 'between' differs, perhaps by design" in line for line in found.notes)


def test_a_place_that_is_the_only_one_is_proved(four: Session) -> None:
    model = Twice()
    found = compare(model, four.call_packed(twice, model.state_dict(), 1.0, 0.5), torch.randn(3, 4))
    assert found.first is not None
    assert found.first.proved
    assert not any("by design" in line for line in found.notes)


def test_terms_of_a_sum_are_put_as_terms(four: Session) -> None:
    def whole(x: Tensor) -> Tensor:
        return note("part", x.sum(-1, keepdim=True)) + 1

    def sharded(x: Tensor) -> Tensor:
        part = x.chunk(4, -1)[current_worker().rank].sum(-1, keepdim=True)
        return dist_fn.reduce_from_region(note("part", part + 0.25 * x[..., :1])) + 1

    found = compare(whole, sharded, torch.randn(6, 8), session=four)
    assert found.first is not None
    assert found.first.name == "part"


def test_what_a_mask_hides_may_be_another_number(four: Session) -> None:
    def whole(x: Tensor) -> Tensor:
        mask = torch.ones(6, 6).tril().log()
        return note("scores", x @ x.mT + mask).softmax(-1)

    def sharded(x: Tensor) -> Tensor:
        mask = torch.full((6, 6), -1e4).triu(1)
        return note("scores", x @ x.mT / 2 + mask).softmax(-1)

    found = compare(whole, sharded, torch.randn(6, 8), session=four)
    assert found.first is not None
    assert found.first.name == "scores"
    assert any("is 0.5 times the reference" in cause for cause in found.first.causes)


def test_parameters_that_workers_have_in_common_are_not_written(four: Session) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    before = other.weight.detach().clone()

    def sharded(x: Tensor) -> Tensor:
        return other(x)

    assert not compare(model, sharded, torch.randn(3, 4), session=four)
    assert torch.equal(other.weight, before)


def test_another_thread_may_call_a_module_while_its_hooks_are_entered() -> None:
    """torch enters a hook, then that it takes keyword arguments: a call may come between."""
    layer, x, done = nn.Linear(2, 2), torch.ones(1, 2), []

    class Called(OrderedDict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            done.append(other.submit(layer, x).result(10))
            super().__setitem__(key, value)

    layer._forward_pre_hooks_with_kwargs = Called()
    layer._forward_hooks_with_kwargs = Called()
    recorder = ActivationRecorder(gradients=False)
    with ThreadPoolExecutor(1) as other, recorder.recording(layer):
        layer(x)
    assert len(done) == 2
    assert [entry.kind for entry in recorder.entries.values()] == ["input", "output"]
