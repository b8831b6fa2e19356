"""Looks at what a worker has recorded, from beside it: probes, and the plain records they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..runtime.services import probe
from ..runtime.worker import Worker
from .kept import Gone
from .recording import Caller, Line, recorder_of


class Facts(NamedTuple):
    """Of a whole recording.

    Attributes
    ----------
    ordinal
        Of the call whose program it is.
    lines, dropped
        How many were recorded, and how many of these are not kept.
    names
        The variables of which values are kept.
    error
        What ended the recording, "" if nothing did.
    """

    ordinal: int
    lines: int
    dropped: int
    names: list[str]
    error: str


class Place(NamedTuple):
    """Where a line ran: the same on all workers that have run it as often."""

    file: str
    ran: int
    function: str
    times: int
    entry: bool


class Step(NamedTuple):
    """A recorded line without its values."""

    number: int
    place: Place
    now: int
    callers: tuple[Caller, ...]


class Value(NamedTuple):
    """What a line has made of a variable; `seconds` since the program began."""

    number: int
    place: Place
    seconds: float
    record: Mapping[str, Any]


@probe
def facts(worker: Worker) -> tuple[Any, ...] | None:
    """See `Facts`; None if nothing was recorded."""
    recorder = recorder_of(worker)
    if recorder is None:
        return None
    lost, lines = recorder.last_lost.copy(), recorder.ring.copy()
    names = dict.fromkeys(
        [*lost, *(name for line in lines for name in (*line.changes, *line.outside))]
    )
    last = lines[-1].number if lines else 0
    return recorder.ordinal, last, last - len(lines), list(names), recorder.error


@probe
def values(worker: Worker, name: str, last: int) -> tuple[int, list[tuple[Any, ...]]]:
    """See `Value`: of the last lines that have set a variable; and how many there are before."""
    recorder = recorder_of(worker)
    if recorder is None:
        return 0, []
    lost = recorder.last_lost.get(name)
    found = [line for line in recorder.ring.copy() if line.what(name)]
    if lost is not None and (not found or lost.number < found[0].number):
        found.insert(0, lost)
    return len(found[:-last]), [
        (
            line.number,
            tuple(place_of(line)),
            (line.at - recorder.begun) / 1e9,
            kept.record(),
        )
        for line in found[-last:]
        if (kept := line.what(name)) is not None
    ]


@probe
def steps(worker: Worker, last: int) -> list[tuple[Any, ...]]:
    """See `Step`: of the last lines."""
    recorder = recorder_of(worker)
    if recorder is None:
        return []
    lines = list(recorder.ring.copy())[-last:]
    return [(line.number, tuple(place_of(line)), line.now, line.callers) for line in lines]


@probe
def variables(worker: Worker, wanted: Sequence[tuple[int, int]]) -> tuple[Any, ...] | None:
    """The variables of a frame when a line had run there, and the names that it has set.

    Parameters
    ----------
    wanted
        Ranks, and of each the number of the line.

    Returns
    -------
    tuple or None
        None if that line is not kept any more.
    """
    recorder, number = recorder_of(worker), dict(wanted).get(worker.worker_id)
    if recorder is None or number is None:
        return None
    lost = sorted(recorder.last_lost.copy().values(), key=lambda one: one.number)
    lines = [line for line in recorder.ring.copy() if line.number <= number]
    if not lines or lines[-1].number != number:
        return None
    line = lines[-1]
    held: dict[str, Any] = {}
    for one in [*(old for old in lost if old.number < lines[0].number), *lines]:
        if one.frame == line.frame:
            changes = one.changes
        elif one.home == line.frame:
            changes = one.outside
        else:
            continue
        for name, kept in changes.items():
            if isinstance(kept, Gone):
                held.pop(name, None)
            else:
                held[name] = kept
    changed = [] if line.entry else [name for name in line.changes if name in held]
    return {name: kept.record() for name, kept in held.items()}, changed


def place_of(line: Line) -> Place:
    """Where it ran."""
    return Place(line.file, line.ran, line.function, line.times, line.entry)
