"""The grammar of rank sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discolab import ArgumentError
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
