"""The debugger of a session: what a person can ask of a program that is stepped.

All of it may be called from any thread of the controller. Each wait can be interrupted, and has a
deadline if `timeout` is given (else the session's); Ctrl-C in a wait has the workers stop where
they are, and once more ends what they run. A `Debugger` holds the `DebugController`, which speaks
with the workers, an `Inspector` for their variables, and the session's `Breakpoints`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, WaitTimeoutError
from ..runtime.failures import Failure, name_ranks
from ..runtime.interrupts import TICK
from ..runtime.ranks import parse_ranks
from ..runtime.restart import at_restart
from ..runtime.session import Session
from ..views.formats import format_ranks
from .agent import attach_here
from .breakpoints import Breakpoints
from .breaks import Break
from .controller import NOTHING, DebugController, DebuggerError, Ranks
from .inspecting import ASSIGN, EVALUATE, Inspector
from .lockstep import Lockstep
from .program import Stepped
from .records import Options
from .stops import Evaluated, Stop

if TYPE_CHECKING:
    from .history import History

_ANSWER = 10.0  # seconds that workers are given for an evaluation
_STOPPING = 2.0  # seconds that workers are given to come to a line


@dataclass(frozen=True)
class Program:
    """A call that is stepped.

    Attributes
    ----------
    name
    ref
        Its result.
    """

    name: str
    ref: DRef
    ticket: Any

    def result(self, timeout: float | None = None) -> DRef:
        """Wait for it to end; its result.

        Raises
        ------
        WorkerError
            If it failed on one or more workers.
        """
        session = self.ref.session
        values = session.wait(self.ticket, timeout)
        failures = [value for value in values.values() if isinstance(value, Failure)]
        if failures:
            raise session.report(failures)
        return self.ref


class Debugger:
    """Steps through one program at a time on the workers of a session; see `debugger_of`.

    Attributes
    ----------
    session
    program
        The last one that `start` has begun.
    stops_all
        Whether every cell that begins is stepped, so that it can be paused later; front ends set
        it while they are attached.
    stops_on
        Failures at which the programs that begin from now on stop: "raised" (`pm`), "non-finite"
        (`nan`).
    edits
        Counts the variables that were set, for who shows them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._controller = DebugController(session)
        self._inspector = Inspector(self._controller)
        self._breakpoints = Breakpoints(self._controller)
        self.edits = 0
        self.program: Program | None = None
        self.stops_all = False
        self.stops_on: frozenset[str] = frozenset()
        session.held_up = self._why_held_up  # by which the session holds its debugger
        self._controller.send_all("attach", True)

    # -- facts -------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether a program is under way."""
        return self._controller.is_active

    @property
    def is_paused(self) -> bool:
        """Whether a program stands, so that it can be looked at and go on."""
        return self._controller.is_paused

    @property
    def failed_assertion(self) -> str:
        """What `disco_assert` has found wrong, if a program stands there; else ""."""
        with self._controller.lock:
            lockstep = self._controller.lockstep
            found = lockstep.at.values() if lockstep is not None else ()
            return next((at.detail for at in found if at.reason == "assert"), "")

    @property
    def is_settled(self) -> bool:
        """Whether no worker of a program runs: it stands, or has ended."""
        return self._controller.is_settled

    @property
    def version(self) -> int:
        """Counts what happens."""
        return self._controller.version

    @property
    def listeners(self) -> list[Callable[[], None]]:
        """Called whenever something happens, on any thread: be quick."""
        return self._controller.listeners

    @property
    def lockstep(self) -> Lockstep | None:
        """The state of the last program; to be read while it stands."""
        return self._controller.lockstep

    @property
    def stop(self) -> Stop | None:
        """How things are, without variables; None before there was a program."""
        return None if self._controller.lockstep is None else self._controller.stop()

    @property
    def aborted(self) -> tuple[int, Stop] | None:
        """What stood when `abort` ended a program the last time, and the ordinal of its call."""
        return self._controller.aborted

    # -- programs ----------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether a cell must be stepped though its own options do not ask for it."""
        return bool(self.breaks or self.stops_all or self.stops_on)

    def prepare(
        self,
        func: Callable[..., Any],
        *,
        name: str,
        ranks: Ranks = None,
        step: bool = False,
        breaks: Sequence[str] = (),
        trace: Sequence[str] | None = None,
        pm: bool = False,
        nan: bool = False,
        capacity: int = 10_000,
        file: str = "",
        words: str = "",
    ) -> Stepped:
        """Get ready for a program; the caller has the session call what is returned, at once.

        Parameters
        ----------
        func
            A function of the worker.
        name
            What people are told that runs: ``Cell In[3]``.
        ranks
            The workers that run it; None: all.
        step
            Stop at its first line.
        breaks
            Breakpoints of this program alone: ``12``, ``12 if rank == 2``, ``model.py:30``,
            ``Block.forward``.
        trace
            Names to record line by line, () for all of them; None: none.
        pm
            A worker that fails stays where it failed, and so do the others.
        nan
            Stop at the first operation that makes a value that is not finite.
        file
            In which breakpoints without a file are.
        words
            For the status of workers.

        Raises
        ------
        ArgumentError
            If a breakpoint is at a line that can't be.
        DebuggerError
            If another program is under way.
        """
        if self.is_active:
            raise DebuggerError(self._why_held_up() or f"{self._controller.name} still runs")
        own = [self._breakpoints.parse(text, file) for text in breaks]
        own = [replace(one, number=self._breakpoints.number()) for one in own]
        chosen = parse_ranks(ranks, self.session.num_workers, self.session.current_mesh)
        packed = tuple(one.packed() for one in (*self.breaks.values(), *own))
        pm, nan = pm or "raised" in self.stops_on, nan or "non-finite" in self.stops_on
        options = Options(step, packed, None if trace is None else tuple(trace), pm, nan, capacity)
        self._breakpoints.own = {one.number: one for one in own}
        self._inspector.forget()
        self._controller.open(name, chosen, file)
        return Stepped(func, options, words)

    def adopt(self, name: str) -> None:
        """Give a program that nobody has begun, but `breakpoint()` has stopped, a name."""
        self._controller.name = name

    def cancel(self) -> None:
        """What was prepared could not be called."""
        self._controller.close()

    def start(
        self, func: Callable[..., Any], *args: Any, name: str = "", **options: Any
    ) -> Program:
        """Have all workers call a function that can be stepped; does not wait.

        Takes the options of `prepare`.
        """
        name = name or getattr(func, "__name__", type(func).__name__)
        code = getattr(func, "__code__", None)
        file = options.pop("file", "") or getattr(code, "co_filename", "")
        stepped = self.prepare(func, name=name, file=file, **options)
        try:
            ref = self.session.call_packed(stepped, *args)
        except BaseException:
            self.cancel()
            raise
        self.program = Program(name, ref, self.session.request(ref, tell=True, what=name))
        return self.program

    def run(
        self,
        func: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        step: bool | None = None,
        **options: Any,
    ) -> Stop:
        """`start`, and wait until all workers stand or have ended.

        Without breakpoints it stops at the first line, unless ``step=False``.
        """
        if step is None:
            step = not (options.get("breaks") or self.breaks)
        self.start(func, *args, step=step, **options)
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> Stop:
        """Wait until no worker runs: each stands, waits for one that stands, or has ended.

        Raises
        ------
        WaitTimeoutError
            At the deadline; the program goes on.
        KeyboardInterrupt
            If the workers don't come to a line at which they can stop: they are interrupted.
        """
        limit = self.session.timeout if timeout is None else check_timeout(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        pressed = 0.0
        while True:
            try:
                self._wait_once(deadline, pressed, limit)
                return self._controller.stop()
            except KeyboardInterrupt:
                if pressed:
                    self.abort()
                    raise
                pressed = time.monotonic()
                self._controller.pause()

    def _wait_once(self, deadline: float | None, pressed: float, limit: float | None) -> None:
        controller, session = self._controller, self.session
        while True:
            with controller.lock:
                if self.is_settled:
                    return
                controller.changed.wait(TICK)
                if self.is_settled:
                    return
            self._controller.tick()
            session._check_alive()
            now = time.monotonic()
            if pressed and now > pressed + _STOPPING:
                raise KeyboardInterrupt
            if session.closed:
                controller.close()
                return
            if deadline is not None and now > deadline:
                raise WaitTimeoutError(self._late(limit or 0.0))

    def _late(self, limit: float) -> str:
        lines = [
            f"gave up after {limit:g} s waiting for {self._controller.name} to stop; it goes on:"
        ]
        lines += [f"  {status}" for status in self.session.status()]
        lines.append("Wait again (%disco_continue), stop it where it is (%disco_pause), or end it "
                     "(%disco_abort)")  # fmt: skip
        return "\n".join(lines)

    # -- going on ----------------------------------------------------------------------------

    def step(self, ranks: Ranks = None, timeout: float | None = None) -> Stop:
        """To the next line, in functions that it calls too.

        Where workers have parted, those furthest behind go on alone, so that they meet again;
        with `ranks`, exactly those do.
        """
        return self._go("step", None, ranks, timeout)

    def next(self, ranks: Ranks = None, timeout: float | None = None) -> Stop:
        """To the next line of this function, or of its caller when it returns; else as `step`."""
        return self._go("next", None, ranks, timeout)

    def out(self, ranks: Ranks = None, timeout: float | None = None) -> Stop:
        """Until this function has returned."""
        return self._go("out", None, ranks, timeout)

    def until(
        self, line: int | None = None, ranks: Ranks = None, timeout: float | None = None
    ) -> Stop:
        """Until a later line of this function, or that line; as out of a loop."""
        if line is not None and (isinstance(line, bool) or not isinstance(line, int) or line < 1):
            raise ArgumentError(f"until: a line is a number from 1; got {line!r}")
        return self._go("until", line, ranks, timeout)

    def continue_(self, n: int = 1, ranks: Ranks = None, timeout: float | None = None) -> Stop:
        """To the next breakpoint, or the n-th, or the end."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ArgumentError(f"continue: at which stop to stop is a number from 1; got {n!r}")
        return self._go("continue", n - 1, ranks, timeout)

    def pause(self, timeout: float | None = _STOPPING) -> Stop:
        """Have the workers stop at the next line that they come to.

        Raises
        ------
        DebuggerError
            If nothing runs.
        WaitTimeoutError
            If one does not come to a line: it is in a library, or waits.
        """
        self.pause_soon()
        return self.wait(timeout)

    def pause_soon(self) -> None:
        """As `pause`, and do not wait."""
        if not self.is_active:
            raise DebuggerError(NOTHING)
        self._controller.pause()

    def abort(self, timeout: float = 2.0) -> list[int]:
        """End the program on all workers; the session goes on.

        Returns
        -------
        list of int
            The workers that are stuck in a call that Python can't interrupt.
        """
        self._controller.keep_what_stands()
        stuck = self.session.interrupt(timeout)
        self._controller.close(stuck)
        return stuck

    # -- looking -----------------------------------------------------------------------------

    def where(self, frame: int = 0, ranks: Ranks = None, timeout: float = _ANSWER) -> Stop:
        """How things are now: where each worker is, and its variables there.

        Parameters
        ----------
        frame
            Whose variables: 0 the innermost, 1 its caller.

        Raises
        ------
        DebuggerError
            If nothing was stepped yet.
        """
        if self._controller.lockstep is None:
            raise DebuggerError(NOTHING)
        if isinstance(frame, bool) or not isinstance(frame, int) or frame < 0:
            raise ArgumentError(f"a frame is a number: 0 innermost, 1 its caller; got {frame!r}")
        self._controller.look_now()
        return self._inspector.where(frame, ranks, timeout)

    def eval(
        self, expression: str, ranks: Ranks = None, frame: int = 0, timeout: float = _ANSWER
    ) -> Evaluated:
        """The value of an expression on each worker that stands, in one of its frames.

        A worker on which it fails, would wait for others, or does not end in `timeout` seconds has
        an error in its place; the program is as it was.
        """
        if not isinstance(expression, str) or not expression.strip():
            raise ArgumentError("eval: what? An expression, such as x.sum()")
        answers = self.ask(EVALUATE, frame, expression, ranks=ranks, timeout=timeout)
        return Evaluated(expression, _told(answers))

    def set(
        self,
        name: str,
        expression: str,
        ranks: Ranks = None,
        frame: int = 0,
        timeout: float = _ANSWER,
    ) -> Evaluated:
        """Give a variable a new value on each worker that stands; that value."""
        answers = self.ask(ASSIGN, frame, name, expression, ranks=ranks, timeout=timeout)
        with self._controller.lock:
            self.edits += 1
            self._controller.has_changed()
        return Evaluated(name, _told(answers))

    def ask(
        self, name: str, *args: Any, ranks: Ranks = None, timeout: float = _ANSWER
    ) -> dict[int, tuple[bool, Any]]:
        """Call a function ``module:name`` with ``(worker, frame, *args)`` on workers that stand.

        Returns
        -------
        dict
            By rank whether it went well, and the value, which must travel, or what went wrong.
        """
        return self._controller.ask(self._controller.paused(ranks), name, args, timeout)

    # -- breakpoints -------------------------------------------------------------------------

    @property
    def breaks(self) -> Mapping[int, Break]:
        """The breakpoints, by number; of programs that begin later too."""
        return self._breakpoints.lasting

    def break_at(
        self,
        text: str,
        file: str = "",
        ranks: Ranks = None,
        *,
        hits: str = "",
        log: str = "",
        timeout: float | None = None,
    ) -> Break:
        """Set a breakpoint: ``model.py:12``, ``12 if rank == 2 and loss.isnan().any()``, or, where
        a function begins, ``Block.forward``.

        It holds for the program that runs and for those that begin later. All workers gather at the
        line; then it is decided, and all stop or none.

        Parameters
        ----------
        file
            For a line alone; "": the file in which the workers stand.
        ranks
            On which workers its condition counts; None: all.
        hits
            At which of the times that a worker would stop it does: ``3``, ``>= 3``, ``% 10`` for
            each tenth.
        log
            Each worker prints this instead of stopping, with values for ``{expressions}``.
        timeout
            Seconds to wait for the workers if one must be asked where a function is; None: the
            session's.

        Raises
        ------
        ArgumentError
            If there is no such line or file, or the condition can't be compiled.
        """
        return self._breakpoints.add(text, file, ranks, hits=hits, log=log, timeout=timeout)

    def clear(self, number: int | None = None) -> list[Break]:
        """Remove a breakpoint, or all; those removed.

        Raises
        ------
        ArgumentError
            If there is none of that number.
        """
        return self._breakpoints.clear(number)

    def all_breaks(self) -> list[Break]:
        """Those that are set, and those of the program that runs."""
        return self._breakpoints.all()

    # -- what was recorded -------------------------------------------------------------------

    def recorded(self) -> list[str]:
        """The variables that a program with ``trace`` has recorded.

        Raises
        ------
        DebuggerError
            If nothing was recorded; also of the next three.
        """
        from . import history

        return history.names(self.session)

    def history(self, name: str, ranks: Ranks = None, last: int = 50) -> History:
        """How a variable was over time, line by line, on each worker.

        Parameters
        ----------
        name
            Of a variable that was recorded.
        last
            How many of its last values on each worker.

        Raises
        ------
        ArgumentError
            If that variable was not recorded: says which were.
        """
        from . import history

        return history.history(self.session, name, ranks, last)

    def back(self, n: int = 1) -> Stop:
        """Go `n` lines back in what was recorded: how all was there, with the recorded values."""
        from . import history

        return history.back(self.session, n, self._controller.name)

    def forward(self, n: int = 1) -> Stop:
        """Go `n` lines forward again, after `back`."""
        from . import history

        return history.forth(self.session, n, self._controller.name)

    # -- inside ------------------------------------------------------------------------------

    def go(self, mode: str, argument: Any = None, ranks: Ranks = None) -> None:
        """Have workers that stand go on, and do not wait; the modes are in records.py.

        Raises
        ------
        DebuggerError
            If none of them can.
        DiscoError
            If a worker has died.
        """
        movers = self._controller.paused(ranks)
        self.session._check_alive()
        failed = [rank for rank in movers if self._failed(rank)]
        if failed and mode != "continue":
            others = [rank for rank in movers if rank not in failed]
            alone = f"; {name_ranks(others)} can: -r {format_ranks(others)}" if others else ""
            raise DebuggerError(
                f"{name_ranks(failed)} failed here and can't go on{alone}; look around (where, "
                "eval), or let the error go on with %disco_continue"
            )
        self._controller.command(mode, argument, None if ranks is None else movers)

    def _why_held_up(self) -> str:
        return self._controller.why_held_up()

    def _go(self, mode: str, argument: Any, ranks: Ranks, timeout: float | None) -> Stop:
        limit = check_timeout(timeout)
        self.go(mode, argument, ranks)
        return self.wait(limit)

    def _failed(self, rank: int) -> bool:
        lockstep = self._controller.lockstep
        return lockstep is not None and lockstep.at[rank].reason == "raised"


def _told(answers: Mapping[int, tuple[bool, Any]]) -> dict[int, tuple[str, Any]]:
    return {rank: ("value" if well else "error", value) for rank, (well, value) in answers.items()}


_Known = weakref.WeakKeyDictionary[Session, weakref.ref[Debugger]]
_debuggers: _Known = weakref.WeakKeyDictionary()


def debugger_of(session: Session) -> Debugger:
    """The debugger of a session, one a session; from the first call on `breakpoint()` stops there.

    Raises
    ------
    ArgumentError
        If it is no session.
    """
    if not isinstance(session, Session):
        raise ArgumentError(f"a debugger is of a session, got {session!r:.60}")
    found = known_debugger(session)
    if found is None:
        found = Debugger(session)
        _debuggers[session] = weakref.ref(found)
    return found


def known_debugger(session: Session) -> Debugger | None:
    """The debugger of a session, None if nobody has asked for it yet."""
    known = _debuggers.get(session)
    return known() if known is not None else None


def _for_new_worker(session: Session) -> Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    return [("the debugger", attach_here, ())] if known_debugger(session) is not None else []


at_restart.append(_for_new_worker)
