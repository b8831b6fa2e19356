"""The controller's end of the debugger: what workers say goes into the lockstep, orders come out.

One `DebugController` a session. `lock` guards it and its `Lockstep`; events come on the workers'
threads where workers are threads, else on the session's reader thread (and of worker 0, on its
own). What follows from an event is done at once on the thread that brings it, so the last worker to
arrive lets the others go. Nothing waits under the lock.

While somebody stands and somebody runs, a thread looks whether those who run wait in a collective
for those who stand: that no worker can tell by itself. The same thread finds who has left a program
without saying so, as one that was stopped by `breakpoint()` in an ordinary call.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ..ccl.doctor import waits
from ..runtime.errors import DiscoError, SessionClosedError, SessionError
from ..runtime.failures import name_ranks
from ..runtime.interpreter_lock import copied
from ..runtime.interrupts import TICK, reentrant_lock
from ..runtime.ranks import parse_ranks
from ..runtime.services import SERVICES, Service, probe
from ..runtime.session import Session
from ..runtime.sources import display_name, place
from ..runtime.worker import Worker
from .agent import CONTROLLER, SERVICE, agent_of
from .lockstep import (
    ABORTED,
    DONE,
    ENDED,
    ERROR,
    HELD,
    OUT,
    PAUSED,
    RUNNING,
    Action,
    Blocking,
    Lockstep,
)
from .records import arrival_of
from .stops import Stop, not_paused, snapshot, sources_of

STUCK = "was told to end, and is still inside a call that Python can't interrupt"
_SOON = 0.002  # seconds from when somebody stands to the first look at the others
_TICK = 0.05
_IDLE = 0.2  # seconds between two looks while nobody runs, or nobody stands
NOTHING = "no program is being stepped: begin one with %%disco --step, or -b LINE"
_OVER = "the program has ended: begin one with %%disco --step, or -b LINE"

Ranks = str | Collection[int] | None


class DebuggerError(SessionError):
    """What was asked can't be done with the program as it is; says what can."""


