"""The debugger of a session: what a person can ask of a program that is stepped.

All of it may be called from any thread of the controller. Each wait can be interrupted, and has a
deadline if `timeout` is given (else the session's); Ctrl-C in a wait has the workers stop where
they are, and once more ends what they run.
"""

from __future__ import annotations

import linecache
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.controller import check_timeout
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, SessionError, WaitTimeoutError
from ..runtime.failures import Failure, name_ranks
from ..runtime.interruptible import TICK
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.sources import place
from ..views.formats import format_ranks
from .breaks import Break, parse_break
from .evaluated import Evaluated
from .inspecting import looked, seen
from .lockstep import ABORTED, BLOCKED, HELD, OUT, PAUSED, RUNNING, Lockstep
from .named import line_in_file, locate, locate_in_frame, read_name
from .program import Stepped
from .records import Options, Spot
from .station import Station
from .stops import Stop, WorkerAt

_ANSWER = 10.0  # seconds that workers are given for an evaluation
_LOOKING = 3.0  # seconds that they are given to say what their variables are
_STOPPING = 2.0  # seconds that workers are given to come to a line
_INSPECTING = "discolab.debugger.inspecting:"
_NAMED_AT = f"{locate_in_frame.__module__}:{locate_in_frame.__name__}"

Ranks = str | Collection[int] | None


class DebuggerError(SessionError):
    """What was asked can't be done with the program as it is; says what can."""


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
            raise session.told(failures)
        return self.ref


@dataclass(frozen=True)
class _Seen:
    """The variables of a worker that were shown last: of which frame, at which stop."""

    whose: Any
    number: int
    records: Mapping[str, Any]
    changed: frozenset[str]


