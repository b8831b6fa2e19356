"""Looking at a program: how it is, where its workers are, and what they hold there.

The lower part of a `Debugger`; nothing here has a worker go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.errors import ArgumentError, SessionError
from ..runtime.interrupts import TICK
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.sources import place
from .controller import Station
from .inspecting import looked, seen
from .lockstep import BLOCKED, PAUSED, RUNNING, Lockstep
from .records import Spot
from .stops import Evaluated, Stop, WorkerAt, not_paused, snapshot, sources_of

ANSWER = 10.0  # seconds that workers are given for an evaluation
_LOOKING = 3.0  # seconds that they are given to say what their variables are
_INSPECTING = "discolab.debugger.inspecting:"
NOTHING = "no program is being stepped: begin one with %%disco --step, or -b LINE"
_OVER = "the program has ended: begin one with %%disco --step, or -b LINE"

Ranks = str | Collection[int] | None


class DebuggerError(SessionError):
    """What was asked can't be done with the program as it is; says what can."""


@dataclass(frozen=True)
class _Seen:
    """The variables of a worker that were shown last: of which frame, at which stop."""

    whose: Any
    number: int
    records: Mapping[str, Any]
    changed: frozenset[str]


class Looking:
    """A session's program, to be looked at.

    Attributes
    ----------
    edits
        Counts the variables that were set, for who shows them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._station = Station(session)
        self._seen: dict[tuple[int, int], _Seen] = {}  # by rank and frame
        self.edits = 0
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

    # -- looking -----------------------------------------------------------------------------

    def where(self, frame: int = 0, ranks: Ranks = None, timeout: float = ANSWER) -> Stop:
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
            raise DebuggerError(NOTHING)
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
        sources = sources_of(workers)
        stop = replace(stop, workers=tuple(workers), sources=sources)
        return stop

    def eval(
        self, expression: str, ranks: Ranks = None, frame: int = 0, timeout: float = ANSWER
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
        timeout: float = ANSWER,
    ) -> Evaluated:
        """Give a variable a new value on each worker that stands; that value."""
        answers = self._ask(self._paused(ranks), "assign", (frame, name, expression), timeout)
        with self._station.lock:
            self.edits += 1
            self._station._has_changed()
        return Evaluated(name, _told(answers))

    def ask(
        self, name: str, *args: Any, ranks: Ranks = None, timeout: float = ANSWER
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
                self.session._check_open()
                self.session._check_alive(missing)
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
        how = "%disco_abort" if self.session._dead() else "%disco_continue or %disco_abort"
        return f"the workers are paused at {place(here.file, here.line)}: {how} first"

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
                raise DebuggerError(NOTHING if lockstep is None else _OVER)
            if not lockstep.settled:
                raise DebuggerError(
                    f"{self._station.name} runs: stop it where it is with %disco_pause"
                )
            chosen = self._ranks(ranks)
            found = [rank for rank in lockstep.ranks(PAUSED) if rank in chosen]
            if not found:
                raise DebuggerError(not_paused(lockstep, chosen))
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
            stop = snapshot(lockstep, self._station.name, frame)
        return replace(stop, sources=sources_of(stop.workers))

    def _with_variables(
        self, worker: WorkerAt, records: Mapping[str, Any], stop: Stop, frame: int
    ) -> WorkerAt:
        """Mark what has changed since it was shown last."""
        count = records.get("", 0)  # see `inspecting.variables`
        records = {name: record for name, record in records.items() if name}
        own = sum(not name.startswith("(") for name in records)
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
        more = max(count - own, 0)
        return replace(worker, variables=records, changed=changed, more=more)

    def _tick(self) -> None:
        """A wait goes on: in a notebook output is shown then, below the cell that waits."""
        if threading.current_thread() is threading.main_thread():
            self.session.tick()


def _told(answers: Mapping[int, tuple[bool, Any]]) -> dict[int, tuple[str, Any]]:
    return {rank: ("value" if well else "error", value) for rank, (well, value) in answers.items()}