class DebugController:
    """See the module.

    Attributes
    ----------
    lockstep
        Of the last program; None before there was one.
    name
        What the program is called.
    file
        In which it begins, "" if that is not known.
    breaks
        The breakpoints as they were changed since the program was sent; None if they were not.
    aborted
        See `keep_what_stands`.
    version
        Counts changes; `changed` is told of each.
    listeners
        Called after each change, on any thread.
    """

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)  # workers hold the controller
        self.lock = reentrant_lock()
        self.changed = threading.Condition(self.lock)
        self.lockstep: Lockstep | None = None
        self.aborted: tuple[int, Stop] | None = None
        self.name = self.file = ""
        self.breaks: tuple[Any, ...] | None = None
        self.version = 0
        self.listeners: list[Callable[[], None]] = []
        self._ordinals: dict[int, int] = {}  # in which call each worker runs the program
        self._pausing: set[int] = set()  # who shall stop as soon as it has begun
        self._begun_by_itself = False  # by `breakpoint()`, in a call that was not to be stepped
        self._still = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[int, tuple[bool, Any]]] = {}
        self._watching = False
        self._links = getattr(session, "services", {}).get(SERVICE)
        if isinstance(self._links, DebugService):
            self._links.controller = self
        else:
            for worker in session.workers_here().values():
                worker.shared[CONTROLLER] = self

    @property
    def session(self) -> Session:
        """Whose it is.

        Raises
        ------
        SessionClosedError
        """
        session = self._session()
        if session is None:
            raise SessionClosedError("the session of this debugger is gone")
        return session

    # -- programs ----------------------------------------------------------------------------

    def open(self, name: str, ranks: Collection[int], file: str = "") -> None:
        """A program begins on these workers; its first lines are in a file."""
        with self.lock:
            self.lockstep = Lockstep(ranks, self.session.num_workers)
            self.name, self.file, self.breaks = name, file, None
            self._ordinals.clear()
            self._pausing.clear()
            self._begun_by_itself = False
            self.has_changed()
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="discolab-debugger", daemon=True).start()

    def keep_what_stands(self) -> None:
        """Keep why workers stand, before they are ended, with the ordinal of their call."""
        with self.lock:
            if self.lockstep is not None and self.lockstep.paused:
                call = max(self._ordinals.values(), default=-1)
                self.aborted = call, snapshot(self.lockstep, self.name)

    @property
    def is_active(self) -> bool:
        """Whether a program is under way."""
        return self.lockstep is not None and not self.lockstep.finished

    @property
    def is_paused(self) -> bool:
        """Whether a program stands, so that it can be looked at and go on."""
        with self.lock:
            return self.lockstep is not None and self.lockstep.paused

    @property
    def is_settled(self) -> bool:
        """Whether no worker of a program runs: it stands, or has ended."""
        lockstep = self.lockstep
        return lockstep is None or lockstep.settled

    def stop(self, frame: int = 0) -> Stop:
        """How things are, without variables; there was a program."""
        with self.lock:
            assert self.lockstep is not None
            stop = snapshot(self.lockstep, self.name, frame)
        return replace(stop, sources=sources_of(stop.workers))

    def ranks(self, ranks: Ranks) -> list[int]:
        """Workers, as a user names them."""
        return list(parse_ranks(ranks, self.session.num_workers, self.session.current_mesh))

    def paused(self, ranks: Ranks) -> list[int]:
        """Of these workers those that stand.

        Raises
        ------
        DebuggerError
            If none does.
        """
        with self.lock:
            lockstep = self.lockstep
            if lockstep is None or lockstep.finished:
                raise DebuggerError(NOTHING if lockstep is None else _OVER)
            if not lockstep.settled:
                raise DebuggerError(f"{self.name} runs: stop it where it is with %disco_pause")
            chosen = self.ranks(ranks)
            found = [rank for rank in lockstep.ranks(PAUSED) if rank in chosen]
            if not found:
                raise DebuggerError(not_paused(lockstep, chosen))
            return found

    def why_held_up(self) -> str:
        """Why no call on the session goes on now, "" if they do."""
        with self.lock:
            lockstep = self.lockstep
            if lockstep is None or not lockstep.paused:
                return ""
            here = lockstep.at[lockstep.groups()[0][0]].here
        how = "%disco_abort" if self.session._dead() else "%disco_continue or %disco_abort"
        return f"the workers are paused at {place(here.file, here.line)}: {how} first"

    def command(self, mode: str, argument: Any, ranks: Collection[int] | None) -> None:
        """Have paused workers go on."""
        with self.lock:
            if self.lockstep is not None:
                self._do(self.lockstep.command(mode, argument, ranks))

    def set_breaks(self, packed: tuple[Any, ...]) -> None:
        """Have all workers know these breakpoints, those that have not begun too."""
        with self.lock:
            self.breaks = packed
            self.send_all("breaks", packed)

    def pause(self) -> None:
        """Have all that run stop at their next line."""
        with self.lock:
            if self.lockstep is not None:
                for rank in self.lockstep.ranks(RUNNING):
                    self.send(rank, "pause")
                    if rank not in self._ordinals:  # it has not begun, and beginning forgets that
                        self._pausing.add(rank)

    def close(self, stuck: Collection[int] = ()) -> None:
        """The program was ended on all workers, whatever is known of them; some still run."""
        with self.lock:
            if self.lockstep is not None:
                for rank in self.lockstep.ranks(RUNNING, HELD, PAUSED, "collective"):
                    self.lockstep.end(rank, ABORTED, STUCK if rank in stuck else "")
                if self._still:
                    self._stand(False)
                self.has_changed()

    # -- workers -----------------------------------------------------------------------------

    def send(self, rank: int, *message: Any) -> None:
        """Tell a worker something."""
        if isinstance(self._links, DebugService):
            self._links.tell(rank, message)
        else:
            agent_of(self.session.workers_here()[rank]).heard(message)

    def send_all(self, *message: Any) -> None:
        """Tell all workers something."""
        for rank in range(self.session.num_workers):
            self.send(rank, *message)

    def receive(self, rank: int, message: Sequence[Any]) -> None:
        """A worker has said something."""
        what, *rest = message
        with self.lock:
            if what == "answer":
                number, well, value = rest
                if number in self._answers:
                    self._answers[number][rank] = well, value
                    self.has_changed()
                return
            if what == "begin":
                self._ordinals[rank] = rest[0]
                if rank in self._pausing:
                    self._pausing.discard(rank)
                    self.send(rank, "pause")
                if self.breaks is not None:
                    self.send(rank, "breaks", self.breaks)
            elif what == "arrive":
                self._arrived(rank, rest[0])
            elif what == "end" and self.lockstep is not None and rank in self._ordinals:
                # else it is of a program before this, which it was slow to leave
                self._do(self.lockstep.end(rank, *rest))

    def _arrived(self, rank: int, packed: Any) -> None:
        arrival = arrival_of(packed)
        if not self.is_active:  # `breakpoint()` in what nobody has begun to step
            file = arrival.stack[0].file
            self.open(display_name(file), range(self.session.num_workers), file)
            self._ordinals = dict.fromkeys(range(self.session.num_workers), arrival.ordinal)
            self._begun_by_itself = True
        assert self.lockstep is not None
        self._ordinals.setdefault(rank, arrival.ordinal)
        self._do(self.lockstep.arrive(rank, arrival))

    def lost(self, rank: int) -> None:
        """A worker has died."""
        with self.lock:
            if self.lockstep is not None:
                self._do(self.lockstep.end(rank, ERROR, "the worker has died"))

    # -- questions ---------------------------------------------------------------------------

    def ask(
        self, ranks: Sequence[int], name: str, args: Sequence[Any], timeout: float
    ) -> dict[int, tuple[bool, Any]]:
        """Have workers that stand call a function ``module:name`` with ``(worker, frame, *args)``.

        Returns
        -------
        dict
            By rank whether it went well, and the value, which must travel, or what went wrong.
        """
        if not ranks:
            return {}
        answers: dict[int, tuple[bool, Any]] = {}
        with self.lock:
            number = next(self._numbers)
            self._answers[number] = answers
            for rank in ranks:
                self.send(rank, "ask", number, name, tuple(args))
        deadline = time.monotonic() + timeout
        to_cut: Sequence[int] = ranks
        try:
            while True:
                with self.lock:
                    missing = [rank for rank in ranks if rank not in answers]
                    if missing and time.monotonic() < deadline:
                        self.changed.wait(TICK)
                        missing = [rank for rank in ranks if rank not in answers]
                if missing:
                    self.tick()
                    self.session._check_open()
                    self.session._check_alive(missing)
                if not missing or time.monotonic() > deadline:
                    to_cut = missing
                    break
        finally:
            with self.lock:
                del self._answers[number]
                for rank in to_cut:
                    self.send(rank, "cut", number)
        late = (False, f"no value after {timeout:g} s: the evaluation was stopped")
        return dict(sorted({**dict.fromkeys(to_cut, late), **answers}.items()))

    def tick(self) -> None:
        """A wait goes on: in a notebook output is shown then, below the cell that waits."""
        if threading.current_thread() is threading.main_thread():
            self.session.tick()

    # -- inside ------------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        lockstep = self.lockstep
        assert lockstep is not None
        if self._still and not lockstep.paused:
            self._stand(False)
        for action in actions:
            if action.what == "go":
                assert action.order is not None
                self.send(action.rank, "go", *action.order)
            else:
                self.send(action.rank, action.what)
        if lockstep.paused and not self._still:
            self._stand(True)
        self.has_changed()

    def _stand(self, still: bool) -> None:
        """Have deadlines stand still, or run on."""
        self._still = still
        self.send_all("still", still)

    def has_changed(self) -> None:
        """Tell all who wait and listen; under the lock."""
        self.version += 1
        self.changed.notify_all()
        for listener in tuple(self.listeners):
            listener()

    # -- looking from outside ----------------------------------------------------------------

    def _watch(self) -> None:
        pause = _SOON
        while True:
            with self.lock:
                session = self._session()
                if session is None or session.closed or not self.is_active:
                    self._watching = False
                    return
                del session
                version = self.version
                mixed = self._is_mixed()
                self.changed.wait(pause if mixed else self._patience())
                if version != self.version:
                    pause = _SOON
                    continue
            try:
                self._look(version, mixed)
            except DiscoError:  # it is being shut down, or a worker does not answer
                time.sleep(_TICK)
            pause = min(2 * pause, _TICK)

    def _patience(self) -> float:
        """Seconds between two looks: fewer where nobody says that it has ended."""
        lockstep = self.lockstep
        assert lockstep is not None
        return _TICK / 2 if self._begun_by_itself and lockstep.ranks(RUNNING) else _IDLE

    def _is_mixed(self) -> bool:
        """Whether some stand and others run."""
        lockstep = self.lockstep
        assert lockstep is not None
        return bool(lockstep.at) and bool(lockstep.ranks(RUNNING))

    def look_now(self) -> None:
        """See whether those that wait still do: they may have failed since the last look."""
        with self.lock:
            version = self.version
            waiting = self.lockstep is not None and bool(self.lockstep.waits)
        if waiting:
            with contextlib.suppress(DiscoError):  # what was seen last is shown then
                self._look(version, True)

    def _look(self, version: int, mixed: bool) -> None:
        edges = {edge.rank: edge for edge in waits(self.session)} if mixed else {}
        ordinals = dict(self._ordinals)
        ends = self.session.look(has_left, ordinals) if ordinals else {}
        with self.lock:
            if version != self.version or self.lockstep is None:
                return
            for rank, (how, words) in ends.items():
                if how and self.lockstep.state[rank] not in (*ENDED, OUT):  # else it is known
                    self._do(self.lockstep.end(rank, how, words))
            if version != self.version or not edges:
                return
            state = self.lockstep.state
            found = {
                rank: Blocking(edge.whom, edge.any_of, _words(edge.what, edge.whom, state))
                for rank, edge in edges.items()
            }
            before = len(self.lockstep.waits)
            actions = self.lockstep.blocked(found)
            if actions or len(self.lockstep.waits) != before:
                self._do(actions)
            elif mixed and not self._still and self.lockstep.at:
                self._stand(True)  # somebody computes, and those who wait for others may be late