class Debugger:
    """Steps through one program at a time on the workers of a session; see `debugger_of`.

    Attributes
    ----------
    session
    breaks
        The break points, by number; of programs that begin later too.
    program
        The last one that `start` has begun.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.breaks: dict[int, Break] = {}
        self.program: Program | None = None
        self._station = Station(session)
        self._next_break = 1
        self._own: dict[int, Break] = {}  # those of the program alone
        self._seen: dict[tuple[int, int], _Seen] = {}  # by rank and frame
        session.held_up = self._why_held_up
        self._station.send_all("attach", True)

    # -- facts -------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether a program is under way."""
        return self._station.is_active

    @property
    def is_paused(self) -> bool:
        """Whether a program stands, so that it can be looked at and go on."""
        with self._station.lock:
            return self._station.lockstep is not None and self._station.lockstep.paused

    @property
    def failed_assertion(self) -> str:
        """What `disco_assert` has found wrong, if a program stands there; else ""."""
        with self._station.lock:
            lockstep = self._station.lockstep
            found = lockstep.at.values() if lockstep is not None else ()
            return next((at.detail for at in found if at.reason == "assert"), "")

    @property
    def is_settled(self) -> bool:
        """Whether no worker of a program runs: it stands, or has ended."""
        lockstep = self._station.lockstep
        return lockstep is None or lockstep.settled

    @property
    def version(self) -> int:
        """Counts what happens."""
        return self._station.version

    @property
    def listeners(self) -> list[Callable[[], None]]:
        """Called whenever something happens, on any thread: be quick."""
        return self._station.listeners

    @property
    def lockstep(self) -> Lockstep | None:
        """The state of the last program; to be read while it stands."""
        return self._station.lockstep

    @property
    def stop(self) -> Stop | None:
        """How things are, without variables; None before there was a program."""
        return None if self._station.lockstep is None else self._look_now()

    # -- programs ----------------------------------------------------------------------------

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
            Break points of this program alone: ``12``, ``12 if rank == 2``, ``model.py:30``,
            ``Block.forward``.
        trace
            Names to record line by line, () for all of them; None: none.
        pm
            A worker that fails stays where it failed, and so do the others.
        nan
            Stop at the first operation that makes a value that is not finite.
        file
            In which break points without a file are.
        words
            For the status of workers.

        Raises
        ------
        ArgumentError
            If a break point is at a line that can't be.
        DebuggerError
            If another program is under way.
        """
        if self.is_active:
            raise DebuggerError(self._why_held_up() or f"{self._station.name} still runs")
        own = [self._parse(text, file) for text in breaks]
        own = [replace(one, number=self._number()) for one in own]
        chosen = parse_ranks(ranks, self.session.num_workers, self.session.current_mesh)
        packed = tuple(one.packed() for one in (*self.breaks.values(), *own))
        options = Options(step, packed, None if trace is None else tuple(trace), pm, nan, capacity)
        self._own = {one.number: one for one in own}
        self._seen.clear()
        self._station.open(name, chosen, file)
        return Stepped(func, options, words)

    def adopt(self, name: str) -> None:
        """Give a program that nobody has begun, but `breakpoint()` has stopped, a name."""
        self._station.name = name

    def cancel(self) -> None:
        """What was prepared could not be called."""
        self._station.close()

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

        Without break points it stops at the first line, unless ``step=False``.
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
                return self._look_now()
            except KeyboardInterrupt:
                if pressed:
                    self.abort()
                    raise
                pressed = time.monotonic()
                self._station.pause()

    def _wait_once(self, deadline: float | None, pressed: float, limit: float | None) -> None:
        station, session = self._station, self.session
        while True:
            with station.lock:
                if self.is_settled:
                    return
                station.changed.wait(TICK)
                if self.is_settled:
                    return
            self._tick()
            session._check_alive()
            now = time.monotonic()
            if pressed and now > pressed + _STOPPING:
                raise KeyboardInterrupt
            if session.closed:
                station.close()
                return
            if deadline is not None and now > deadline:
                raise WaitTimeoutError(self._late(limit or 0.0))

    def _tick(self) -> None:
        """A wait goes on: in a notebook output is shown then, below the cell that waits."""
        if threading.current_thread() is threading.main_thread():
            self.session.tick()

    def _late(self, limit: float) -> str:
        lines = [f"gave up after {limit:g} s waiting for {self._station.name} to stop; it goes on:"]
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
        """To the next break point, or the n-th, or the end."""
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
            raise DebuggerError(_NOTHING)
        self._station.pause()

    def abort(self, timeout: float = 2.0) -> list[int]:
        """End the program on all workers; the session goes on.

        Returns
        -------
        list of int
            The workers that are stuck in a call that Python can't interrupt.
        """
        stuck = self.session.interrupt(timeout)
        self._station.close(stuck)
        return stuck

    def go(self, mode: str, argument: Any = None, ranks: Ranks = None) -> None:
        """Have workers that stand go on, and do not wait; the modes are in records.py.

        Raises
        ------
        DebuggerError
            If none of them can.
        DiscoError
            If a worker has died.
        """
        movers = self._paused(ranks)
        self.session._check_alive()
        failed = [rank for rank in movers if self._failed(rank)]
        if failed and mode != "continue":
            others = [rank for rank in movers if rank not in failed]
            alone = f"; {name_ranks(others)} can: -r {format_ranks(others)}" if others else ""
            raise DebuggerError(
                f"{name_ranks(failed)} failed here and can't go on{alone}; look around (where, "
                "eval), or let the error go on with %disco_continue"
            )
        self._station.command(mode, argument, None if ranks is None else movers)

    def _go(self, mode: str, argument: Any, ranks: Ranks, timeout: float | None) -> Stop:
        limit = check_timeout(timeout)
        self.go(mode, argument, ranks)
        return self.wait(limit)

    def _failed(self, rank: int) -> bool:
        lockstep = self._station.lockstep
        return lockstep is not None and lockstep.at[rank].reason == "raised"

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
        if self._station.lockstep is None:
            raise DebuggerError(_NOTHING)
        if isinstance(frame, bool) or not isinstance(frame, int) or frame < 0:
            raise ArgumentError(f"a frame is a number: 0 innermost, 1 its caller; got {frame!r}")
        stop = self._look_now(frame)
        chosen = set(self._ranks(ranks))
        standing = [w.rank for w in stop.workers if w.state == PAUSED and w.rank in chosen]
        deepest = max((len(stop.workers[rank].stack) for rank in standing), default=0)
        if standing and frame >= deepest:
            raise ArgumentError(
                f"there is no frame {frame}: the innermost is 0, the outermost {deepest - 1}"
            )
        standing = [rank for rank in standing if frame < len(stop.workers[rank].stack)]
        found = self._ask(standing, "variables", (frame, None), min(timeout, _LOOKING))
        late = [rank for rank, (well, _) in found.items() if not well]
        if late:  # they are held up by a value: the others are known
            known = self.session.look(looked, ranks=late)
            found.update({rank: (True, records) for rank, records in known.items() if records})
        others = [
            w.rank for w in stop.workers if w.state in (RUNNING, BLOCKED) and w.rank in chosen
        ]
        looks = self.session.look(seen, frame, True, ranks=others) if others else {}
        workers = []
        for worker in stop.workers:
            well, records = found.get(worker.rank, (False, None))
            if worker.rank in looks:
                stack, records = looks[worker.rank]
                well = bool(stack)
                worker = replace(worker, stack=tuple(Spot(*spot) for spot in stack))
            if well:
                worker = self._with_variables(worker, records, stop, frame)
            elif records:
                worker = replace(worker, error=str(records))
            workers.append(worker)
        workers = self._with_operations(workers, standing)
        sources = self._sources(workers)
        stop = replace(stop, workers=tuple(workers), sources=sources)
        return stop

    def eval(
        self, expression: str, ranks: Ranks = None, frame: int = 0, timeout: float = _ANSWER
    ) -> Evaluated:
        """The value of an expression on each worker that stands, in one of its frames.

        A worker on which it fails, would wait for others, or does not end in `timeout` seconds has
        an error in its place; the program is as it was.
        """
        if not isinstance(expression, str) or not expression.strip():
            raise ArgumentError("eval: what? An expression, such as x.sum()")
        answers = self._ask(self._paused(ranks), "evaluate", (frame, expression), timeout)
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
        answers = self._ask(self._paused(ranks), "assign", (frame, name, expression), timeout)
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
        return self._ask(self._paused(ranks), name, args, timeout)

    def _ask(
        self, ranks: Sequence[int], name: str, args: Sequence[Any], timeout: float
    ) -> dict[int, tuple[bool, Any]]:
        if not ranks:
            return {}
        station = self._station
        full = name if ":" in name else _INSPECTING + name
        number = station.ask(ranks, full, args)
        deadline = time.monotonic() + timeout
        try:
            while True:
                with station.lock:
                    missing = [r for r in ranks if r not in station.answers(number)]
                    if missing and time.monotonic() < deadline:
                        station.changed.wait(TICK)
                        missing = [r for r in ranks if r not in station.answers(number)]
                if not missing:
                    return dict(sorted(station.answers(number).items()))
                self._tick()
                self.session._check_alive()
                if time.monotonic() > deadline:
                    break
        except BaseException:
            station.forget(number, ranks)
            raise
        station.forget(number, ())
        late = (False, f"no value after {timeout:g} s: the evaluation was stopped")
        for rank in missing:
            station.send(rank, "cut", number)
        return dict(sorted({**dict.fromkeys(missing, late), **station.answers(number)}.items()))

    # -- break points ------------------------------------------------------------------------

    def break_at(self, text: str, file: str = "", ranks: Ranks = None) -> Break:
        """Set a break point: ``model.py:12``, ``12 if rank == 2 and loss.isnan().any()``, or, where
        a function begins, ``Block.forward``.

        It holds for the program that runs and for those that begin later. All workers gather at the
        line; then it is decided, and all stop or none.

        Parameters
        ----------
        file
            For a line alone; "": the file in which the workers stand.
        ranks
            On which workers its condition counts; None: all.

        Raises
        ------
        ArgumentError
            If there is no such line or file, or the condition can't be compiled.
        """
        chosen = None if ranks is None else tuple(self._ranks(ranks))
        found = replace(self._parse(text, file or self._here()), ranks=chosen)
        found = replace(found, number=self._number())
        self.breaks[found.number] = found
        self._tell_breaks()
        return found

    def clear(self, number: int | None = None) -> list[Break]:
        """Remove a break point, or all; those removed.

        Raises
        ------
        ArgumentError
            If there is none of that number.
        """
        known = {**self.breaks, **self._own}
        if number is not None and number not in known:
            numbers = ", ".join(map(str, sorted(known))) or "none"
            raise ArgumentError(f"there is no break point {number!r} (there are: {numbers})")
        gone = [known[n] for n in sorted(known) if number in (None, n)]
        for one in gone:
            self.breaks.pop(one.number, None)
            self._own.pop(one.number, None)
        self._tell_breaks()
        return gone

    def all_breaks(self) -> list[Break]:
        """Those that are set, and those of the program that runs."""
        own = self._own if self.is_active else {}
        return [one for _, one in sorted({**self.breaks, **own}.items())]

    def _parse(self, text: str, file: str) -> Break:
        """A break point in words, which may be the name of a function."""
        named = read_name(text) if isinstance(text, str) else None
        if named is None:
            return parse_break(text, file, is_file=bool(file))
        name, condition = named
        line = line_in_file(file, name) if file else None
        if line is None:
            file, line = self._locate(name)
        return parse_break(f"{line}{condition}", file, is_file=True)

    def _locate(self, name: str) -> tuple[str, int]:
        """Where a function of the workers begins."""
        if not self.is_active:
            found = self.session.call_packed(locate, name)
            file, line, why = found.debug_get_from_remote(0)
            if why:
                raise ArgumentError(f"break point: {why}")
            return file, line
        first = self._paused(None)[0]
        well, place_ = self._ask([first], _NAMED_AT, (name,), _ANSWER)[first]
        if not well:
            raise ArgumentError(f"break point: there is no function {name}: {place_}")
        return place_[0], place_[1]

    def _number(self) -> int:
        self._next_break += 1
        return self._next_break - 1

    def _tell_breaks(self) -> None:
        if self.is_active:
            self._station.set_breaks(tuple(one.packed() for one in self.all_breaks()))
        with self._station.lock:
            self._station._has_changed()

    def _here(self) -> str:
        """The file in which workers stand; of those that run, that of their program."""
        lockstep = self._station.lockstep
        groups = lockstep.groups() if lockstep is not None and lockstep.paused else ()
        if lockstep is not None and groups:
            return lockstep.at[groups[0][0]].here.file
        return self._station.file if self.is_active else ""

    # -- inside ------------------------------------------------------------------------------

    def _why_held_up(self) -> str:
        """Why no call on the session goes on now, "" if they do."""
        if not self.is_paused:
            return ""
        with self._station.lock:
            lockstep = self._station.lockstep
            if lockstep is None or not lockstep.paused:
                return ""
            here = lockstep.at[lockstep.groups()[0][0]].here
        return (
            f"the workers are paused at {place(here.file, here.line)}: %disco_continue or "
            "%disco_abort first"
        )

    def _ranks(self, ranks: Ranks) -> list[int]:
        return list(parse_ranks(ranks, self.session.num_workers, self.session.current_mesh))

    def _paused(self, ranks: Ranks) -> list[int]:
        """Of these workers those that stand.

        Raises
        ------
        DebuggerError
            If none does.
        """
        with self._station.lock:
            lockstep = self._station.lockstep
            if lockstep is None or lockstep.finished:
                raise DebuggerError(_NOTHING if lockstep is None else _OVER)
            if not lockstep.settled:
                raise DebuggerError(
                    f"{self._station.name} runs: stop it where it is with %disco_pause"
                )
            chosen = self._ranks(ranks)
            found = [rank for rank in lockstep.ranks(PAUSED) if rank in chosen]
            if not found:
                raise DebuggerError(_not_paused(lockstep, chosen))
            return found

    def _with_operations(
        self, workers: Sequence[WorkerAt], standing: Sequence[int]
    ) -> list[WorkerAt]:
        """Ask those that a NaN hunt has stopped for the operation, its inputs and its output."""
        with self._station.lock:
            lockstep = self._station.lockstep
            at = lockstep.at if lockstep is not None else {}
            hunted = [rank for rank in standing if rank in at and at[rank].reason == "non-finite"]
        told = self._ask(hunted, "found", (), _LOOKING)
        return [
            replace(worker, found=told[worker.rank][1])
            if told.get(worker.rank, (False, None))[0]
            else worker
            for worker in workers
        ]

    def _look_now(self, frame: int = 0) -> Stop:
        """How things are, without variables."""
        with self._station.lock:
            lockstep = self._station.lockstep
            assert lockstep is not None
            groups = lockstep.groups()
            workers = [self._worker_at(lockstep, rank) for rank in lockstep.state]
            stop = Stop(
                self._station.name,
                lockstep.stops,
                _reason(lockstep),
                tuple(workers),
                groups,
                frame,
                lockstep.finished,
            )
        return replace(stop, sources=self._sources(workers))

    def _worker_at(self, lockstep: Lockstep, rank: int) -> WorkerAt:
        state = lockstep.state[rank]
        if state is OUT:
            return WorkerAt(rank, OUT)
        at = lockstep.at.get(rank)
        shown = RUNNING if state is HELD else state
        if at is not None:
            note = at.detail if at.fired else ""
            raising = f"raising {at.raising}" if at.raising and at.reason != "raised" else ""
            words = "stands at a break point until the others have come" if state is HELD else ""
            note = "; ".join(filter(None, [note, raising]))
            return WorkerAt(rank, shown, at.stack, words, note=note, error=at.error)
        wait = lockstep.waits.get(rank)
        if wait is not None:
            return WorkerAt(rank, shown, (), wait.words, wait.whom)
        ended = lockstep.ends.get(rank, "")
        return WorkerAt(rank, shown, words=ended if state == ABORTED else "", error=ended)

    def _with_variables(
        self, worker: WorkerAt, records: Mapping[str, Any], stop: Stop, frame: int
    ) -> WorkerAt:
        """Mark what has changed since it was shown last."""
        count = records.get("", 0)  # see `inspecting.variables`
        records = {name: record for name, record in records.items() if name}
        stack = worker.stack
        spot = stack[-1 - min(frame, len(stack) - 1)]
        whose = (spot.file, spot.function, len(stack) - frame)
        before = self._seen.get((worker.rank, frame))
        changed: frozenset[str] = frozenset()
        if before is not None and before.whose == whose:
            changed = before.changed
            if before.number != stop.number:
                changed = frozenset(n for n, r in records.items() if before.records.get(n) != r)
        self._seen[worker.rank, frame] = _Seen(whose, stop.number, records, changed)
        more = max(count - len(records), 0)
        return replace(worker, variables=records, changed=changed, more=more)

    def _sources(self, workers: Sequence[WorkerAt]) -> dict[str, tuple[str, ...]]:
        files = {spot.file for worker in workers for spot in worker.stack}
        return {
            file: tuple(line.rstrip("\n") for line in linecache.getlines(file)) for file in files
        }


_NOTHING = "no program is being stepped: begin one with %%disco --step, or -b LINE"
_OVER = "the program has ended: begin one with %%disco --step, or -b LINE"


def _not_paused(lockstep: Lockstep, chosen: Sequence[int]) -> str:
    """Why none of some workers can go on, and who can."""
    words = {BLOCKED: "in a collective", OUT: "not in this program", "done": "at its end"}
    groups: dict[str, list[int]] = {}
    for rank in chosen:
        state = lockstep.state[rank]
        groups.setdefault(words.get(state, state), []).append(rank)
    told = ", ".join(f"{name_ranks(ranks)} {text}" for text, ranks in groups.items())
    return f"none of them is paused ({told}); those that can go on: " + name_ranks(
        lockstep.ranks(PAUSED)
    )


def _told(answers: Mapping[int, tuple[bool, Any]]) -> dict[int, tuple[str, Any]]:
    return {rank: ("value" if well else "error", value) for rank, (well, value) in answers.items()}


def _reason(lockstep: Lockstep) -> str:
    """Why the last stop was: ``break point 1 at Cell In[3], line 5``."""
    if lockstep.finished:
        return "the program has ended"
    if not lockstep.settled:
        return "running"
    stopped = [rank for rank in lockstep.stopped if rank in lockstep.at]
    if not stopped:
        return "those that went on wait for others, or have ended"
    reasons: dict[str, list[int]] = {}
    for rank in stopped:
        at = lockstep.at[rank]
        if at.fired:
            words = {"entry": "first line", "step": "stepped", "pause": "paused"}
            told = at.detail or words.get(at.reason, at.reason)
            reasons.setdefault(told, []).append(rank)
    groups = lockstep.groups()
    here = lockstep.at[groups[0][0]].here
    where = place(here.file, here.line) if len(groups) == 1 else f"{len(groups)} places"
    if len(reasons) == 1:
        ((told, ranks),) = reasons.items()
        whose = "" if len(ranks) == len(stopped) else f" ({name_ranks(ranks)})"
        return f"{told}{whose} at {where}"
    told = ", ".join(f"{text} ({name_ranks(ranks)})" for text, ranks in reasons.items())
    return f"{told} at {where}"


_Known = weakref.WeakKeyDictionary[Session, weakref.ref[Debugger]]
_debuggers: _Known = weakref.WeakKeyDictionary()  # each is held by its session, as `held_up`


def debugger_of(session: Session) -> Debugger:
    """The debugger of a session, one a session; from the first call on `breakpoint()` stops there.

    Raises
    ------
    ArgumentError
        If it is no session.
    """
    if not isinstance(session, Session):
        raise ArgumentError(f"a debugger is of a session, got {session!r:.60}")
    known = _debuggers.get(session)
    found = known() if known is not None else None
    if found is None:
        found = Debugger(session)
        _debuggers[session] = weakref.ref(found)
    return found
