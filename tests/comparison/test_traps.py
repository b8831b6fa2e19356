"""Bugs whose numbers look like those of another: what must not be said of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from discolab import Session, compare
from discolab.ccl import autograd as dist_fn
from tests.comparison.families.case import place

pytestmark = pytest.mark.one_process


class Ensemble(nn.Module):
    """The mean of what four matrices give; each worker has one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.Parameter(torch.randn(4, 16, 16, generator=generator) / 4)
        self.out = nn.Linear(16, 3)
        self.divided_by = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.divided_by:
            return self.out(torch.einsum("bd,edf->ebf", x, self.weights).mean(0))
        y = dist_fn.reduce_from_region(dist_fn.copy_to_region(x) @ self.weights[0])
        return self.out(y / self.divided_by)


def _ensemble(state: dict[str, torch.Tensor], divided_by: int) -> Ensemble:
    me, _ = place()
    model = Ensemble()
    model.load_state_dict(state)
    model.weights = nn.Parameter(state["weights"][me : me + 1].clone())
    model.divided_by = divided_by
    return model


def test_a_mean_that_is_not_divided_is_not_only_called_a_double_sum(four: Session) -> None:
    model, x = Ensemble(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    assert compare(model, four.call_packed(_ensemble, model.state_dict(), 4), x)
    found = compare(model, four.call_packed(_ensemble, model.state_dict(), 1), x)
    assert found.first is not None
    assert found.first.point.words == "input of out"
    assert "is 4 times the reference" in found.first.causes[0]
    assert found.first.causes[0].endswith("or it is not divided by 4")


def test_what_is_divided_twice_is_found_where_it_is_and_is_no_term_of_a_sum(four: Session) -> None:
    model, x = Ensemble(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    found = compare(model, four.call_packed(_ensemble, model.state_dict(), 16), x)
    assert found.first is not None
    assert found.first.point.words == "input of out"
    assert found.first.causes[0].endswith("averaged where a sum belongs, or divided twice")
    assert found.first.ranks == (0, 1, 2, 3)


class Tied(nn.Module):
    """One embedding that is the head, too; each worker has the rows of some words."""

    def __init__(self, words: int = 32) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, 16), nn.LayerNorm(16)
        self.mode = ""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if not self.mode:
            return F.linear(self.norm(self.table(words)), self.table.weight)
        me, _ = place()
        own = (words >= 8 * me) & (words < 8 * me + 8)
        rows = self.table((words - 8 * me).clamp(0, 7)) * own[..., None]
        h = dist_fn.copy_to_region(self.norm(dist_fn.reduce_from_region(rows)))
        weight = self.table.weight
        return F.linear(h, weight.detach() if self.mode == "detached" else weight)


def _tied(state: dict[str, torch.Tensor], mode: str) -> Tied:
    me, n = place()
    model = Tied(8)
    model.norm.load_state_dict({k[5:]: v for k, v in state.items() if k.startswith("norm.")})
    model.table.weight = nn.Parameter(state["table.weight"].chunk(n)[me].clone())
    model.mode = mode
    return model


def test_rows_of_an_embedding_are_no_terms_in_backward(four: Session) -> None:
    model = Tied()
    words = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(2))
    assert compare(model, four.call_packed(_tied, model.state_dict(), "right"), words)
    found = compare(model, four.call_packed(_tied, model.state_dict(), "detached"), words)
    assert found.first is not None
    assert found.first.point.words == "gradient of the parameter table.weight"
    assert not any("all-reduce" in cause for cause in found.first.causes), found


class Scan(nn.Module):
    """A linear recurrence over a sequence, of which each worker has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.4, 0.9, 16))
        self.out = nn.Linear(16, 16)
        self.parted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parted:
            x = x.chunk(4, 1)[place()[0]]
        h, steps = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            h = self.decay * h + x[:, step]
            steps.append(h)
        return self.out(torch.stack(steps, 1))


def _scan(state: dict[str, torch.Tensor]) -> Scan:
    model = Scan()
    model.load_state_dict(state)
    model.parted = True
    return model


def test_a_step_of_a_loop_over_a_part_is_not_called_the_first_that_differs(four: Session) -> None:
    model, x = Scan(), torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3))
    found = compare(model, four.call_packed(_scan, model.state_dict()), x, backward=False)
    assert found.first is not None
    assert found.first.ranks == (1, 2, 3)
    assert "operation getitem" not in str(found)


class TwoResults(nn.Module):
    """What it gives first does not depend on `side`."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.main, self.side, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()
        self.off = off

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.side.bias += self.off
        y = self.main(x), self.act(self.side(x))
        with torch.no_grad():
            self.side.bias -= self.off
        return y


def _two_results(state: dict[str, torch.Tensor], off: float) -> TwoResults:
    model = TwoResults(off)
    model.load_state_dict(state)
    return model


def test_one_right_result_does_not_excuse_what_goes_into_the_other(four: Session) -> None:
    model, x = TwoResults(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert compare(model, four.call_packed(_two_results, model.state_dict(), 0.0), x)
    found = compare(model, four.call_packed(_two_results, model.state_dict(), 1.0), x)
    assert found.first is not None
    assert found.first.point.words == "output of side"
