"""What a worker records of its program line by line: which variables each line has set, to what.

A `Recorder` belongs to one worker, for one program; the tracer calls it at each line of the user's
code before it runs, and when a frame is left. What has changed since the last line of the frame is
the work of the line that ran before, and is recorded as that. With names only lines that set one of
them are recorded.

The last `capacity` lines are kept, in `MOST_BYTES` at most, until the next program is recorded; of
those that were dropped, the last that has set a name, if there is room. A line holds no live value
(kept_values.py), and no frame. The worker's own thread alone writes; probes read `ring` and
`last_lost` from other threads.

Not noticed are changes within objects, and of large tensors that a collective between processes has
written to; changes of containers are as far as their first and last items tell. What a
function does to a variable of the cell is told of the function's line if its code mentions it, else
of the line that called it.

What was recorded is looked at from beside the worker, by the probes at the end of this file.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import perf_counter_ns as clock
from types import FrameType
from typing import Any, NamedTuple

from ..ccl.board.ledger import ledger_of
from ..ccl.call import Call
from ..runtime.errors import ArgumentError
from ..runtime.failures import safe_str
from ..runtime.interpreter_lock import copied
from ..runtime.services import probe
from ..runtime.worker import Worker
from .code_objects import Code, is_comprehension, scope_of
from .frames import names_in_cell
from .kept_values import Gone, Kept, is_same, is_shown, mark_of
from .watch import is_class_body, watch_of

CAPACITY = 10_000
MOST_BYTES = 32 * 2**20
_KEY = "discolab.debugger.recorders"  # in `Worker.shared`, by rank
_LINE = 200  # bytes, about, of a line without values
_MISSING = object()
_GONE = Gone()

Caller = tuple[str, int, str]


class Line(NamedTuple):
    """One line that has run.

    Attributes
    ----------
    number
        Counts the lines that were recorded, from 1.
    frame
        The same for the lines of one frame.
    file, ran, function
        What has run; of the first line of a frame, where the function begins.
    now
        The line that comes next in the frame; 0: it is left.
    times
        How often this line has run on this worker; of an entry, how often the function was called.
    entry
        Whether nothing has run yet: `changes` are what the frame begins with.
    at
        When it had run, in nanoseconds of no particular clock.
    callers
        File, line and function of the frames around it, the outermost first.
    changes
        What it has set.
    home, outside
        The number of the cell's frame, and what it has set of the cell's variables; of a line of
        a function.
    size
        Bytes that it takes, about.
    """

    number: int
    frame: int
    file: str
    ran: int
    function: str
    now: int
    times: int
    entry: bool
    at: int
    callers: tuple[Caller, ...]
    changes: Mapping[str, Kept | Gone]
    home: int
    outside: Mapping[str, Kept | Gone]
    size: int

    def what(self, name: str) -> Kept | Gone | None:
        """What it has made of a variable, None if nothing."""
        return self.changes.get(name) or self.outside.get(name)


class _Frame:
    """What is known of a frame that runs: what its variables were at its last line."""

    __slots__ = (
        "call", "callers", "code", "goes_on", "kept", "left", "line", "marks", "number", "recorder"
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, number: int, code: Code, callers: tuple[Caller, ...]
    ) -> None:
        self.recorder = recorder
        self.number = number
        self.code = code
        self.callers = callers
        self.marks: dict[str, Any] = {}
        self.kept: dict[str, Kept] = {}
        self.call: Call | None = None  # the collective that was the last at the last line
        self.line = 0
        self.goes_on = False  # with the variables of a frame that is left
        self.left = False  # as a generator is that has yielded

    def then(self, code: Code) -> _Frame:
        """The state of the frame that goes on where this one has ended, with its variables."""
        code.counts = self.code.counts  # two of its lines may be one
        found = _Frame(self.recorder, self.number, code, self.callers)
        found.marks, found.kept, found.call = self.marks, self.kept, self.call
        found.goes_on = True
        return found


class Recorder:
    """See the module.

    Attributes
    ----------
    ring
        The last lines.
    dropped
        How many lines there were before these.
    last_lost
        By name the last of these that has set it, with that change alone.
    bytes
        What the ring takes, about.
    error
        What ended the recording, "" if nothing did.
    ordinal
        Of the call whose program it is (`Worker.executed`).
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        capacity: int = CAPACITY,
        most_bytes: int = MOST_BYTES,
        worker: Worker | None = None,
    ) -> None:
        self._last_call = _calls_of(worker)
        self.names = check_names(names)
        self.capacity = max(int(capacity), 1)
        self.most_bytes = most_bytes
        self.ordinal = 0 if worker is None else worker.executed
        self.ring: deque[Line] = deque()
        self.dropped = 0
        self.last_lost: dict[str, Line] = {}
        self.bytes = 0
        self._lost_bytes = 0
        self.error = ""
        self.begun = clock()
        self._on = True
        self._lines = 0
        self._frames = 0
        self._codes: dict[int, Code] = {}  # by id of the code object, which is kept in it
        self._cells: dict[tuple[int, str], _Frame] = {}  # by namespace and file
        self._homes: dict[int, _Frame] = {}  # the last of them, by namespace

    def on_line(self, frame: FrameType) -> None:
        """`frame` is about to run a line."""
        if self._on:
            self._note(frame, frame.f_lineno or 0)

    def on_return(self, frame: FrameType) -> None:
        """`frame` is left, by a return, an exception or a yield."""
        if self._on:
            self._note(frame, 0)

    def end(self) -> None:
        """The program is over; what was recorded stays."""
        self._on = False
        self._codes.clear()
        self._cells.clear()
        self._homes.clear()

    def _note(self, frame: FrameType, now: int) -> None:
        try:
            state = self._state_of(frame)
            if state is None:
                return
            if state.left:  # it goes on, and may be called from elsewhere
                state.callers = _callers_of(frame)
            state.left = not now
            entry = state.line == 0
            ran = state.line or (now if state.goes_on else frame.f_code.co_firstlineno)
            changes = self._changes(state, frame, state.code.sets.get(state.line, ()))
            place, counts = -now * state.goes_on if entry else ran, state.code.counts
            times = counts[place] = counts.get(place, 0) + 1
            if now:
                state.line = now
            home = self._homes.get(id(frame.f_globals)) if state.code.outside else None
            outside = {} if home is None else self._changes_in(home, state, frame)
            if changes or outside or not (self.names or (entry and state.goes_on)):
                number = 0 if home is None else home.number
                self._add(state, frame, (ran, now, times, entry), changes, (number, outside))
        except Exception as exc:  # of a value with its own mind; the program must not feel it
            self.error = f"{type(exc).__name__}: {safe_str(exc)}"
            self._on = False

    def _state_of(self, frame: FrameType) -> _Frame | None:
        """What is known of a frame; None for frames that are not recorded."""
        watch = watch_of(frame)
        if watch is None:
            return None
        state: _Frame | None = watch.recorded
        if state is not None and state.recorder is self:
            return state
        code = frame.f_code
        if is_comprehension(code) or is_class_body(code):
            return None
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = Code(code)
        cell = None
        if code.co_name == "<module>":
            cell = id(frame.f_globals), code.co_filename
            if cell in self._cells:  # a cell's last expression is a code object of its own
                state = watch.recorded = self._cells[cell].then(known)
                self._homes[id(frame.f_globals)] = state
                return state
        self._frames += 1
        state = watch.recorded = _Frame(self, self._frames, known, _callers_of(frame))
        if cell is not None:
            self._cells[cell] = self._homes[id(frame.f_globals)] = state
        return state

    def _changes(
        self, state: _Frame, frame: FrameType, sets: Collection[str]
    ) -> dict[str, Kept | Gone]:
        scope = scope_of(frame)
        if sets and _has_raised(frame):
            sets = ()  # the line has not come to its end
        call = self._last_call()
        met, state.call = call is not state.call, call
        names: Iterable[str]
        if self.names:
            names = self.names
        elif state.code.is_function:
            names = list(scope)
        else:
            names = names_in_cell(frame)
            if state.goes_on:
                names = dict.fromkeys([*state.marks, *names])
        marks, there = state.marks, 0
        changes: dict[str, Kept | Gone] = {}
        for name in names:
            value = scope.get(name, _MISSING)
            if value is _MISSING:
                continue
            there += 1
            mark = marks.get(name, _MISSING)
            if (
                mark is _MISSING
                or name in sets
                or not is_same(mark, value)
                or (met and name in state.kept and state.kept[name].differs(value))
            ):
                marks[name] = mark_of(value)
                if is_shown(value):
                    changes[name] = state.kept[name] = Kept(value)
        if there < len(marks):
            for name in [name for name in marks if name not in scope]:
                del marks[name]
                state.kept.pop(name, None)
                changes[name] = _GONE  # by `del`, or at the end of an `except ... as name`
        return changes

    def _changes_in(self, home: _Frame, state: _Frame, frame: FrameType) -> dict[str, Kept | Gone]:
        """What a function has done to those of the cell's variables that its code mentions."""
        changes: dict[str, Kept | Gone] = {}
        for name in state.code.outside:
            if name not in home.kept and name not in state.code.makes:
                continue
            if self.names and name not in self.names:
                continue
            value = frame.f_globals.get(name, _MISSING)
            if value is _MISSING:
                if home.kept.pop(name, None) is not None:
                    del home.marks[name]
                    changes[name] = _GONE
            elif name not in home.marks or not is_same(home.marks[name], value):
                home.marks[name] = mark_of(value)
                if is_shown(value):
                    changes[name] = home.kept[name] = Kept(value)
        return changes

    def _add(
        self,
        state: _Frame,
        frame: FrameType,
        place: tuple[int, int, int, bool],
        changes: dict[str, Kept | Gone],
        beyond: tuple[int, dict[str, Kept | Gone]],
    ) -> None:
        ran, now, times, entry = place
        home, outside = beyond
        size = _LINE + sum(kept.size for kept in (*changes.values(), *outside.values()))
        code = frame.f_code
        self._lines += 1
        self.ring.append(
            Line(
                self._lines, state.number, code.co_filename, ran, code.co_name, now,
                times, entry, clock(), state.callers, changes, home, outside, size,
            )
        )  # fmt: skip
        self.bytes += size
        while len(self.ring) > self.capacity or (
            self.bytes > self.most_bytes and len(self.ring) > 1
        ):
            self._drop(self.ring.popleft())

    def _drop(self, line: Line) -> None:
        self.dropped += 1
        self.bytes -= line.size
        for name, kept in (*line.changes.items(), *line.outside.items()):
            before = self.last_lost.pop(name, None)
            if before is not None:
                self._lost_bytes -= before.size
            size = _LINE + kept.size
            if self._lost_bytes + size <= self.most_bytes // 4:
                self._lost_bytes += size
                own = {name: kept} if name in line.changes else {}
                outside = {} if own else {name: kept}
                self.last_lost[name] = line._replace(changes=own, outside=outside, size=size)


