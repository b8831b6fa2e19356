"""A stop as the debugger's panel shows it: plain JSON, made of the records of `debugger`. Pure.

Values are put side by side by `debugger.picture`, so that the panel says what the saved picture
says; here they are made small enough to be sent with each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...debugger.breaks import Break
from ...debugger.picture import evaluated_table, variable_tables
from ...debugger.picture.stop import LOOK_OF_STATE, format_place, short_name
from ...debugger.records import Spot
from ...debugger.stops import Stop, WorkerAt
from ...runtime.sources import is_cell
from ...views import rank_colour
from ...views.formats import cut, printable
from ...views.parts import ComparisonRow
from ...views.render.program import MOST_COLUMNS, listed, runs_of
from ...views.render.style import heat_source

_ALL_LINES = 200  # of a file that is sent whole
_BLOCK = 60  # lines by which the part of a longer file moves
_LONGEST_LINE = 200  # characters
_MOST_PICTURES = 32
_MOST_REST = 60  # names beyond those that the picture shows

Json = dict[str, Any]


def workers_of(stop: Stop | None, count: int) -> list[Json]:
    """Each worker, its colour and its state."""
    states = {one.rank: one.state for one in stop.workers} if stop is not None else {}
    return [
        {"rank": rank, "colour": rank_colour(rank), "state": states.get(rank, "idle")}
        for rank in range(count)
    ]


def places_of(stop: Stop) -> list[Json]:
    """Where the workers are, in a line each: those at one place together, the next to go first."""
    found = []
    for number, ranks in enumerate(stop.groups):
        worker = stop.workers[ranks[0]]
        words = format_place(worker.stack[-1]) if worker.stack else "paused"
        for members, note in _by_note(stop, ranks):
            turn = "goes next" if len(stop.groups) > 1 and not number else ""
            found.append(_place(members, "paused", words, " · ".join(filter(None, [turn, note]))))
            found[-1]["known"] = bool(worker.stack)
    said: dict[tuple[str, str, bool], list[int]] = {}
    for worker in stop.workers:
        if worker.state != "paused":
            key = worker.state, _words(worker), bool(worker.stack)
            said.setdefault(key, []).append(worker.rank)
    for (state, words, known), members in said.items():
        found.append(_place(members, state, words) | {"known": known})
    return found


def _place(ranks: Sequence[int], state: str, words: str, note: str = "") -> Json:
    return {"ranks": list(ranks), "state": state, "words": words, "note": note, "known": False}


def _by_note(stop: Stop, ranks: Sequence[int]) -> list[tuple[list[int], str]]:
    """Workers at one place, apart where they say something of their own."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        worker = stop.workers[rank]
        note = "" if worker.note in stop.reason else worker.note
        said = ": ".join(filter(None, [note, worker.headline]))
        found.setdefault(cut(said, 240), []).append(rank)
    return [(members, note) for note, members in found.items()]


def _words(worker: WorkerAt) -> str:
    where = f"{format_place(worker.stack[-1])}" if worker.stack else ""
    match worker.state:
        case "error":
            words = worker.failed
        case "done":
            words = "has ended"
        case "aborted":
            words = "was aborted"
        case "out":
            words = "does not take part"
        case "collective":
            words = worker.words or "waits in a collective"
        case _:
            words = worker.words or ("" if where else "runs")
    return cut(": ".join(filter(None, [where, words])), 300)


def stack_of(stop: Stop, focus: int) -> list[Json]:
    """The frames of a worker, the innermost first."""
    stack = stop.workers[focus].stack if focus < len(stop.workers) else ()
    return [
        {"function": cut(_function(spot), 80), "place": _at(spot.file, spot.line)}
        for spot in reversed(stack)
    ]


def _at(file: str, line: int) -> str:
    name = short_name(file)
    return f"{name}, line {line}" if is_cell(file) else f"{name}:{line}"


def _function(spot: Spot) -> str:
    return "the cell" if spot.function == "<module>" else spot.function


