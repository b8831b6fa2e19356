"""Draws the list of breakpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...runtime.sources import is_cell
from ...views.formats import cut, format_ranks
from ...views.parts import Column, Part, Row, Table, Text, VStack
from ..breaks import Break
from .stop import short_name


def breaks_parts(
    breaks: Iterable[Break], hits: Mapping[int, Mapping[int, int]] | None = None
) -> Part:
    """A row for each breakpoint, in order of number.

    Parameters
    ----------
    breaks
    hits
        For each number how often each worker has stopped there; None: that is not told.
    """
    shown = sorted(breaks, key=lambda one: one.number)
    if not shown:
        return Text("no breakpoints: %disco_break LINE [if CONDITION] sets one", "muted")
    columns = (
        Column("#", "right"),
        Column("place"),
        Column("condition"),
        Column("hits"),
        Column("logs"),
        Column("workers"),
        Column("stops", "right"),
    )
    rows = [_cells(one, None if hits is None else hits.get(one.number, {})) for one in shown]
    kept = [place for place in range(len(columns)) if any(row[place].text for row in rows)]
    table = Table(
        tuple(columns[place] for place in kept),
        tuple(Row(tuple(row[place] for place in kept)) for row in rows),
    )
    return VStack((Text("breakpoints", "title"), table))


def _cells(one: Break, hits: Mapping[int, int] | None) -> tuple[Text, ...]:
    name = short_name(one.file)
    return (
        Text(str(one.number)),
        Text(f"{name}, line {one.line}" if is_cell(one.file) else f"{name}:{one.line}"),
        Text(f"if {cut(one.condition, 80)}" if one.condition else ""),
        Text(one.hits),
        Text(cut(one.log, 80)),
        Text("all" if one.ranks is None else format_ranks(one.ranks)),
        Text("" if hits is None else _counted(hits)),
    )


def _counted(hits: Mapping[int, int]) -> str:
    """One number if all workers have the same."""
    if len(set(hits.values())) < 2:
        return str(next(iter(hits.values()), 0))
    said: dict[int, list[int]] = {}
    for rank, count in sorted(hits.items()):
        said.setdefault(count, []).append(rank)
    return ", ".join(f"{format_ranks(ranks)}: {count}" for count, ranks in said.items())
