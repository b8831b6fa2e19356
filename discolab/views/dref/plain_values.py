"""Containers of numbers, strings and the like: a row for each worker, a column where they differ.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..parts import Align, Column, Part, Row, Table, Text
from ..summary import summarize
from .compare import content_key, odd_ranks

_Records: TypeAlias = Mapping[int, Mapping[str, Any]]

_MOST_KEYS = 8  # columns


def by_key(records: _Records) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The items of all workers by key, in the order of the first worker that has one."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        for item in record["items"]:
            found.setdefault(str(item["key"]), {})[rank] = item["value"]
    return found


def plain_parts(records: _Records) -> list[Part] | None:
    """A row for each worker, a column for each key in which they differ."""
    items = by_key(records)
    differing = {
        key: held
        for key, held in items.items()
        if len({str(content_key(record)) for record in held.values()}) > 1
        or len(held) < len(records)
    }
    unknown = any(record.get("more") for record in records.values())
    if not differing:
        return None if unknown and len({str(content_key(r)) for r in records.values()}) > 1 else []
    shown = list(differing.items())[:_MOST_KEYS]
    rows = []
    odd = {key: set(_odd(held)) for key, held in shown}
    for rank in sorted(records):
        cells = [
            Text(
                summarize(held[rank], 40) if rank in held else "–",
                "warning" if rank in odd[key] else "plain",
            )
            for key, held in shown
        ]
        rows.append(Row(tuple(cells), (rank,)))
    columns = tuple(Column(key, _align(held)) for key, held in shown)
    parts: list[Part] = [Table(columns, tuple(rows))]
    same = len(items) - len(differing)
    words = []
    if len(differing) > len(shown):
        words.append(f"{len(differing) - len(shown)} more keys differ")
    if same:
        words.append(f"{same} other {'key is' if same == 1 else 'keys are'} equal")
    if words:
        parts.append(Text(", ".join(words), "muted"))
    return parts


def _odd(held: _Records) -> list[int]:
    """The workers outside a majority, if there is one."""
    keys = {rank: str(content_key(record)) for rank, record in held.items()}
    return odd_ranks(keys, sorted(keys)) if len(set(keys.values())) < len(keys) else []


def _align(held: _Records) -> Align:
    numbers = all(record.get("type") in ("int", "float") for record in held.values())
    return "right" if numbers else "left"