def source_of(stop: Stop, focus: int, breaks: Iterable[Break]) -> Json | None:
    """The source that a worker is in, in the frame that is shown, and who else is there."""
    here = stop.spot(focus) if focus < len(stop.workers) else None
    if here is None:
        return None
    lines = stop.sources.get(here.file, ())
    first, last = 1, len(lines)
    if last > _ALL_LINES:
        first = max(1, (here.line // _BLOCK - 1) * _BLOCK)
        last = min(last, first + 3 * _BLOCK)
    while first < here.line and not lines[first - 1].strip():  # as where %%disco stood
        first += 1
    marks: dict[int, dict[str, list[int]]] = {}
    for worker in stop.workers:
        spot, look = stop.spot(worker.rank), LOOK_OF_STATE.get(worker.state)
        if spot is not None and look is not None and spot.file == here.file:
            marks.setdefault(spot.line, {}).setdefault(look, []).append(worker.rank)
    standing = stop.workers[focus].state != "running"
    return {
        "file": here.file,
        "name": short_name(here.file),
        "function": "" if here.function == "<module>" else f"in {here.function}",
        "first": first,
        "lines": [
            cut(printable(text.expandtabs(4)), _LONGEST_LINE) for text in lines[first - 1 : last]
        ],
        "line": here.line if standing else None,
        "marks": {str(line): list(map(list, looks.items())) for line, looks in marks.items()},
        "breaks": breaks_in(here.file, breaks),
        "widest": len(stop.workers),
    }


def breaks_in(file: str, breaks: Iterable[Break]) -> Json:
    """The breakpoints in a file: line -> condition."""
    return {str(one.line): one.condition for one in breaks if one.is_in(file)}


def breaks_of(breaks: Iterable[Break]) -> list[Json]:
    """Breakpoints, to be listed."""
    return [
        {
            "number": one.number,
            "place": _at(one.file, one.line),
            "condition": cut(one.condition, 120),
            "ranks": None if one.ranks is None else list(one.ranks),
        }
        for one in breaks
    ]


def tables_of(stop: Stop) -> list[Json]:
    """The variables of each function in which workers stand."""
    tables = []
    left = [_MOST_PICTURES]
    for one in variable_tables(stop):
        ranks = one.table.ranks
        tables.append(
            {
                "title": one.title + one.whose,
                "ranks": list(ranks),
                "rows": [_row(row, ranks, left) for row in one.table.rows],
                "rest": [_row(row, ranks, [0]) for row in one.rest.rows[:_MOST_REST]],
                "more": max(0, len(one.rest.rows) - _MOST_REST),
            }
        )
    return tables


def result_of(expression: str, values: Mapping[int, tuple[str, Any]], number: int) -> Json:
    """What an expression is on each worker, and at which stop that was."""
    well = {rank: value for rank, (kind, value) in values.items() if kind == "value"}
    ranks = sorted(values)
    shown = cut(expression, 120)
    row: Json = {"name": shown, "about": "", "cells": [], "differs": False, "changed": False}
    if well:
        row = _row(evaluated_table(expression, well).rows[0], sorted(well), [_MOST_PICTURES])
        row["name"] = shown
    errors: dict[str, list[int]] = {}
    for rank in ranks:
        if rank not in well:
            errors.setdefault(cut(str(values[rank][1]), 300), []).append(rank)
    for words, members in errors.items():
        row["cells"].append(_cell(members, words, "error"))
    row["cells"].sort(key=lambda cell: cell["ranks"][:1] or [len(ranks)])
    return {"ranks": ranks, "row": row, "number": number}


def _row(row: ComparisonRow, ranks: Sequence[int], left: list[int]) -> Json:
    """A row: a cell for each run of neighbours; of many workers one for each value."""
    more = 0
    if len(ranks) > MOST_COLUMNS:
        spans, more = listed(row)
        runs = [(span, span.ranks) for span in spans]
    else:
        runs = [(span, covered) for span, covered in runs_of(row, ranks) if span is not None]
    cells = []
    for span, covered in runs:
        cell = _cell(covered, span.words.text, span.words.role, span.note)
        if span.heat is not None and left[0] > 0:
            left[0] -= 1
            cell |= {"image": heat_source(span.heat), "alt": span.heat.alt}
        cells.append(cell)
    if more:
        cells.append(_cell((), f"and {more} more values", "muted"))
    return {
        "name": cut(row.name, 80),
        "about": cut(row.about, 80),
        "cells": cells,
        "differs": row.differs,
        "changed": row.changed,
    }


def _cell(ranks: Sequence[int], words: str, role: str, note: str = "") -> Json:
    return {"ranks": list(ranks), "words": printable(words), "role": role, "note": note}
