"""The variables of a stop: one row a name, one column a worker. Pure.

Workers in one function share a table, also where they stand at different lines of it. Names stay
in the order in which they came; what differs and what has changed is marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...views.formats import cut, format_workers
from ...views.parts import ComparisonRow, ComparisonTable, Details, Heat, Line, Part, Text
from ..stops import Record, Stop
from .values import differ, heats_in, row_of

MOST_NAMES = 30
_MOST_PICTURES = 24  # each is some 400 bytes of HTML
_MOST_ALONE = 8  # of rows with one more
_LONGEST = 98  # characters of names that are not shown
_HEADS = ("name", "")


@dataclass(frozen=True)
class VariableTable:
    """The variables of one function, the names that had no room, and how many more there are."""

    title: str
    whose: str
    table: ComparisonTable
    rest: ComparisonTable
    more: int = 0


def variable_parts(stop: Stop) -> list[Part]:
    """The tables as parts, and what their marks mean."""
    tables = variable_tables(stop)
    parts: list[Part] = []
    for one in tables:
        if not one.table.rows:
            parts.append(Text(f"no {one.title} yet{one.whose}", "muted"))
            continue
        parts += [Line((Text(one.title, "title"), Text(one.whose, "muted"))), one.table]
        if one.rest.rows:
            names = ", ".join(row.name for row in one.rest.rows)
            words = cut(f"and {len(one.rest.rows) + one.more:,} more: {names}", _LONGEST)
            first = f"the first {len(one.rest.rows)}"
            label = f"show {first if one.more else 'them'}"
            parts += [Text(words, "muted"), Details(label, one.rest, extra=True)]
    return [*parts, *_legend([one.table for one in tables])]


def variable_tables(stop: Stop) -> list[VariableTable]:
    """A table for each function in which there are workers whose variables are known.

    The first is that of the workers that advance next, the last that of those that wait.
    """
    places: dict[tuple[str, str], list[int]] = {}
    standing = [rank for group in stop.groups for rank in group]
    for worker in sorted(stop.workers, key=lambda worker: _turn(standing, worker.rank)):
        spot = stop.spot(worker.rank)
        if worker.variables is not None and spot is not None:
            places.setdefault((spot.file, spot.function), []).append(worker.rank)
    tables = []
    budget = [_MOST_ALONE, _MOST_PICTURES]
    for (_, function), ranks in places.items():
        title = "variables" if len(places) == 1 else f"variables of {function}"
        tables.append(_table(stop, sorted(ranks), title, budget))
    return tables


def _turn(standing: Sequence[int], rank: int) -> int:
    return standing.index(rank) if rank in standing else len(standing)


def _table(stop: Stop, ranks: Sequence[int], title: str, budget: list[int]) -> VariableTable:
    """The table of some workers; takes the thumbnails that it has from the budget."""
    held = by_name({rank: stop.workers[rank].variables or {} for rank in ranks})
    changed = set().union(*(stop.workers[rank].changed for rank in ranks))
    marked = {name for name, records in held.items() if differ(records, ranks)}
    # What differs is shown first if not all can be: the place of a row is that of its name.
    first = sorted(held, key=lambda name: (name not in marked) + (name not in changed))
    shown = set(first[:MOST_NAMES])
    rows: dict[str, ComparisonRow] = {}
    for name in first:
        several = name in marked and len(ranks) > 1
        heats: Mapping[int, Heat] | None = None if name in shown and budget[several] > 0 else {}
        rows[name] = row_of(name, held[name], ranks, changed=name in changed, heats=heats)
        budget[several] -= len(heats_in(rows[name]))
    kept, rest = (
        [rows[name] for name in held if (name in shown) is well] for well in (True, False)
    )
    return VariableTable(
        title,
        "" if len(ranks) == len(stop.workers) else f" on {format_workers(ranks)}",
        ComparisonTable(_HEADS, tuple(ranks), tuple(kept)),
        ComparisonTable(_HEADS, tuple(ranks), tuple(rest)),
        max(stop.workers[rank].more for rank in ranks),
    )


def by_name(variables: Mapping[int, Mapping[str, Record]]) -> dict[str, dict[int, Record]]:
    """What workers have under each name; a name that only some have stands where they have it."""
    order: list[str] = []
    for names in variables.values():
        place = 0
        for name in names:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return {
        name: {rank: names[name] for rank, names in variables.items() if name in names}
        for name in order
    }


def _legend(tables: Sequence[ComparisonTable]) -> list[Part]:
    """What the marks mean, of those that are used."""
    rows = [row for table in tables for row in table.rows]
    words = []
    if any(row.differs for row in rows):
        words.append("≠ differs between workers")
    if any(row.changed for row in rows):
        words.append("• changed since the last stop")
    if any(len(heats_in(row)) > 1 for row in rows):
        words.append("thumbnails of a row are on one scale")
    return [Text(" · ".join(words), "muted")] if words else []
