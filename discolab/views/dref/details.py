"""What goes beyond a row a worker: first values, how they are spread, where they are not finite.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..formats import format_number, format_shape
from ..parts import Bars, Cell, Column, Details, Part, Row, Table, Text, fold_rows
from .compare import grouped

_PLACES_TOLD = 3


def place_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Say where values are not finite: the first few of each worker."""
    words = {
        rank: told for rank, record in records.items() if (told := _places(record, _PLACES_TOLD))
    }
    return [Text(f"[{ranks}] {told}", "warning") for told, ranks in grouped(words)]


def detail_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """A collapsed table of first values, histograms, and where values are not finite."""
    rows = {rank: _row(record) for rank, record in records.items()}
    titles = [title for title in ("first values", "spread", "not finite") if _any(rows, title)]
    if not {"spread", "not finite"} & set(titles):
        return []
    table = Table(
        tuple(map(Column, titles)),
        fold_rows(
            tuple(
                Row(tuple(cells.get(title, Text("")) for title in titles), (rank,))
                for rank, cells in rows.items()
            )
        ),
    )
    return [Details("values in more detail", table, extra=True)]


def _any(rows: Mapping[int, Mapping[str, Cell]], title: str) -> bool:
    return any(title in cells for cells in rows.values())


def _row(record: Mapping[str, Any]) -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    head = record.get("head")
    if isinstance(head, list) and head:
        more = ", …" if _count(record.get("shape")) > len(head) else ""
        found["first values"] = Text(", ".join(map(format_number, head)) + more)
    counts, stats = record.get("histogram"), record.get("stats")
    if isinstance(counts, list) and isinstance(stats, Mapping) and max(counts, default=0) > 0:
        most = max(counts)
        ends = f"{format_number(stats.get('min'))} to {format_number(stats.get('max'))}"
        alt = f"{len(counts)} bins, {ends}: {', '.join(map(str, counts))}"
        found["spread"] = Bars(tuple(count / most for count in counts), alt)
    places = _places(record, len(record.get("places") or ()))
    if places:
        found["not finite"] = Text(places)
    return found


def _places(record: Mapping[str, Any], most: int) -> str:
    places, stats = record.get("places"), record.get("stats")
    if not isinstance(places, list) or not isinstance(stats, Mapping) or not places:
        return ""
    told = ", ".join(f"{kind} at {format_shape(index)}" for kind, index in places[:most])
    more = stats.get("nonfinite", 0) - len(places[:most])
    return f"{told} and {more} more" if more > 0 else told


def _count(shape: object) -> int:
    if not isinstance(shape, Sequence) or not all(type(size) is int for size in shape):
        return 0
    return math.prod(shape)
