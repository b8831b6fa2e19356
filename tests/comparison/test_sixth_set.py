"""Right programs, and bugs before or behind what is right by design."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from tests.comparison import sixth_set
from tests.comparison.second_set.planted import plant

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.one_process]


@pytest.mark.parametrize("name", sixth_set.BUGS)
def test_nothing_wrong_is_said_of_a_bug(four: Session, tmp_path: Path, name: str) -> None:
    family, bug = sixth_set.BUGS[name]
    comparison = getattr(plant(family, bug, tmp_path), bug.program)(four)
    judged = bug.judged(comparison)
    assert judged.holds, f"{judged}\n{comparison}"
    assert re.search(sixth_set.SAID.get(name, ""), str(comparison)), comparison
    assert not re.search(sixth_set.UNSAID.get(name, r"(?!)"), str(comparison)), comparison


@pytest.mark.parametrize("name", sixth_set.RIGHT)
def test_a_right_program_raises_no_alarm(four: Session, name: str) -> None:
    comparison = getattr(sixth_set.RIGHT[name], name.partition(": ")[2])(four)
    assert comparison.agrees, comparison


def test_parameters_of_which_no_gradient_was_compared_are_told(four: Session) -> None:
    class Flat(torch.nn.Module):
        def __init__(self, whole: torch.nn.Linear) -> None:
            super().__init__()
            self.flat = torch.nn.Parameter(whole.weight.detach().flatten().clone())
            self.bias = torch.nn.Parameter(whole.bias.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.flat.view(3, 4).T + self.bias

    whole = torch.nn.Linear(4, 3)
    comparison = compare(whole, four.call_packed(Flat, whole), torch.randn(2, 4))
    assert comparison.agrees
    assert "the gradients of 1 of 2 parameters were not compared" in comparison.notes
    assert "agrees where it could be compared" in str(comparison)


def test_experts_that_could_not_be_compared_do_not_agree(four: Session) -> None:
    class Outer(torch.nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.inner, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.rows = rows

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            part = self.inner(x[: self.rows])
            return torch.cat([part, x[self.rows :]]) + self.last(x)

    def less(whole: Outer) -> Outer:
        model = Outer(5 if current_worker().rank == 1 else 7)
        model.load_state_dict(whole.state_dict())
        return model

    whole = Outer(7)
    comparison = compare(whole, four.call_packed(less, whole), torch.randn(8, 4), backward=False)
    assert comparison.first is not None
    assert "all inside agrees" not in comparison.first.place


def test_a_stage_is_not_blamed_for_what_is_another_stage_s(four: Session) -> None:
    class Stages(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = current_worker().rank > 1
            h = torch.zeros(len(x), 4) if last else self[0](x)
            h = ccl.broadcast(h.detach(), 0)
            return self[1](h * 1.01) if last else h.sum()

    whole = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    comparison = compare(
        whole, four.call_packed(lambda w: Stages(*w), whole), torch.randn(2, 4), backward=False
    )
    assert comparison.first is not None
    assert comparison.first.point.name == "1.input"
    assert not any("did not run" in cause for cause in comparison.first.causes)


def test_what_all_workers_have_is_not_why_one_holds_another_parameter(four: Session) -> None:
    def other(whole: torch.nn.Linear) -> torch.nn.Linear:
        model = torch.nn.Linear(4, 3, bias=False)
        flipped = whole.weight.detach().flip(0) if current_worker().rank == 3 else whole.weight
        model.weight = torch.nn.Parameter(flipped.detach().clone())
        return model

    whole = torch.nn.Linear(4, 3)
    comparison = compare(whole, four.call_packed(other, whole), torch.randn(2, 4))
    assert comparison.first is not None
    assert comparison.first.ranks == (3,)
    assert not any("bias=False" in cause for cause in comparison.first.causes)


def test_rows_are_mixed_only_where_parts_can_be_counted(four: Session) -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.unflatten(-1, (4, -1)).transpose(1, 2)).reshape(2, -1, 3)

    def flipped(x: torch.Tensor) -> torch.Tensor:
        me = current_worker().rank
        h = torch.tanh(x.unflatten(-1, (4, -1)).transpose(1, 2)[:, me : me + 1])
        return dist_fn.gather_from_region(h.flip(-1).reshape(2, -1, 3), 1)

    comparison = compare(whole, flipped, torch.randn(2, 5, 12), session=four, backward=False)
    assert comparison.first is not None
    assert not any("mixed" in cause for cause in comparison.first.causes)


def test_averaged_gradients_may_be_those_of_a_loss_that_is_divided_twice(
    four: Session, tmp_path: Path
) -> None:
    family, bug = sixth_set.BUGS["the gradient of the scale is not averaged"]
    bug = replace(bug, old="+ 0.1 * spread).backward()\n        for", new=(
        "+ 0.1 * spread).div(world()).backward()\n        for"
    ))  # fmt: skip
    comparison = plant(family, bug, tmp_path).parts(four)
    assert not comparison.agrees or any("divided twice" in note for note in comparison.notes)
