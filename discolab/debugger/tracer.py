"""Tracer: steps through one program on one worker's thread, by ``sys.settrace``.

One tracer for each program that is traced, used on the worker's own thread alone; only
`DebugAgent.pause_wanted` and the breakpoints change from elsewhere, and are looked at on each line.
``sys.settrace`` is used on every version of Python: ``sys.monitoring`` is a table of the whole
process, and workers that are threads of one process would have to share it.

Python calls the global trace function (`_entering`) once for each call of a Python function. It
decides by code object: frames of the user's code get a `Watch` that is called at each line, frames
of library code get nothing and run as they would. A frame of library code that holds a breakpoint
is watched too. What is done within a trace function is itself not traced: nothing that a condition
or an evaluation calls stops.

Modules that are imported while a program runs are not traced, nor is what they call: whoever stops
there holds the lock of the import, and the other workers' threads would wait for it.

On Python before 3.13 each trace event copies the frame's variables to a dict and back. That dict
keeps a variable's value until the next event of that frame.

`stop_here` is what `breakpoint()` and failed assertions call; where nothing is traced, it begins to
trace the rest of the call.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from ..runtime.actions import Command, DiscoAction
from ..runtime.errors import WorkerInterrupted
from ..runtime.user_code import is_user
from ..runtime.worker import Worker, current_worker_or_none
from . import frames
from .agent import DebugAgent, agent_of
from .breaks import Break, as_f_string, compiled, is_hit, log_text
from .records import Arrival, Order
from .watch import Plan, Plans, Watch, headline, is_class_body, raising_in, watch_of

if TYPE_CHECKING:
    from ..runtime.worker import Worker
    from .agent import DebugAgent

T = TypeVar("T")
Hook = Callable[[FrameType], None]

_FREE, _STEP, _AMONG = range(3)
_warned: set[str] = set()  # of which this process was warned


class Tracer:
    """See the module.

    Attributes
    ----------
    on_line
        Called for each line of the user's code before it runs, and before the worker may stop
        there.
    on_return
        Called when a frame of the user's is left: by a return, an exception or a yield.
    attentive
        Whether every line is looked at.
    version
        Of the breakpoints, when they were last looked at.
    """

    def __init__(self, worker: Worker, agent: DebugAgent) -> None:
        self.worker = worker
        self.agent = agent
        self.on_line: Hook | None = None
        self.on_return: Hook | None = None
        self.attentive = False
        self.version = -1
        self._plans = Plans(agent.breaks)
        self._top: Watch | None = None  # of the innermost frame that is watched
        self._importing = 0
        self._armed = False
        self._standing = False
        self._arrivals: dict[tuple[str, int], int] = {}
        self._returned: dict[str, Any] = {}  # by the functions that were stepped out of
        self._hits: dict[int, int] = {}  # how often each breakpoint would have stopped it
        self._rest()

    def _rest(self) -> None:
        """Forget how to go on, and whom that concerned."""
        self._mode = _FREE
        self._leaving: frozenset[Watch] = frozenset()
        self._entry = False
        self._among: frozenset[Watch] = frozenset()
        self._outermost: Watch | None = None
        self._from: Watch | None = None  # where it stood
        self._here: Watch | None = None  # for "until": where to stop at line `_line` and later
        self._line = 0

    # -- in and out of tracing ---------------------------------------------------------------

    def run(self, thunk: Callable[[], T], mode: str) -> T:
        """Run ``thunk()`` on this thread, traced; its value.

        Parameters
        ----------
        thunk
        mode
            ``step`` stops at its first line, ``continue`` at breakpoints.
        """
        before = _look_before()
        self._begin(mode)
        try:
            sys.settrace(self._entering())
            value = thunk()
            self._look_after()
            return value
        finally:
            sys.settrace(before)
            self._end()

    def _look_after(self) -> None:
        """Say so if the program has taken the trace function away."""
        now = sys.gettrace()
        if getattr(now, "__name__", "") != "entering" and not self.worker.interrupts:
            _warn_once(
                "the program has called sys.settrace itself: from there on discolab could not stop "
                "it"
            )

    def arm(self, frame: FrameType, mode: str) -> None:
        """Trace from now on what was not: the user's frames from `frame` up, and what they call.

        For `breakpoint()` in a program that runs freely.
        """
        _look_before()
        self._begin(mode)
        for one in frames.user_frames(frame):
            watch = self._watch(one, self._plans.decide(one))
            watch.line = watch.line or one.f_lineno
        self._chain(frame)
        sys.settrace(self._entering())

    def disarm(self) -> None:
        """Trace no more."""
        if self._armed:
            sys.settrace(None)
            self._end()

    def _begin(self, mode: str) -> None:
        self._armed = True
        self._rest()
        self.version = self.agent.breaks.version
        self._entry = mode == "step"
        self._set_mode(_STEP if mode == "step" else _FREE)

    def _end(self) -> None:
        self._armed = False
        self._rest()
        self._returned = {}
        self.attentive = False
        self._top = None
        self._importing = 0
        self._plans.clear()

    # -- which frames ------------------------------------------------------------------------

    def _entering(self) -> Callable[[FrameType, str, Any], Any]:
        """The global trace function."""
        plans, decide, enter = self._plans.known, self._plans.decide, self._enter

        def entering(frame: FrameType, event: str, arg: Any) -> Any:
            try:
                plan = plans[id(frame.f_code)]
            except KeyError:
                plan = decide(frame)
            return None if plan is None else enter(frame, plan)

        return entering

    def _enter(self, frame: FrameType, plan: Plan) -> Any:
        """A frame that is watched begins, or a generator goes on."""
        if self._importing or plan.imports:
            if not plan.imports:
                return None
            self._importing += 1
            frame.f_trace_lines = False
            return self._in_import
        if frame.f_trace is None:
            watch = Watch(self, plan)
        else:  # a generator goes on
            watch = self._watch(frame, plan)
        parent = watch.parent = self._top
        if parent is not None:
            parent.calls = watch.call = parent.calls + 1
        self._top = watch
        return watch.trace

    def _in_import(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Local trace function of a module that is imported."""
        if event == "return":
            self._importing -= 1
        return self._in_import

    def _watch(self, frame: FrameType, plan: Plan | None) -> Watch:
        """The watch of a frame, made if it has none of this tracer's."""
        watch = watch_of(frame)
        if watch is not None and watch.tracer is self:
            if plan is not None:
                watch.breaks = plan.breaks
        else:
            watch = Watch(self, plan or Plan())
            frame.f_trace = watch.trace
        return watch

    def _chain(self, frame: FrameType) -> list[Watch]:
        """The watches of the frames from `frame` outwards, the outermost first, linked anew."""
        chain = []
        above = None
        for one in frames.user_frames(frame):
            watch = watch_of(one)
            if watch is not None and watch.tracer is self:
                watch.parent, above = above, watch
                chain.append(watch)
        self._top = above
        return chain

    def _read_breaks(self, frame: FrameType) -> None:
        """The breakpoints have changed: of the frames that run, too."""
        self.version = self.agent.breaks.version
        self._plans.clear()
        one: FrameType | None = frame
        while one is not None and one.f_code not in frames.FLOORS:
            plan = self._plans.decide(one)
            watch = watch_of(one)
            if watch is not None:
                watch.breaks = plan.breaks if plan is not None else {}
            elif plan is not None and plan.breaks and not plan.imports and not self._importing:
                one.f_trace_lines = True
                self._watch(one, plan)
            one = one.f_back

    # -- events ------------------------------------------------------------------------------

    def left(self, watch: Watch, frame: FrameType, value: Any) -> None:
        """A watched frame is left with a value; a generator's may go on later."""
        self._top = watch.parent
        if watch in self._leaving and frames.has_returned(frame):
            self._returned[frame.f_code.co_name] = value
        if self.on_return is not None:
            self.on_return(frame)
        if watch is self._outermost and (watch.raising or not frames.is_suspended(frame)):
            # nothing of what was stepped is left: the next line that comes is the next line
            self._rest()
            self._set_mode(_STEP)

    def at_line(self, watch: Watch, frame: FrameType, line: int) -> None:
        """A watched frame has come to a line that may be worth a stop."""
        if not line:  # of code without a line, as a cell of comments alone
            return
        if self.agent.pause_wanted and self.worker.interrupts:
            raise WorkerInterrupted("interrupted")
        # None: not within a comprehension; otherwise whether breakpoints of the line hold in it
        inner, part = watch.inner.get(frame.f_lasti), watch.parts.get(frame.f_lasti)
        if self.on_line is not None and inner is None and part is None:
            self.on_line(frame)
        if self.agent.breaks.version != self.version:
            self._read_breaks(frame)
        if self.agent.ahead is not None:
            order, self.agent.ahead, self.agent.pause_wanted = self.agent.ahead, None, False
            self._obey(order, watch, frame)
        on = inner is None and not (part and watch is self._from)  # else the line has been seen
        wanted = self._mode and on and self._wants(watch, frame, line)
        there = watch.breaks.get(line) if inner is not False and not part else None
        fired, error = self._fired(there, frame) if there else ((), "")
        if fired:
            self._stop(watch, frame, "break", _names(fired), error=error)
        elif self.agent.pause_wanted:
            self._stop(watch, frame, "pause")
        elif wanted:
            self._stop(watch, frame, "entry" if self._entry else "step")
        elif there and any(not one.log for one in there):
            self._stop(watch, frame, "break", _names(there), fired=False)

    def _wants(self, watch: Watch, frame: FrameType, line: int) -> bool:
        """Whether stepping stops here."""
        if not watch.steps:
            return False
        if self._mode == _STEP:
            code = frame.f_code  # a class's body begins at the line that has just run
            return line != code.co_firstlineno or not is_class_body(code)
        return watch in self._among or (watch is self._here and line >= self._line)

    def _fired(self, there: Sequence[Break], frame: FrameType) -> tuple[Sequence[Break], str]:
        """Those breakpoints of a line that stop this worker, and what went wrong in them."""
        fired, errors = [], []
        for one in there:
            if one.ranks is None or self.worker.worker_id in one.ranks:
                holds, error = self._holds(one, frame) if one.condition else (True, "")
                if error:
                    errors.append(error)
                elif holds and one.hits:
                    self._hits[one.number] = hit = self._hits.get(one.number, 0) + 1
                    holds = is_hit(one.hits, hit)
                if holds and one.log and not error:
                    self._say(one, frame)
                elif holds:
                    fired.append(one)
        return fired, "; ".join(errors)

    def _holds(self, one: Break, frame: FrameType) -> tuple[bool, str]:
        """Whether a condition holds, and what went wrong in it; then it holds."""
        self._standing = True
        self.worker.alone = f"the condition of breakpoint {one.number} is worked out"
        try:
            return bool(frames.value_of(compiled(one.condition), frame)), ""
        except WorkerInterrupted:
            raise
        except BaseException as exc:
            return True, headline(exc)
        finally:
            self._standing = False
            self.worker.alone = ""

    def _say(self, one: Break, frame: FrameType) -> None:
        """Print the message of a logpoint."""

        def value_of(expression: str) -> object:
            try:
                return frames.evaluate(frame, as_f_string(expression))
            except WorkerInterrupted:
                raise
            except BaseException as exc:
                return f"{{{expression}: {headline(exc)}}}"

        self._standing = True
        self.worker.alone = f"the message of breakpoint {one.number} is worked out"
        try:
            # in one piece: without the interpreter lock lines of several workers would mix
            print(f"{log_text(one.log, value_of)}\n", end="")
        finally:
            self._standing = False
            self.worker.alone = ""

    # -- stopping ----------------------------------------------------------------------------

    def stop_at(self, frame: FrameType, reason: str, detail: str = "") -> None:
        """Stop now in `frame`, not at the beginning of a line, and go on as told.

        Within what the debugger itself evaluates nothing happens.

        Raises
        ------
        WorkerInterrupted
            If the program is ended.
        """
        if self._standing:
            return
        if not self._armed:
            self.arm(frame, "continue")
        sys.settrace(None)  # or what the debugger does meanwhile would be traced
        shown = frames.user_frames(frame)
        stands = shown[-1] if shown else frame
        watch = watch_of(stands) or self._watch(stands, self._plans.decide(stands))
        try:
            self._stop(watch, stands, reason, detail)
        finally:  # also if it is ended: code that catches that is stopped at its next line
            sys.settrace(self._entering())

    def _stop(
        self,
        watch: Watch,
        frame: FrameType,
        reason: str,
        detail: str = "",
        fired: bool = True,
        error: str = "",
    ) -> None:
        """Stand here until told to go on."""
        where = frame.f_code.co_filename, frame.f_lineno
        hit = self._arrivals[where] = self._arrivals.get(where, 0) + 1
        raising = raising_in(frame, sys.exc_info()[1]) or watch.raising
        stack = frames.stack_of(frame)
        executed = self.worker.executed
        arrival = Arrival(stack, reason, detail, fired, error, hit, executed, raising)
        if fired:
            self._entry = False
            watch.steps = True
        self._standing = True
        self.agent.returned, self._returned = self._returned, {}
        try:
            order = self.agent.arrive(frame, arrival)
        finally:
            self._standing = False
            self.agent.returned = {}
        _take_over(frame)
        if self.agent.breaks.version != self.version:
            self._read_breaks(frame)
        self._obey(order, watch, frame)

    def _obey(self, order: Order, watch: Watch, frame: FrameType) -> None:
        mode, argument = order
        if mode == "same":
            return
        self._rest()
        self._from = watch
        if mode == "continue":
            self._set_mode(_FREE)
        elif mode == "step":
            self._leaving = frozenset(self._chain(frame)[1:])
            self._set_mode(_STEP)
        else:
            chain = self._chain(frame)
            self._leaving = frozenset(chain[1:])
            self._outermost = chain[0]
            self._among = frozenset(chain if mode == "next" else chain[:-1])
            if mode == "until":
                self._here = watch
                self._line = frame.f_lineno + 1 if argument is None else argument
            self._set_mode(_AMONG)

    def _set_mode(self, mode: int) -> None:
        self._mode = mode
        self.attentive = mode != _FREE or self.on_line is not None


