"""What records on a worker: a ring of the last events, and how it gets into the worker's loop.

A `Recorder` belongs to one worker and lies in `Worker.shared`, so it ends with it. The worker's own
thread alone writes: it appends to `ring` and holds what is not over in `open` and `spans`. Others
read (reading.py). While recording is off nothing of this is on any path.

The ring keeps no argument, tensor or function: commands and spans are tuples of strings and
numbers, with call sites as code objects; a collective is the ledger's own `Call`, which tells of
itself when it is over.

An interrupt may land anywhere while a command runs. So what has begun is noted first, and closed in
`_close`, which runs when no exception can come any more; should even that fail, the next command
does it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns as clock
from types import FunctionType
from typing import Any, Self, TypeVar

from ..ccl.call import Call
from ..runtime.actions import Command, DiscoAction, attribute, function_text
from ..runtime.arguments import Register
from ..runtime.functions import worker_function
from ..runtime.interrupts import plain_lock, shield
from ..runtime.restart import forget_when_replaced
from ..runtime.worker import Worker, current_worker, current_worker_or_none
from .events import COMMAND, DONE, FAILED, INTERNAL, MARK, SPAN, STOPPED

CAPACITY = 65_536
CALLS = ("the cell", "the script")  # `disco_command` of what is the user's own
OWN_WORDS = "the trace"  # `disco_command` of what is called for a trace, and left out of it
_KEY = "discolab.trace"  # in `Worker.shared`: the recorders of its workers, by rank
forget_when_replaced(_KEY)  # it stays when a worker ends: what it has can still be collected
_CALL_PACKED = int(DiscoAction.CALL_PACKED)
_MOST_OPEN = 1_000  # spans around each other; what is left open in a loop stays bounded

F = TypeVar("F", bound=Callable[..., Any])


Opened = tuple[str, str, Any, int, int, str]
"""The command that runs: its name, the file name if it is a cell, site, begin, ordinal, and
`INTERNAL` if it is discolab's own."""

Entry = tuple[int, str, str, str, Any, int, int, str, int, int, str]
"""A command, span or mark in the ring: its number, kind, name, the file name of a cell, site,
begin, end, state, ordinal, depth, and the thread if it is not the worker's own, or `INTERNAL`."""

CollectiveEntry = tuple[int, Call]
"""A collective in the ring. All are plain tuples: a named one takes longer than all the rest."""

_mine = threading.local()  # the recorder of a worker, on its own thread


