"""What rounding does to a few of many elements is no difference; what a bug does to one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import discolab
from discolab import Session, compare
from discolab.comparison.measure import difference, scale_of, tolerance_for

SIZE = 17_280


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    with discolab.make_session(2, "threads", devices="cpu", timeout=30) as session:
        yield session


def over(gap: torch.Tensor, rtol: float | None = None, atol: float | None = None) -> int:
    """How many elements are beyond the tolerance where values are off by `gap`."""
    torch.manual_seed(3)
    whole = torch.randn(gap.numel())
    tolerance = tolerance_for((torch.float32,), scale_of(whole), rtol, atol)
    return int(difference(whole + gap, whole, tolerance)["over"])


def noise(size: int = SIZE) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(size) * 5e-7


@pytest.mark.parametrize(
    ("count", "off", "differ"),
    [(1, 4e-5, 0), (10, 4e-5, 0), (100, 4e-5, 100), (1, 1e-3, 1), (1, 1.0, 1), (1, torch.nan, 1)],
)
def test_a_few_elements_just_beyond_are_rounding(count: int, off: float, differ: int) -> None:
    gap = noise()
    gap[:count] = off * torch.linspace(1, 1.1, count)
    found = over(gap)
    assert (found > 0) == (differ > 0)
    assert found <= differ


def test_where_all_are_off_by_much_none_is_rounding() -> None:
    gap = 8 * noise()  # in the mean more than rounding makes
    gap[0] = 4e-5
    assert over(gap) > 0
    assert over(torch.tensor([5e-5])) == 1  # of one number there is no mean


def test_what_the_user_says_holds_for_each_element() -> None:
    gap = noise()
    gap[0] = 4e-5
    assert over(gap, rtol=1.3e-5) == 1
    assert over(gap, atol=1e-5) == 1
    assert over(gap, rtol=0.0, atol=0.0) > SIZE // 2


def test_rtol_alone_counts_the_scale_too() -> None:
    gap = torch.full((SIZE,), 5e-4)
    assert over(gap, rtol=1e-3) == 0
    assert over(gap, rtol=1e-3, atol=0.0) > 0


@pytest.mark.parametrize(("off", "agrees"), [(4e-5, True), (1e-2, False)])
def test_a_program_that_is_off_in_one_element(two: Session, off: float, agrees: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def rounded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(4)
        gap = torch.randn(x.shape) * 1e-6
        gap.view(-1)[7] = off
        return x * 2 + gap

    torch.manual_seed(3)
    inputs = torch.randn(2, 8640)
    inputs.view(-1)[7] = 0.0  # where the terms cancel
    found = compare(program, rounded, inputs, session=two, backward=False)
    assert found.agrees == agrees, found


class Routed(nn.Module):
    """Rounding decides which of near rows go to the expert."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor, self.enter, self.expert = factor, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        rows = (x[:, 0] > x[:, 1]).nonzero()[:, 0]
        return x + self.factor * torch.zeros_like(x).index_add(0, rows, self.expert(x[rows]))


def test_rounding_decides_how_many_rows_an_expert_has(two: Session) -> None:
    def make(state: dict[str, torch.Tensor], factor: float) -> nn.Module:
        model = Routed(factor).bfloat16()
        model.load_state_dict(state)
        return model

    for seed in (1, 5):
        torch.manual_seed(seed)
        model, x = Routed().bfloat16(), torch.randn(512, 16, dtype=torch.bfloat16)
        found = compare(model, two.call_packed(make, model.state_dict(), 0.25), x)
        assert found.first is not None
        assert found.first.name == "output"
