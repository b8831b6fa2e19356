"""The grammar of rank sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discolab import ArgumentError
from discolab.runtime import Mesh
from discolab.runtime.ranks import parse_ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("all", [0, 1, 2, 3, 4]),
        ("3", [3]),
        (3, [3]),
        (np.int64(3), [3]),
        ("-1", [4]),
        ("1,3", [1, 3]),
        (" 3 , 1, 3,", [1, 3]),
        ("0:4:2", [0, 2]),
        ("::-1", [0, 1, 2, 3, 4]),
        ("-2:", [3, 4]),
        ("0,2:", [0, 2, 3, 4]),
        ("ranks(1,3)", [1, 3]),
        ("[0, 2]", [0, 2]),
        ([2, 0], [0, 2]),
        (range(1, 3), [1, 2]),
        (np.array([4, 1]), [1, 4]),
        ((r for r in (1, "2:4")), [1, 2, 3]),
    ],
)
def test_reads(text: object, expected: list[int]) -> None:
    assert parse_ranks(text, 5) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no worker"),
        ([], "names no worker"),
        ("3:3", "names no worker"),
        ("5", "out of range: this session has workers 0 to 4"),
        (-6, "out of range"),
        ("0:4:0", "step"),
        ("pp=1", "no device mesh"),
        ("one", "is no rank"),
        ("1.0", "is no rank"),
        ([1.5], "is no rank"),
        ("-:", "is no rank"),
        (True, "is no rank"),
        ("9" * 5000, "is no rank"),
        ("9" * 5000 + ":", "is no rank"),
    ],
)
def test_refuses(text: object, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_ranks(text, 5)  # type: ignore[arg-type]


MESH = Mesh(("pp", "dp", "tp"), (2, 2, 3), tuple(range(12)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pp=1", [6, 7, 8, 9, 10, 11]),
        ("tp=0", [0, 3, 6, 9]),
        ("pp=1,tp=0:2", [6, 7, 9, 10]),
        (" tp = 2 , pp = 0 ", [2, 5]),
        ("pp=0,dp=1,tp=-1", [5]),
        ("tp=(0,2),pp=0,dp=0", [0, 2]),
        ("ranks(pp=1, tp=[0, 2])", [6, 8, 9, 11]),
        ("ranks(dp=0, pp=(1))", [6, 7, 8]),
        ("tp=1-2,dp=0,pp=0", [1, 2]),
        ("dp=::-1,pp=0,tp=0", [0, 3]),
        ("1,3", [1, 3]),
        (None, list(range(12))),
    ],
)
def test_reads_places_along_the_axes_of_a_mesh(text: str | None, expected: list[int]) -> None:
    assert parse_ranks(text, 12, MESH) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ep=1", "no axis 'ep'; its axes are pp=2, dp=2, tp=3"),
        ("tp=3", "tp=3 is out of range: axis tp of the mesh has places 0 to 2"),
        ("pp=0,tp=-4", "axis tp of the mesh has places 0 to 2"),
        ("tp=0,tp=1", r"each axis once.*tp=\(0,2\)"),
        ("tp=0,2", r"each axis once.*tp=\(0,2\)"),
        ("1,tp=0", "each axis once"),
        ("tp=", "names no worker"),
        ("tp=2:2", "names no worker"),
        ("tp=first", "is no rank"),
        ("tp=0=1", "is no rank"),
        ("=", "no axis ''"),
        (["tp=0"], "is no rank"),
    ],
)
def test_refuses_places_that_the_mesh_lacks(text: object, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_ranks(text, 12, MESH)  # type: ignore[arg-type]


@given(st.text(alphabet="012:,-=()dpt ", max_size=14))
def test_any_text_about_a_mesh_gives_ranks_or_an_argument_error(text: str) -> None:
    try:
        found = parse_ranks(text, 12, MESH)
    except ArgumentError:
        return
    assert found == sorted(set(found) & set(range(12)))
    assert found


@given(st.text(alphabet="0123456789:,-= al[]()ranks", max_size=12), st.integers(1, 9))
def test_any_text_gives_ranks_in_order_or_an_argument_error(text: str, workers: int) -> None:
    try:
        found = parse_ranks(text, workers)
    except ArgumentError:
        return
    assert found
    assert found == sorted(set(found) & set(range(workers)))


@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranks_written_out_are_read_back(ranks: set[int]) -> None:
    assert parse_ranks(",".join(map(str, ranks)), 31) == sorted(ranks)