class Recorder:
    """The events of one worker; see the module.

    Attributes
    ----------
    ring
        The last events, by rising number.
    cleared
        What has a lower number was forgotten on purpose.
    open
        The command that runs, None between commands.
    spans
        The user's spans that are open in it, the outermost first.
    on
        Whether it records.
    profiled
        What torch's profiler has recorded; see profiler.py.
    """

    def __init__(self, worker: Worker, capacity: int) -> None:
        self.worker = worker
        self.ring: deque[Entry | CollectiveEntry] = deque(maxlen=capacity)
        self.cleared = 0
        self.open: Opened | None = None
        self.spans: list[span] = []
        self.on = False
        self.profiled: list[tuple[Any, ...]] = []
        self.next = itertools.count().__next__
        self._plain = worker.dispatch[_CALL_PACKED]

    def switch(self, on: bool) -> None:
        """Begin or end recording, from the next command on; on the worker's thread."""
        with shield(), _switching:  # whole, or not at all
            self.on = on
            self.worker.dispatch[_CALL_PACKED] = self._call_packed if on else self._plain
            (_recording.add if on else _recording.discard)(self)
            _set_watch()

    def _call_packed(self, command: Command) -> None:
        if self.open is not None or self.spans:
            self._close(clock(), STOPPED)
        worker = self.worker
        func = command[2]
        if type(func) is Register:
            func = worker.registers.get(func)
        cell, whose, ordinal = "", "", worker.executed
        if type(func) is FunctionType:
            name = func.__qualname__
            title = getattr(func, "disco_command", None)
        else:
            name, title = _names(func)
        if type(title) is str:
            if title == OWN_WORDS:
                self._plain(command)
                return
            if title in CALLS:
                cell = _cell_of(command)
            else:
                whose = INTERNAL
            name = title
        del func
        site = command[-1]
        begin = clock()
        self.open = name, cell, site, begin, ordinal, whose
        try:
            self._plain(command)
        except BaseException:  # torn by an interrupt: more of them may be on their way
            self._settle()
            self._close(clock(), STOPPED)
            raise
        end = clock()
        failed = worker.failed_calls
        state = DONE
        if failed and failed[-1][0] == ordinal:
            failure = failed[-1][1]
            state = STOPPED if failure.interrupted else FAILED
            if whose and failure.command != name:  # what it was given had failed: told of there
                state = DONE
        if self.spans:
            self._close(end, state)
            return
        self.ring.append(
            (self.next(), COMMAND, name, cell, site, begin, end, state, ordinal, 0, whose)
        )
        self.open = None

    def _has(self, opened: span) -> bool:
        """Whether a span is in the ring already: an interrupt came as it was left."""
        last = self.ring[-1] if self.ring else None
        return last is not None and len(last) > 2 and (last[1], last[5]) == (SPAN, opened.begin)

    def _settle(self) -> None:
        while True:
            try:
                self.worker._absorb()
                return
            except BaseException:
                continue

    def _close(self, end: int, state: str) -> None:
        """Note the end of the command that runs, and of the spans that are open in it."""
        opened, left = self.open, self.spans
        ordinal = -1 if opened is None else opened[4]
        for depth in range(len(left) - 1, -1, -1):
            if self.on and not self._has(left[depth]):
                self.ring.append(left[depth].entry(self, end, state, ordinal, depth))
        left.clear()
        if opened is not None and self.on:
            name, cell, site, begin, ordinal, whose = opened
            entry = self.next(), COMMAND, name, cell, site, begin, end, state, ordinal, 0, whose
            self.ring.append(entry)
        self.open = None


def _cell_of(command: Command) -> str:
    """The file name among the arguments of a command that runs a cell."""
    args = command[3]
    return args[1] if len(args) > 1 and type(args[1]) is str else ""


def _names(func: Any) -> tuple[str, Any]:
    """What a callable object is called, and the words that it has of its own."""
    try:
        return function_text(func), attribute(func, "disco_command")
    except BaseException:  # of the object's own attributes
        return "a command", None


def recorder_of(worker: Worker) -> Recorder | None:
    """The recorder of a worker, None if there never was one."""
    recorders = worker.shared.get(_KEY)
    return None if recorders is None else recorders.get(worker.worker_id)


_recording: weakref.WeakSet[Recorder] = weakref.WeakSet()  # those that are on, of this process
_switching = plain_lock()  # guards it, and that `Call.watch` is set while there are any


def _watch(call: Call) -> None:
    """See `Call.watch`."""
    recorder = recorder_of(call.worker)
    if recorder is not None and recorder.on:
        recorder.ring.append((recorder.next(), call))


def _set_watch() -> None:
    """Watch collectives while somebody records; those of closed sessions do not count."""
    for recorder in list(_recording):
        if recorder.worker.ended:
            _recording.discard(recorder)
    Call.watch = staticmethod(_watch) if _recording else None


# -- worker functions ------------------------------------------------------------------------


@worker_function(OWN_WORDS)
def begin_recording(capacity: int) -> None:
    """Record from the next command on (a worker function)."""
    worker = current_worker()
    recorders = worker.shared.setdefault(_KEY, {})
    recorder = recorders.get(worker.worker_id)
    if recorder is None:
        recorder = recorders[worker.worker_id] = Recorder(worker, capacity)
    elif recorder.ring.maxlen != capacity:
        recorder.ring = deque(recorder.ring, maxlen=capacity)
    _mine.recorder = recorder
    recorder.switch(True)


