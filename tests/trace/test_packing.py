"""Events as columns: pure."""

from __future__ import annotations

from discolab.trace.packing import pack, unpack


def test_rows_come_back_as_they_were() -> None:
    rows = [
        (number, "span", f"name {number % 3}", -(2**62), (0, 1) if number % 2 else (), False)
        for number in range(20)
    ]
    assert list(unpack(pack(rows))) == rows
    assert list(unpack(pack(rows[:1]))) == rows[:1]
    assert list(unpack(pack([]))) == []


def test_many_alike_are_small() -> None:
    packed = pack([(number, "span", "forward") for number in range(1000)])
    assert len(repr(packed[1][1:])) < 100
