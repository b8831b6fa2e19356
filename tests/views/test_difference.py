"""``sess.compare``: what differs between two values, told worker by worker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from discolab import ArgumentError, DRef, ForeignDRefError, Session, WorkerError
from discolab.engines import ThreadedSession
from discolab.runtime.worker import current_worker
from discolab.views import Comparison, render_html
from discolab.views.difference import compare_values


@pytest.fixture(scope="module")
def four() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        yield session


def poked(values: torch.Tensor) -> torch.Tensor:
    """A copy, other than the rest on worker 2."""
    copy = values.clone()
    if current_worker().worker_id == 2:
        copy.view(-1)[5] += 2
    return copy


def network(odd: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if odd and current_worker().worker_id % 2:
        module[0].bias.data[1] -= 1  # type: ignore[union-attr, operator]
    return module


def pair(a: Any, b: Any, rtol: float | None = None, atol: float | None = None) -> dict[str, Any]:
    """The one row of a comparison on one worker."""
    (row,) = compare_values(a, b, rtol, atol)["rows"]
    return row


def test_the_worker_and_the_element_are_named(four: ThreadedSession) -> None:
    x = four.call_packed(lambda: torch.arange(12.0).view(3, 4))
    found = four.compare(x, four.call_packed(poked, x))
    assert isinstance(found, Comparison)
    assert (found.equal, found.identical, found.ranks) == (False, False, [2])
    assert repr(found).split("\n") == [
        "a against b · float32[3, 4] on 4 workers · ≠ differ on worker 2",
        "  rank     over tolerance  max |a - b|  at      a  b  relative    mean",
        "  [0,1,3]  0 of 12                   0",
        "  2        1 of 12                   2  [1, 1]  5  7    0.2857  0.1667",
    ]
    row = found.records[2][0]
    assert (row["max_abs"], row["index"], row["a"], row["b"]) == (2.0, [1, 1], 5.0, 7.0)


def test_variables_are_called_by_their_names(four: ThreadedSession) -> None:
    four.push({"x": torch.ones(2), "y": torch.ones(2)})
    assert repr(four.compare(four["x"], four["y"])).startswith(
        "x against y · float32[2] on 4 workers · ✓ identical"
    )


def test_tolerances_are_those_of_the_dtype_unless_given(four: ThreadedSession) -> None:
    x = four.call_packed(lambda: torch.ones(4))
    near = four.call_packed(torch.mul, x, 1 + 1e-6)
    found = four.compare(x, near)
    assert (found.equal, found.identical, found.ranks) == (True, False, [])
    assert "equal within rtol 1.3e-06, atol 1e-05" in repr(found)
    assert four.compare(x, near, rtol=0, atol=0).ranks == [0, 1, 2, 3]
    assert four.compare(x, four.call_packed(torch.mul, x, 1.1), rtol=0.2).equal


def test_modules_and_state_dicts_are_matched_by_name(four: ThreadedSession) -> None:
    a, b = four.call_packed(network), four.call_packed(network, True)
    for other in (b, four.call_packed(torch.nn.Module.state_dict, b)):
        found = four.compare(a, other)
        assert found.ranks == [1, 3]
        lines = repr(found).split("\n")
        assert lines[0] == "a against b · 7 values on 4 workers · ≠ differ on workers 1,3"
        assert lines[2].split()[:7] == ["0.bias", "float32[4]", "1,3", "1", "1", "of", "4"]
        assert lines[3] == "identical: 6"
        assert len(lines) == 11


def test_a_value_here_may_be_one_of_the_two(four: ThreadedSession) -> None:
    x = four.call_packed(lambda: torch.arange(3))
    assert four.compare(x, torch.arange(3)).identical
    assert four.compare(np.arange(3), x).identical
    assert four.compare(x, torch.arange(3.0)).identical
    assert "int64, float32" in repr(four.compare(x, torch.arange(3.0)))
    number = four.call_packed(lambda: current_worker().worker_id)
    assert four.compare(number, 1).ranks == [0, 2, 3]


def test_what_can_not_be_compared_is_one_clear_error(four: ThreadedSession) -> None:
    x = four.call_packed(lambda: torch.ones(2 + (current_worker().worker_id == 1)))
    with pytest.raises(ArgumentError, match="one of the two must be a DRef, got int and int"):
        four.compare(3, 4)
    with pytest.raises(ArgumentError) as raised:
        four.compare(x, torch.ones(4))
    assert str(raised.value) == (
        "compare: shapes differ: float32[2] and float32[4] on workers 0,2-3; "
        "shapes differ: float32[3] and float32[4] on workers 1"
    ).replace("0,2-3", "0,2,3").replace("workers 1", "worker 1")
    with pytest.raises(ArgumentError, match="Tensor and str can't be compared on workers 0-3"):
        four.compare(x, "text")
    with pytest.raises(ArgumentError, match="rtol is a number, 0 or more"):
        four.compare(x, x, rtol=-1)
    with ThreadedSession(1) as other, pytest.raises(ForeignDRefError):
        four.compare(x, other.call_packed(torch.ones, 1))


def fails() -> None:
    if current_worker().worker_id == 1:
        raise ValueError("boom")


def test_a_poisoned_value_raises_its_error(four: ThreadedSession) -> None:
    with pytest.raises(WorkerError, match="boom"):
        four.compare(four.call_packed(fails), 3)


def test_numbers_agree_with_torch() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32):
        a = (torch.randn(700, 900) * 20).to(dtype)
        b = a.clone()
        b[3, 7] += 5
        b[600, 2] -= 9
        row = pair(a.t(), b.t())
        gap = (a.to(torch.complex128) - b.to(torch.complex128)).abs()
        assert (row["size"], row["index"], row["differ"]) == (630_000, [2, 600], 2)
        assert row["over"] == int((~torch.isclose(a, b)).sum())
        assert row["max_abs"] == pytest.approx(gap.max().item())
        assert row["mean_abs"] == pytest.approx(gap.mean().item())
        rel = (gap / b.to(torch.complex128).abs()).nan_to_num(0, posinf=0)
        assert row["max_rel"] == pytest.approx(rel.max().item())


def test_a_nan_in_one_is_no_difference_of_0(four: ThreadedSession) -> None:
    found = four.compare(four.call_packed(lambda: torch.ones(2)), torch.tensor([1.0, math.nan]))
    heads, row = repr(found).split("\n")[1:3]
    assert heads.split()[-2:] == ["b", "relative"]
    assert row.split() == ["[0-3]", "1", "of", "2", "1", "nan", "[1]", "1", "nan", "nan"]


def test_nan_and_infinity() -> None:
    nan, inf = math.nan, math.inf
    assert pair(torch.tensor([nan, inf]), torch.tensor([nan, inf]))["differ"] == 0
    row = pair(torch.tensor([1.0, nan, 2.0]), torch.tensor([1.0, 1.0, nan]))
    assert (row["nan_one"], row["over"], row["index"]) == (2, 2, [1])
    row = pair(torch.tensor([1.0, inf]), torch.tensor([1.0, 2.0]))
    assert (row["max_abs"], row["index"], row["over"]) == (inf, [1], 1)
    assert pair(torch.tensor([inf]), torch.tensor([-inf]))["over"] == 1


def test_large_integers_and_empty_tensors() -> None:
    row = pair(torch.tensor([2**53 + 1]), torch.tensor([2**53]))
    assert (row["over"], row["a"], row["b"]) == (1, 2**53 + 1, 2**53)
    row = pair(torch.empty(0, 3), torch.empty(0, 3))
    assert (row["size"], row["over"]) == (0, 0)
    assert pair(torch.tensor(True), torch.tensor(False))["over"] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3, requires_grad=True),
        lambda: torch.eye(3, dtype=torch.complex64).conj(),
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        lambda: torch.eye(3).to(torch.float8_e4m3fn),
        lambda: np.eye(3)[::-1],
        lambda: {"a": [1, "x", None, torch.eye(3)]},
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_every_kind_is_identical_to_itself(make: Any) -> None:
    found = compare_values(make(), make(), None, None)
    assert found["counts"]["differ"] == 0
    assert not any("problem" in row for row in found["rows"])


def test_names_of_one_only_and_shapes_within_are_told() -> None:
    found = compare_values({"a": torch.ones(2), "b": 1}, {"a": torch.ones(3), "c": 1}, None, None)
    assert [(row["name"], row["problem"]) for row in found["rows"]] == [
        ("a", "shapes differ: float32[2] and float32[3]"),
        ("b", "only in the first"),
        ("c", "only in the second"),
    ]
    assert found["counts"] == {"rows": 3, "over": 3, "differ": 3, "no_data": 0}


def test_of_many_values_those_that_differ_are_kept() -> None:
    a = {f"w{i}": torch.zeros(2) for i in range(1000)}
    b = {**a, "w999": torch.ones(2)}
    found = compare_values(a, b, None, None)
    assert found["rows"][0]["name"] == "w999"
    assert len(found["rows"]) == 250
    assert len(repr(found)) < 100_000
    picture = Comparison(("a", "b"), {0: found["rows"]}, {0: found["counts"]})
    assert "identical: 999" in repr(picture)
    assert "and 959 more" in repr(picture)


def test_hostile_names_and_values_are_escaped(four: ThreadedSession) -> None:
    evil = "<script>\x1b[31m"
    ref = four.call_packed(lambda: {evil: evil})
    found = four.compare(ref, {evil: "other"})
    assert found.ranks == [0, 1, 2, 3]
    assert "<script" not in render_html(found.part)
    assert "\x1b" not in repr(found)


def test_on_every_engine(sess: Session) -> None:
    x: DRef = sess.call_packed(torch.ones, 6)
    found = sess.compare(x, sess.call_packed(poked, x))
    assert found.ranks == [2]
    assert found._repr_mimebundle_()["text/plain"] == repr(found)


@pytest.mark.parametrize(
    ("one", "other", "dtypes", "gap"),
    [
        (2**62, -(2**62), (torch.int64, torch.int64), 2**63),
        (2**63 - 1, -(2**63), (torch.int64, torch.int64), 2**64 - 1),
        (0, 2**64 - 1, (torch.uint64, torch.uint64), 2**64 - 1),
        (2**63, -1, (torch.uint64, torch.int64), 2**63 + 1),
        (2**53 - 1, 2**53 + 1, (torch.int64, torch.int64), 2),
        (2**53 + 1, 2.0**53, (torch.int64, torch.float64), 1),
        (2.0**63, 2**63 - 1, (torch.float64, torch.int64), 1),
        (2**53 + 1, 2.0**53, (torch.int64, torch.complex128), 1),
    ],
)
def test_large_integers_that_differ_are_told_apart_exactly(
    one: float, other: float, dtypes: tuple[torch.dtype, torch.dtype], gap: int
) -> None:
    a, b = (torch.tensor([v], dtype=d) for v, d in zip((one, other), dtypes, strict=True))
    row = pair(a, b, rtol=0, atol=0)
    assert (row["max_abs"], row["over"], row["differ"]) == (float(gap), 1, 1)
    assert pair(a, a, rtol=0, atol=0)["differ"] == pair(b, b, rtol=0, atol=0)["differ"] == 0


def test_what_differs_from_zero_is_endlessly_far_in_relation() -> None:
    for a, b in ((True, False), (1.4e-45, 0.0), (math.inf, 3e38)):
        assert pair(torch.tensor([a]), torch.tensor([b]))["max_rel"] == math.inf
    assert pair(torch.zeros(2), torch.tensor([0.0, math.nan]))["max_rel"] == 0


def freed() -> torch.Tensor:
    values = torch.ones(3)
    values.untyped_storage().resize_(0)
    return values


def test_what_has_no_data_is_not_called_different(four: ThreadedSession) -> None:
    x = four.call_packed(freed)
    with pytest.raises(ArgumentError, match="storage freed: no data on workers 0-3"):
        four.compare(x, x)
    for make in (
        lambda: torch.nn.LazyLinear(2),
        lambda: torch.nn.Linear(2, 2, device="meta"),
        lambda: [freed(), torch.ones(2)],
    ):
        value = four.call_packed(make)
        found = four.compare(value, value)
        assert not found.equal
        assert "no data to compare on workers 0-3" in repr(found)
        assert "differ on workers" not in repr(found)
