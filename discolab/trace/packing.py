"""Many events as a few columns, which travel and are read faster than a list for each. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

Packed = list[Any]
"""How many; then each column: one value for all, numbers as bytes, or values and where each is."""

_SAME, _NUMBERS, _VALUES = 0, 1, 2


def pack(rows: Sequence[Sequence[Any]]) -> Packed:
    """Rows of one length, with values that can be keys of a dict."""
    width = len(rows[0]) if rows else 0
    # `zip(*rows)` has an iterator for each row: slower, and work for the garbage collector
    return [len(rows), [_column([row[i] for row in rows]) for i in range(width)]]


def unpack(packed: Packed) -> Iterator[tuple[Any, ...]]:
    """The rows again; what was a list or a tuple is a tuple."""
    count, columns = packed
    return zip(*(_values(column, count) for column in columns), strict=False)


def _column(values: list[Any]) -> list[Any]:
    first = values[0]
    if first == values[-1] and values.count(first) == len(values):
        return [_SAME, first, b""]
    if type(first) is int:
        return [_NUMBERS, None, array("q", values).tobytes()]
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return [_VALUES, list(places), array("q", map(places.__getitem__, values)).tobytes()]


def _values(column: list[Any], count: int) -> Any:
    how, values, numbers = column
    if how == _SAME:
        return repeat(_plain(values), count)
    unpacked = array("q", bytes(numbers))
    if how == _NUMBERS:
        return unpacked
    return map([_plain(value) for value in values].__getitem__, unpacked)


def _plain(value: Any) -> Any:
    return tuple(value) if type(value) is list else value
