"""Draws a stop: why, where everybody is, who waits for whom, the stack, variables. Pure.

Where workers are is shown by excerpts of the source with their marks. Places close to each other
are in one excerpt; others have one of their own. Where a NaN hunt has stopped, the operation's
inputs and output are shown side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...runtime.sources import display_name, is_cell
from ...views.formats import cut, format_workers
from ...views.parts import (
    Card,
    ComparisonTable,
    HStack,
    Line,
    Mark,
    Part,
    Role,
    Source,
    SourceLine,
    Text,
    VStack,
)
from ..records import Spot
from ..stops import Record, Stop, WorkerAt
from .values import by_name, row_of, variable_parts

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
            return worker.failed, "error"
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


# -- excerpts of the source ------------------------------------------------------------------------


_BEFORE, _AFTER = 5, 6  # lines
_FEW_BEFORE, _FEW_AFTER = 2, 3  # where there are many places
_MOST_LARGE, _MOST_EXCERPTS = 3, 8
_CLOSE = 2  # lines between excerpts that are joined
_LONGEST_LINE = 160
_DEEP = 7  # frames that are told

#: How a `Mark` looks, by the state of its workers.
LOOK_OF_STATE = {
    "paused": "paused",
    "collective": "waiting",
    "running": "running",
    "error": "failed",
}


@dataclass
class _Excerpt:
    """Lines from `first` to `last` of a file, and who is at which of them."""

    file: str
    first: int
    last: int
    functions: list[str] = field(default_factory=list)
    marks: dict[int, dict[str, list[int]]] = field(default_factory=dict)


def source_parts(stop: Stop) -> list[Part]:
    """Excerpts of the source around all places where workers are."""
    places: dict[tuple[str, int, str], dict[str, list[int]]] = {}
    for worker in stop.workers:
        spot, look = stop.spot(worker.rank), LOOK_OF_STATE.get(worker.state)
        if spot is not None and look is not None:
            places.setdefault(spot.place, {}).setdefault(look, []).append(worker.rank)
    excerpts = _joined(places)
    drawn = [_drawn(excerpt, stop.sources) for excerpt in excerpts[:_MOST_EXCERPTS]]
    if len(excerpts) > len(drawn):
        drawn.append(Text(f"and {len(excerpts) - len(drawn)} more places", "muted"))
    return [HStack(tuple(drawn))] if len(drawn) > 1 else drawn


def _joined(places: Mapping[tuple[str, int, str], Mapping[str, list[int]]]) -> list[_Excerpt]:
    """One excerpt for places in one file that are in one function, or close."""
    many = len(places) > _MOST_LARGE
    before, after = (_FEW_BEFORE, _FEW_AFTER) if many else (_BEFORE, _AFTER)
    found: list[_Excerpt] = []
    files = list(dict.fromkeys(file for file, _, _ in places))
    for file, line, function in sorted(places, key=lambda place: (files.index(place[0]), place[1])):
        last = found[-1] if found else None
        if last is None or last.file != file or line - before > last.last + 1 + _CLOSE:
            last = _Excerpt(file, max(1, line - before), line + after)
            found.append(last)
        last.last = max(last.last, line + after)
        if function not in last.functions:
            last.functions.append(function)
        looks = last.marks.setdefault(line, {})
        for look, ranks in places[file, line, function].items():
            looks.setdefault(look, []).extend(ranks)
    return found


def _drawn(excerpt: _Excerpt, sources: Mapping[str, Sequence[str]]) -> Part:
    title = _title(excerpt)
    lines = sources.get(excerpt.file, ())
    shown = []
    for number in range(excerpt.first, excerpt.last + 1):
        marks = tuple(
            Mark(tuple(sorted(ranks)), look)
            for look, ranks in excerpt.marks.get(number, {}).items()
        )
        if number <= len(lines) or marks:
            text = lines[number - 1].rstrip("\r\n") if number <= len(lines) else "?"
            shown.append(SourceLine(number, cut(text, _LONGEST_LINE), marks))
    while shown and not shown[-1].text.strip() and not shown[-1].marks:
        shown.pop()
    while shown and not shown[0].text.strip() and not shown[0].marks:
        shown.pop(0)
    return VStack((title, Source(tuple(shown))))


def _title(excerpt: _Excerpt) -> Line:
    named = [name for name in excerpt.functions if name != "<module>"]
    words = f" in {', '.join(named)}" if named else ""
    return Line((Text(short_name(excerpt.file), "title"), Text(words, "muted")))


def short_name(file: str) -> str:
    """``Cell In[3]``, or the last two steps of a path."""
    if is_cell(file):
        return display_name(file)
    steps = file.replace("\\", "/").split("/")
    return "/".join(steps[-2:])


def format_place(spot: Spot) -> str:
    """``Cell In[3], line 4 in train`` or ``net.py:4 in forward``."""
    name = short_name(spot.file)
    where = f"{name}, line {spot.line}" if is_cell(spot.file) else f"{name}:{spot.line}"
    return where if spot.function == "<module>" else f"{where} in {spot.function}"


# -- stacks ---------------------------------------------------------------------------------------


def stack_parts(stop: Stop) -> list[Part]:
    """The frames in one line, outermost first, for all workers that came the same way."""
    ways: dict[object, list[int]] = {}
    for worker in stop.workers:
        if worker.stack and worker.state in LOOK_OF_STATE:
            *callers, here = worker.stack
            way = (*(spot.place for spot in callers), (here.file, here.function))
            ways.setdefault(way, []).append(worker.rank)
    if all(len(stop.workers[ranks[0]].stack) < 2 for ranks in ways.values()):
        return []
    return [_stack_line(stop, ranks, len(ways) > 1) for ranks in ways.values()]


def _stack_line(stop: Stop, ranks: Sequence[int], named: bool) -> Line:
    stack = stop.workers[ranks[0]].stack
    lines = {stop.workers[rank].stack[-1].line for rank in ranks}
    chosen = max(0, len(stack) - 1 - stop.frame)
    label = f"stack of {format_workers(ranks)}: " if named else "stack: "
    spans = [Text(label, "muted")]
    gap = False
    for place, spot in enumerate(stack):
        if _left_out(place, len(stack), chosen):
            if not gap:
                spans.append(Text("› … ", "muted"))
            gap = True
            continue
        if place:
            spans.append(Text("› ", "muted"))
        new_file = not place or gap or stack[place - 1].file != spot.file
        gap = False
        file = f"{short_name(spot.file)} " if new_file else ""
        line = f":{spot.line}" if place < len(stack) - 1 or len(lines) == 1 else ""
        function = "" if spot.function == "<module>" and file else spot.function
        words = f"{file.rstrip() if not function else file}{function}{line}"
        spans.append(Text(words, "title" if place == chosen else "plain"))
        spans.append(Text(" "))
    if stop.frame:
        spans.append(Text(f"(frame {len(stack) - 1 - chosen} is shown)", "muted"))
    return Line(tuple(spans))


def _left_out(place: int, depth: int, chosen: int) -> bool:
    return depth > _DEEP and 1 < place < depth - 4 and abs(place - chosen) > 1


# -- the operation of a NaN hunt -------------------------------------------------------------------


def operation_parts(stop: Stop) -> list[Part]:
    """A table for each operation that workers stand at."""
    found: dict[str, dict[int, Mapping[str, Record]]] = {}
    for worker in stop.workers:
        if worker.found is not None:
            op, records = worker.found
            found.setdefault(op, {})[worker.rank] = records
    parts: list[Part] = []
    for op, values in found.items():
        ranks = sorted(values)
        whose = "" if len(ranks) == len(stop.workers) else f" on {format_workers(ranks)}"
        rows = [row_of(name, held, ranks) for name, held in by_name(values).items()]
        parts.append(Line((Text(op, "title"), Text(whose, "muted"))))
        parts.append(ComparisonTable(("value", ""), tuple(ranks), tuple(rows)))
    return parts
