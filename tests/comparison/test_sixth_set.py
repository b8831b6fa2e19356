"""Right programs, and bugs before or behind what is right by design."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from discolab import Session, compare, current_worker
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
