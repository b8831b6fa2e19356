"""Draws a variable over time: one row a recorded line, one column a worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...views.formats import format_workers
from ...views.parts import ComparisonRow, ComparisonTable, Line, Part, Text, VStack
from .values import about_of, has_changed, heats_in, pictured, row_of, small_heats

Record = Mapping[str, Any]
HistoryRow = tuple[int, str, Mapping[int, Record]]
"""The number of the step, where that was in words, and what workers had then."""

MOST_ROWS = 40
_MOST_PICTURES = 32


def history_parts(name: str, rows: Iterable[HistoryRow]) -> Part:
    """Draw what a variable was, line by line.

    Parameters
    ----------
    name
    rows
        In order of time.
    """
    found = list(rows)
    ranks = sorted({rank for _, _, held in found for rank in held})
    if not ranks:
        return Line((Text(name, "title"), Text(": nothing was recorded", "muted")))
    kept, changed = _kept(found)
    records = {(place, rank): found[place][2][rank] for place in kept for rank in found[place][2]}
    common = about_of(records.values())
    firsts = {
        key: record for key, record in records.items() if key[0] in changed or key[0] == kept[0]
    }
    pictures = small_heats(pictured(firsts)) if len(firsts) <= _MOST_PICTURES else {}
    drawn = []
    for place in kept:
        number, where, held = found[place]
        heats = {rank: pictures[place, rank] for rank in held if (place, rank) in pictures}
        row = row_of(str(number), held, ranks, changed=place in changed, heats=heats, common=common)
        drawn.append(replace(row, about=where))
    return VStack(
        (
            _title(name, common, ranks, len(found) - len(kept)),
            ComparisonTable(("step", "at"), tuple(ranks), tuple(drawn)),
            *_legend(drawn),
        )
    )


def _kept(rows: Sequence[HistoryRow]) -> tuple[list[int], set[int]]:
    """The numbers of the rows that are shown, and of those in which something is new.

    Of many rows those with nothing new are left out, and of these the first.
    """
    changed = set()
    last: dict[int, Record] = {}
    for place, (_, _, held) in enumerate(rows):
        if any(rank in last and has_changed(last[rank], held[rank]) for rank in held):
            changed.add(place)
        last |= held
    kept = list(range(len(rows)))
    if len(kept) > MOST_ROWS:
        kept = [place for place in kept if place in changed or place in (0, len(rows) - 1)]
    return kept[-MOST_ROWS:], changed


def _title(name: str, common: str, ranks: Sequence[int], left_out: int) -> Line:
    words = f" · {common}" if common else ""
    spans = [Text(name, "title"), Text(f"{words} · on {format_workers(ranks)}")]
    if left_out:
        spans.append(Text(f" · {left_out} recorded lines are left out", "muted"))
    return Line(tuple(spans))


def _legend(rows: Sequence[ComparisonRow]) -> list[Part]:
    words = []
    if any(row.differs for row in rows):
        words.append("≠ differs between workers")
    if any(row.changed for row in rows):
        words.append("• has changed")
    if any(heats_in(row) for row in rows):
        words.append("thumbnails are on one scale")
    return [Text(" · ".join(words), "muted")] if words else []
