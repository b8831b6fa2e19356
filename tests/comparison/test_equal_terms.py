"""What all workers hold alike, what groups of them do, and what shows nothing since it is zero."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import discolab
from discolab import Session, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison
from tests.comparison.families.case import place

pytestmark = pytest.mark.one_process


class Stacked(nn.Module):
    """Two blocks, each a column-parallel and a row-parallel layer on workers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.wide, self.out = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.mode = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.mode:
            return self.out(self.wide(self.down(self.up(x).relu())).relu())
        h = self.summed(self.down(self.up(dist_fn.copy_to_region(x)).relu()))
        y = dist_fn.reduce_from_region(self.out(self.wide(dist_fn.copy_to_region(h)).relu()))
        return y / 4 if self.mode == "late" else y

    def summed(self, h: torch.Tensor) -> torch.Tensor:
        if self.mode == "divided":
            return dist_fn.reduce_from_region(h) / 4
        if self.mode == "averaged":
            return dist_fn.all_reduce(h, "avg")
        if self.mode == "groups":
            group = [0, 1] if place()[0] < 2 else [2, 3]
            return dist_fn.reduce_from_region(h, group=group)
        return dist_fn.broadcast(h, 0) if self.mode == "one" else dist_fn.reduce_from_region(h)


def _stacked(state: dict[str, torch.Tensor], mode: str) -> Stacked:
    me, n = place()
    model = Stacked()
    model.load_state_dict(state)
    model.mode = mode
    for layer, dim in ((model.up, 0), (model.down, 1), (model.wide, 0), (model.out, 1)):
        layer.weight = nn.Parameter(layer.weight.detach().chunk(n, dim)[me].clone())
    model.wide.bias = nn.Parameter(model.wide.bias.detach().chunk(n)[me].clone())
    return model


def stacked(session: Session, mode: str, constant: bool = False) -> ProgramComparison:
    torch.manual_seed(0)
    model = Stacked()
    for parameter in model.parameters() if constant else ():
        nn.init.constant_(parameter, 0.5)
    return compare(
        model, session.call_packed(_stacked, model.state_dict(), mode), torch.randn(6, 8)
    )


@pytest.mark.parametrize("mode", ["divided", "averaged"])
def test_an_average_before_a_sharded_layer_is_no_missing_sum(four: Session, mode: str) -> None:
    first = stacked(four, mode).first
    assert first is not None
    assert first.point.words == "input of wide"
    assert first.causes == (
        "is the reference / 4 on all workers alike: averaged where a sum belongs, or divided twice",
    )
    assert first.place == "last that agrees: the output of down; it goes wrong after that"


def test_an_average_at_the_end_is_no_missing_sum(four: Session) -> None:
    first = stacked(four, "late").first
    assert first is not None
    assert first.point.words == "output of the whole model"
    assert "averaged where a sum belongs" in first.causes[0]


def test_equal_terms_may_be_an_average_as_well(four: Session) -> None:
    assert stacked(four, "right", constant=True).agrees
    first = stacked(four, "one", constant=True).first
    assert first is not None
    assert first.point.words == "output of down"
    (cause,) = first.causes
    assert "averaged where a sum belongs" in cause
    assert cause.endswith("or terms that are equal and an all-reduce is missing")
    assert first.place.endswith("it goes wrong at the end of down.forward or after it")


def test_a_sum_within_groups_is_told_as_one(four: Session) -> None:
    first = stacked(four, "groups").first
    assert first is not None
    assert first.point.words == "input of wide"
    assert first.causes[0].startswith("workers 0,1 hold one value, workers 2,3 another")
    assert first.causes[0].endswith("or it was over the wrong group")
    assert len(first.causes) == 1