def _words(what: str, whom: Sequence[int], state: dict[int, str]) -> str:
    """``waits in all_reduce #1 of float32[4] for workers 2, 3 (paused)``."""
    kinds: dict[str, list[int]] = {}
    for rank in whom:
        kind = state.get(rank, "")
        kinds.setdefault(PAUSED if kind is HELD else kind, []).append(rank)
    told = [
        name_ranks(ranks) + (f" ({kind})" if kind == PAUSED else "")
        for kind, ranks in kinds.items()
    ]
    return f"waits in {what} for {' and '.join(told)}"


@probe
def has_left(worker: Worker, ordinals: dict[int, int]) -> tuple[str, str]:
    """How a worker has left the call in which it ran a program, and in words; "" if it has not."""
    ordinal = ordinals.get(worker.worker_id)
    if ordinal is None or (worker.executed <= ordinal and not worker.ended):
        return "", ""
    for number, failure in copied(worker.failed_calls):
        if number == ordinal:
            return (ABORTED if failure.interrupted else ERROR), failure.headline
    return DONE, ""


class DebugService(Service):
    """The lines to workers of other processes; without a controller they are let go at once."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self.controller: DebugController | None = None

    def tell(self, rank: int, message: tuple[Any, ...]) -> None:
        """Say something to a worker."""
        self._exchange.tell(rank, SERVICE, message)

    def receive(self, rank: int, value: Any) -> None:
        if self.controller is not None:
            self.controller.receive(rank, value)
        elif value[0] == "arrive":
            self.tell(rank, ("go", "continue", None))

    def lost(self, rank: int) -> None:
        if self.controller is not None:
            self.controller.lost(rank)


SERVICES[SERVICE] = DebugService