frames.FLOORS.add(Tracer.run.__code__)


def _look_before() -> Any:
    """The trace function that there is; says that it will not be called."""
    before = sys.gettrace()
    if before is not None:
        _warn_once(
            f"another trace function is set on this thread ({before!r}, of a debugger or of "
            "coverage): it sees nothing of what discolab steps through"
        )
    return before


def _warn_once(words: str) -> None:
    """Warn of what concerns all workers of the process alike; of no line of the user's."""
    kind = words[:20]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn_explicit(words, RuntimeWarning, "discolab", 1)


def _take_over(frame: FrameType) -> None:
    """Have Python see what was changed meanwhile in variables that inner functions share.

    It writes the dict of the frame's variables back when the trace function ends; reading the dict
    fills it anew.
    """
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # others' variables are in no second place
        _ = frame.f_locals


def _names(breaks: Sequence[Break]) -> str:
    numbers = ", ".join(str(one.number) for one in breaks)
    return f"breakpoint{'s' if len(breaks) > 1 else ''} {numbers}"


# -- stopping from within a program: `breakpoint()` and failed assertions --------------------------


def is_attached(worker: Worker) -> bool:
    """Whether there is a debugger that is told if this worker stops."""
    return agent_of(worker).attached


def stop_here(reason: str, detail: str = "", frame: FrameType | None = None) -> bool:
    """Stop the calling worker until the debugger has it go on.

    In a program that is not traced, its frames and what they call are from then on, until the call
    ends.

    Parameters
    ----------
    reason, detail
        See `records.Arrival`.
    frame
        The user's frame in which it stops; None: the nearest to the caller.

    Returns
    -------
    bool
        Whether it has stopped: False outside of a worker and where no debugger is attached.
    """
    worker = current_worker_or_none()
    if worker is None or not is_attached(worker):
        return False
    if frame is None:
        frame = nearest_user_frame(sys._getframe(1))
    if frame is None:
        return False
    agent = agent_of(worker)
    if agent.tracer is None:
        _trace_from_now_on(agent, frame)
    assert agent.tracer is not None
    agent.tracer.stop_at(frame, reason, detail)
    return True


def nearest_user_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame of the user's code from `frame` outwards."""
    while frame is not None and not is_user(frame.f_code):
        frame = frame.f_back
    return frame


def _trace_from_now_on(agent: DebugAgent, frame: FrameType) -> None:
    """Trace the rest of the call that runs; the next command finds a worker that is not traced."""
    worker = agent.worker
    tracer = agent.tracer = Tracer(worker, agent)
    before = list(worker.dispatch)

    def ending(do: Callable[[Command], None]) -> Callable[[Command], None]:
        def end(command: Command) -> None:
            worker.dispatch[:] = before
            tracer.disarm()
            agent.tracer = None
            do(command)

        return end

    for action in DiscoAction:
        worker.dispatch[action] = ending(before[action])
    tracer.arm(frame, "continue")
