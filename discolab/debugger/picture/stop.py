"""Draws a stop: why, where everybody is, who waits for whom, the stack, variables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...views.formats import format_workers
from ...views.parts import Card, Line, Part, Role, Text
from ..stops import Stop, WorkerAt
from .operation import operation_parts
from .places import format_place, source_parts, stack_parts
from .variables import variable_parts

_NEXT = "%disco_next, %disco_step (into functions), %disco_continue; %disco_eval EXPR asks here"
_MANY = {"waits": "wait", "has": "have", "is": "are", "was": "were", "runs": "run", "does": "do"}


def stop_parts(stop: Stop) -> Part:
    """Draw a stop.

    Parameters
    ----------
    stop : Stop

    Returns
    -------
    Part
    """
    try:
        return _draw(stop)
    except Exception as error:  # a view never raises
        words = f"{stop.name}: {stop.reason} (could not be drawn: {type(error).__name__})"
        return Text(words, "error")


def _draw(stop: Stop) -> Part:
    if stop.finished:
        return Card(_head(stop), tuple(_others(stop)))
    parts: list[Part] = [*_groups(stop), *_others(stop), *_notes(stop)]
    parts += [*source_parts(stop), *stack_parts(stop)]
    parts += [*operation_parts(stop), *variable_parts(stop)]
    if stop.number == 1 and stop.groups and not stop.is_past:
        parts.append(Text(_NEXT, "muted"))
    return Card(_head(stop), tuple(parts))


def _head(stop: Stop) -> Line:
    number = "" if stop.finished or not stop.number else f" · stop {stop.number}"
    spans = [Text(stop.name, "title"), Text(number, "muted")]
    if stop.reason:
        spans += [Text(" · ", "muted"), Text(stop.reason)]
    return Line(tuple(spans))


def _groups(stop: Stop) -> list[Part]:
    """Where the groups are, if there are several; the first is behind."""
    if len(stop.groups) < 2:
        return []
    parts: list[Part] = []
    for place, ranks in enumerate(stop.groups):
        stack = stop.workers[ranks[0]].stack
        where = f" at {format_place(stack[-1])}" if stack else ""
        spans = [Text(f"{format_workers(ranks)}{where}")]
        if not place and stop.number and not stop.is_past:  # after a failure nobody goes on
            verb = "advance" if len(ranks) > 1 else "advances"
            spans += [Text(" · ", "muted"), Text(f"behind: {verb} next", "title")]
        parts.append(Line(tuple(spans)))
    return parts


def _others(stop: Stop) -> list[Part]:
    """The workers that are not paused, a line for those of whom the same is said."""
    said: dict[tuple[str, Role], list[int]] = {}
    for worker in stop.workers:
        if worker.state != "paused":
            said.setdefault(_state(worker), []).append(worker.rank)
    total = len(stop.workers)
    return [_sentence(ranks, words, role, total) for (words, role), ranks in said.items()]


def _state(worker: WorkerAt) -> tuple[str, Role]:
    match worker.state:
        case "done":
            return worker.words or "has ended", "plain"
        case "error":
            return f"ended with {worker.error}" if worker.error else "has failed", "error"
        case "aborted":
            return worker.words or "was aborted", "muted"
        case "out":
            return worker.words or "does not take part", "muted"
        case "collective":
            return worker.words or "waits in a collective", "plain"
    return worker.words or "runs", "plain"


def _sentence(ranks: Sequence[int], words: str, role: Role, total: int) -> Line:
    if len(ranks) > 1:
        verb, blank, rest = words.partition(" ")
        words = _MANY.get(verb, verb) + blank + rest
    who = f"all {total} workers" if len(ranks) == total > 1 else format_workers(ranks)
    return Line((Text(f"{who} "), Text(words, role)))


def _notes(stop: Stop) -> list[Part]:
    """Why single workers stopped, if the head does not say it, and what went wrong there."""
    paused = [worker for worker in stop.workers if worker.state == "paused"]
    notes = [
        *_told(((w.rank, w.note) for w in paused if w.note not in stop.reason), "warning"),
        *_told(((w.rank, w.error) for w in paused), "error"),
    ]
    return list(notes)


def _told(pairs: Iterable[tuple[int, str]], role: Role) -> list[Line]:
    said: dict[str, list[int]] = {}
    for rank, words in pairs:
        if words:
            said.setdefault(words, []).append(rank)
    return [
        Line((Text(f"{format_workers(ranks)}: "), Text(words, role)))
        for words, ranks in said.items()
    ]