class Parted(nn.Module):
    """What is summed goes to modules in parts; on workers the first layer is row-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(16, 12, bias=False), nn.Linear(4, 8), nn.Linear(8, 8)
        self.mode = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode:
            h = self.first(dist_fn.scatter_to_region(x, 1))
            if self.mode == "groups":
                group = [0, 1] if place()[0] < 2 else [2, 3]
                h = dist_fn.reduce_from_region(h, group=group)
            elif self.mode == "max":
                h = discolab.ccl.all_reduce(h.detach(), "max")
            elif self.mode == "relu":
                h = dist_fn.reduce_from_region(h.relu())
        else:
            h = self.first(x)
        one, other = h.split([4, 8], -1)
        return self.a(one) * self.b(other)


def _parted(state: dict[str, torch.Tensor], mode: str) -> Parted:
    me, n = place()
    model = Parted()
    model.load_state_dict(state)
    model.first.weight = nn.Parameter(model.first.weight.detach().chunk(n, 1)[me].clone())
    model.mode = mode
    return model


def parted(session: Session, mode: str) -> ProgramComparison:
    torch.manual_seed(0)
    model = Parted()
    return compare(
        model, session.call_packed(_parted, model.state_dict(), mode), torch.randn(5, 16)
    )


def test_a_sum_within_groups_is_found_where_it_is(four: Session) -> None:
    first = parted(four, "groups").first
    assert first is not None
    assert first.point.words == "input of a"
    assert first.causes[0].endswith("or it was over the wrong group")


@pytest.mark.parametrize(
    ("mode", "told"), [("max", ["all_reduce"]), ("relu", ["relu", "all_reduce"])]
)
def test_what_workers_alone_run_is_named_before_an_innocent_operation(
    four: Session, mode: str, told: list[str]
) -> None:
    first = parted(four, mode).first
    assert first is not None
    assert first.point.words == "input of a"
    assert "of the operations that both run the first that differs: operation split" in first.place
    alone = first.place.partition("the workers alone run ")[2]
    assert [words.split(" at ")[0] for words in alone.split(", ")] == told


class Tables(nn.Module):
    """An embedding table for each of four features; each worker has one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(4))
        self.out = nn.Linear(8, 3)
        self.mode = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not self.mode:
            each = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        else:
            me, _ = place()
            each = dist_fn.gather_from_region(self.tables[me](ids[:, me])[:, None], 1)
            each = each.flip(1) if self.mode == "flipped" else each
        return self.out(torch.cat([each, each * 2], 1).softmax(1)[:, 0])


def _tables(model: Tables, mode: str) -> Tables:
    model = copy.deepcopy(model)
    model.mode = mode
    for i in range(4):
        if i != place()[0]:
            model.tables[i] = None  # type: ignore[assignment]
    return model


def test_an_operation_in_a_module_that_agrees_is_not_where_it_goes_wrong(four: Session) -> None:
    torch.manual_seed(0)
    model, ids = Tables(), torch.randint(0, 20, (6, 4))
    assert compare(model, four.call_packed(_tables, model, "right"), ids)
    first = compare(model, four.call_packed(_tables, model, "flipped"), ids).first
    assert first is not None
    assert first.point.words == "input of out"
    assert first.place.startswith("last that agrees: the output of tables.3; it goes wrong after")
    assert "embedding" not in first.place


class Adapter(nn.Module):
    """A low-rank addition that starts at zero, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_gradients_that_are_zero_are_told_to_show_nothing(four: Session) -> None:
    torch.manual_seed(0)
    model, x = Adapter(), torch.randn(4, 8)
    found = compare(model, four.call_packed(copy.deepcopy, model), x)
    assert found.agrees
    (note,) = found.notes
    assert note.startswith("the gradients of 2 parameters are zero on both sides and show nothing")
    assert "a.weight" in note
    nn.init.ones_(model.b.weight)
    assert compare(model, four.call_packed(copy.deepcopy, model), x).notes == ()


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x.roll(-1, 0)


def test_a_shift_of_as_many_elements_as_workers_is_not_only_called_a_gather(four: Session) -> None:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    torch.manual_seed(0)
    first = compare(same, _shifted, torch.randn(4, 3), session=four).first
    assert first is not None
    assert first.causes[0] == (
        "its elements along dim 0 are in the order 1, 2, 3, 0: gathered in a wrong order, or "
        "shifted by one place"
    )
    first = compare(same, _shifted, torch.randn(5, 3), session=four).first
    assert first is not None
    assert "off by one" in first.causes[0]