@worker_function(OWN_WORDS)
def end_recording() -> None:
    """Record no more; what there is stays (a worker function)."""
    recorder = recorder_of(current_worker())
    if recorder is not None and recorder.on:
        recorder.switch(False)


@worker_function(OWN_WORDS)
def forget() -> None:
    """Forget what was recorded (a worker function)."""
    recorder = recorder_of(current_worker())
    if recorder is not None:
        recorder.cleared = recorder.next() + 1
        recorder.ring.clear()
        recorder.profiled = []


# -- for the user's code on workers ----------------------------------------------------------


class span:  # noqa: N801 - used like a function
    """Mark a part of a worker's program: ``with discolab.trace.span("forward"):``.

    Also a decorator. Where nothing is recorded, on the controller too, it does nothing. What an
    interrupt leaves open ends with its command.
    """

    __slots__ = ("_recorder", "begin", "name", "place")

    def __init__(self, name: str) -> None:
        self.name = name if type(name) is str else str(name)
        self._recorder: Recorder | None = None

    def __call__(self, func: F) -> F:
        """Mark all of a function."""
        name = self.name

        @functools.wraps(func)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return func(*args, **kwargs)

        return marked  # type: ignore[return-value]

    def __enter__(self) -> Self:
        if Call.watch is None:  # nobody records in this process
            return self
        recorder: Recorder | None = getattr(_mine, "recorder", None)
        own = recorder is not None
        if not own:
            recorder = _recorder_here()
        if recorder is not None and recorder.on:
            frame = sys._getframe(1)
            self.place = frame.f_code, frame.f_lasti, None
            self._recorder = recorder
            self.begin = clock()
            if own and len(recorder.spans) < _MOST_OPEN:
                recorder.spans.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        end = clock()
        spans = recorder.spans
        self._recorder = None
        state = DONE if kind is None else _state_of(kind)
        if spans and spans[-1] is self:
            ordinal = recorder.worker.executed
            recorder.ring.append(
                (recorder.next(), SPAN, self.name, "", self.place, self.begin, end, state, ordinal,
                 len(spans) - 1, "")
            )  # fmt: skip
            spans.pop()
        else:
            self._leave(recorder, end, state)

    def _leave(self, recorder: Recorder, end: int, state: str) -> None:
        """End it on another thread, or in another order than it was entered."""
        ordinal, spans = recorder.worker.executed, recorder.spans
        if self in spans:
            recorder.ring.append(self.entry(recorder, end, state, ordinal, spans.index(self)))
            spans.remove(self)
        elif getattr(_mine, "recorder", None) is not recorder:
            thread = threading.current_thread().name
            recorder.ring.append(self.entry(recorder, end, state, ordinal, 0, thread))

    def entry(
        self, recorder: Recorder, end: int, state: str, ordinal: int, depth: int, thread: str = ""
    ) -> Entry:
        """As it goes in the ring."""
        what = recorder.next(), SPAN, self.name, "", self.place
        return (*what, self.begin, end, state, ordinal, depth, thread)


def mark(name: str) -> None:
    """Note a moment of a worker's program; does nothing where nothing is recorded."""
    if Call.watch is None:
        return
    recorder: Recorder | None = getattr(_mine, "recorder", None) or _recorder_here()
    if recorder is None or not recorder.on:
        return
    frame = sys._getframe(1)
    place = frame.f_code, frame.f_lasti, None
    now, ordinal, depth = clock(), recorder.worker.executed, len(recorder.spans)
    name = name if type(name) is str else str(name)
    recorder.ring.append(
        (recorder.next(), MARK, name, "", place, now, now, DONE, ordinal, depth, "")
    )


def _state_of(kind: type[BaseException]) -> str:
    """What an exception that leaves a span has made of it."""
    return STOPPED if issubclass(kind, KeyboardInterrupt) else FAILED


def _recorder_here() -> Recorder | None:
    """Of the worker whose program this is, on a thread that it has started."""
    worker = current_worker_or_none()
    return None if worker is None else recorder_of(worker)