def begin(worker: Worker, names: Iterable[str] = (), capacity: int = CAPACITY) -> Recorder:
    """Record a program that begins now; what was recorded before is forgotten."""
    recorder = Recorder(names, capacity, worker=worker)
    worker.shared.setdefault(_KEY, {})[worker.worker_id] = recorder
    return recorder


def _calls_of(worker: Worker | None) -> Callable[[], Call | None]:
    """Gives the last collective of a worker: backends write to tensors without torch's knowing."""
    if worker is None:
        return lambda: None
    return functools.partial(ledger_of(worker).last, worker.worker_id)


def recorder_of(worker: Worker) -> Recorder | None:
    """What the last traced program of a worker has recorded, None if there was none."""
    found: Recorder | None = worker.shared.get(_KEY, {}).get(worker.worker_id)
    return found


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of variables to record.

    Raises
    ------
    ArgumentError
        If one can be no variable's.
    """
    found = tuple(dict.fromkeys(names))
    for name in found:
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError(f"{name!r:.60} can't be recorded: give names of variables, as loss")
    return found


def _callers_of(frame: FrameType) -> tuple[Caller, ...]:
    """The frames around one that begins, as the recording knows them."""
    watch = watch_of(frame)
    parent = watch.parent if watch is not None else None
    outer = frame.f_back
    while outer is not None and parent is not None and watch_of(outer) is not parent:
        outer = outer.f_back
    if outer is None or parent is None:
        return ()
    code = outer.f_code
    around = parent.recorded.callers if parent.recorded is not None else ()
    return (*around, (code.co_filename, outer.f_lineno or 0, code.co_name))


def _has_raised(frame: FrameType) -> bool:
    """Whether an exception has ended the line that ran."""
    watch = watch_of(frame)
    return watch is not None and watch.raising != ""


# -- looking at what was recorded ------------------------------------------------------------------


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
    lost, lines = recorder.last_lost.copy(), copied(recorder.ring)
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
    found = [line for line in copied(recorder.ring) if line.what(name)]
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
    lines = copied(recorder.ring)[-last:]
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
    lines = [line for line in copied(recorder.ring) if line.number <= number]
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
