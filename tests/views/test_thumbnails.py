"""Thumbnails, histograms and places of values that are not finite, as a worker takes them."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from discolab.views import describe
from discolab.views.facts.thumbnails import heat_of, shared_scale, thumbnail

NAN = float("nan")
INF = float("inf")


def cells(record: Any) -> list[list[int]]:
    thumb = record["thumbnail"]
    flat = list(b64decode(thumb["cells"]))
    assert len(flat) == thumb["rows"] * thumb["columns"]
    return [flat[at : at + thumb["columns"]] for at in range(0, len(flat), thumb["columns"])]


def test_small_tensors_show_each_value() -> None:
    record = describe(torch.tensor([[0.0, 1.0], [2.0, 4.0]]))
    assert cells(record) == [[0, 64], [127, 254]]
    assert record["thumbnail"]["of"] == "values"


def test_larger_ones_show_means_of_blocks() -> None:
    record = describe(torch.arange(48.0 * 72).view(48, 72))
    thumb = record["thumbnail"]
    assert (thumb["rows"], thumb["columns"], thumb["of"]) == (24, 24, "means")
    assert (thumb["low"], thumb["high"]) == (37.0, 3418.0)  # of the first and the last 2 x 3
    uneven = describe(torch.arange(25.0))["thumbnail"]
    assert (uneven["rows"], uneven["columns"]) == (1, 24)
    assert (uneven["low"], uneven["high"]) == (0.0, 23.5)


def test_large_ones_are_averaged_without_a_copy() -> None:
    values = torch.arange(2**22 + 24).view(1, -1)
    with Watch(values) as watch:
        thumb: Any = thumbnail(values, whole=True)["thumbnail"]
    assert watch.most <= 576
    width = len(values[0]) / 24
    assert thumb["low"] == pytest.approx(width / 2, rel=1e-3)
    assert thumb["high"] == pytest.approx(width * 23.5, rel=1e-3)


def test_a_cell_with_one_nan_is_marked() -> None:
    values = torch.ones(480, 480)
    values[21, 479] = NAN
    values[479, 0] = -INF
    found = cells(describe(values))
    marked = [(r, c) for r, row in enumerate(found) for c, level in enumerate(row) if level == 255]
    assert marked == [(1, 23), (23, 0)]
    places = describe(values)["places"]
    assert places == [["nan", [21, 479]], ["-inf", [479, 0]]]


def test_places_are_the_first_eight_in_any_layout() -> None:
    values = torch.full((3, 4, 5), INF).permute(2, 0, 1)
    places: Any = describe(values)["places"]
    assert len(places) == 8
    assert places[5] == ["inf", [0, 1, 1]]
    assert "places" not in describe(torch.ones(3))


class Watch(TorchDispatchMode):
    """Remembers the most elements that an operation made anew from a tensor."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self.place = source.untyped_storage().data_ptr()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.place:
            self.most = max(self.most, made.numel())
        return made


def test_large_tensors_are_sampled() -> None:
    big = torch.arange(3000.0 * 1000).view(1000, 3000)
    for values in (big, big.t(), big.view(10, 100, 3000).permute(2, 0, 1)):
        with Watch(values) as watch:
            record = describe(values)
        assert 0 < watch.most <= 576
        assert record["thumbnail"]["of"] == "samples"
        assert "stats" not in record
        found = cells(record)
        assert len(found) == 24
        lines = found if values is big else list(zip(*found, strict=True))
        assert all(sorted(line) == list(line) for line in lines)


def test_strides_do_not_change_the_picture() -> None:
    values = torch.randn(7, 50, 60)
    for same in (values, values.transpose(0, 2).contiguous().transpose(0, 2)):
        assert cells(describe(same)) == cells(describe(values))
    wide = torch.randn(60).expand(40, 60)
    assert cells(describe(wide)) == cells(describe(wide.contiguous()))


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    small = describe((torch.arange(1200).view(30, 40) % 2).to(dtype))
    assert "error" not in small
    assert small["thumbnail"]["of"] == "means"
    assert sum(small["histogram"]) == 1200
    large = describe(torch.ones(1).to(dtype).expand(5000, 5000))
    assert "error" not in large
    assert large["thumbnail"]["of"] == "samples"


def test_values_far_apart() -> None:
    record = describe(torch.tensor([1e308, -1e308, 0.0, NAN], dtype=torch.float64))
    assert cells(record) == [[254, 0, 127, 255]]
    assert [record["histogram"][at] for at in (0, 12, 23)] == [1, 1, 1]
    nothing = describe(torch.full((5, 5), NAN))
    assert nothing["thumbnail"]["low"] is None
    assert {level for row in cells(nothing) for level in row} == {255}
    scale = shared_scale([record, nothing])
    assert scale is not None
    assert heat_of(nothing, scale, "w").levels == (b"\xff" * 5,) * 5
    for empty in (torch.ones(3, 0), torch.tensor(2.0), torch.eye(3).to_sparse()):
        assert "thumbnail" not in describe(empty)


def test_nothing_else_changes() -> None:
    weight = torch.nn.Parameter(torch.randn(40, 40))
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        record = describe(weight)
    assert torch.equal(state, torch.get_rng_state())
    assert weight.grad_fn is None
    assert "error" not in record


def test_records_stay_small() -> None:
    awkward = torch.randn(1000, 1000, dtype=torch.float64) * 1e-300
    awkward[::3] = NAN
    for values in (awkward[:600, :600], awkward, torch.randn(24, 24)):
        assert len(json.dumps(describe(values))) < 2500


def test_one_scale_for_all_workers() -> None:
    held = [describe(torch.tensor([[0.0, 1.0]])), describe(torch.tensor([[-3.0, 6.0]]))]
    scale = shared_scale(held)
    assert scale is not None
    assert scale.diverging
    assert heat_of(held[0], scale, "w").levels == (bytes([127, 148]),)
    assert heat_of(held[1], scale, "w").levels == (bytes([64, 254]),)
    scale = shared_scale(held[:1])
    assert scale is not None
    assert not scale.diverging
    assert heat_of(held[0], scale, "w").levels == (bytes([0, 254]),)
    assert shared_scale([{"kind": "none"}]) is None
