"""Things of which only one worker, or one thread, of the process may be in the middle.

A `Turn` is held by a worker for a while; the others wait for it as for everything else, and can be
interrupted. A turn that an interrupt tore out of ends with its command. `_guard` guards `_holders`
and `_waiting`.

Threads that are no worker's own (the notebook's, and those that workers have started) take part
where `taken` is told so. Nothing can say whom such a thread waits for, so nobody waits for one
that waits in discolab, nor for any longer than `_PATIENCE` seconds; and such a thread waits as long
at most, and not for a worker that waits itself.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..runtime.errors import CollectiveError
from ..runtime.interrupts import reentrant_lock, shield, waiter_here, waiting_threads
from ..runtime.worker import Worker, current_worker_or_none
from .patches import Patches

_PATIENCE = 10.0  # seconds
_LOOK = 0.001  # seconds between two looks of a thread that is no worker's own
_sleep = time.sleep  # of a worker's own thread it is replaced, see threading_time.py


@dataclass(frozen=True)
class Holder:
    """A thread, and whose it is; of a worker's own thread also which command it runs."""

    thread: int
    worker: Worker | None
    ordinal: int | None
    since: float = field(default_factory=time.monotonic, compare=False)

    def lets_in(self, other: Holder) -> bool:
        """Whether another need not wait for this one."""
        if self.worker is not None and self.worker is other.worker:
            return True  # as threads of a process of its own
        if self.ordinal is not None:
            return False
        return self.thread in waiting_threads or time.monotonic() - self.since > _PATIENCE

    def is_over(self) -> bool:
        """Whether its command has ended, by an interrupt that tore out of the turn."""
        worker = self.worker
        if worker is None or self.ordinal is None:
            return False
        return worker.ended or worker.executed != self.ordinal


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def is_in_turn(worker: Worker) -> bool:
    """Whether a worker's own thread has a turn for which other workers may wait."""
    return any(turn.is_held_by(worker) for turn in tuple(_turns))


class Turn:
    """The right to do something that one worker at a time may do.

    Parameters
    ----------
    doing
        What it is, for errors and status.
    lets_pass
        Whether a worker that waits for another turn lets in the one that has that: else both would
        wait for ever. Python sees to the rest, as with the turn to import.
    """

    def __init__(self, doing: str, *, lets_pass: bool = False) -> None:
        self._doing = doing
        self._lets_pass = lets_pass
        self._guard = reentrant_lock()
        self._holders: list[Holder] = []
        self._waiting: set[Worker] = set()
        _turns.add(self)

    @contextmanager
    def taken(self, what: str, *, by_all: bool = False) -> Iterator[None]:
        """Hold it; at once on a thread that holds it already.

        Parameters
        ----------
        what
            What it is taken for, for errors and status.
        by_all
            Whether a thread that is no worker's own takes it too, rather than going on at once.

        Raises
        ------
        CollectiveError
            If the worker that holds it waits for this one.
        """
        worker = current_worker_or_none()
        thread = threading.get_ident()
        own = worker is not None and worker.thread_id == thread
        mine = Holder(thread, worker, worker.executed if worker is not None and own else None)
        if mine in self._holders or not (own or by_all):
            yield
            return
        try:
            if not self._take(mine):
                if worker is not None and own:
                    self._waiting.add(worker)
                    worker.wait_for(
                        lambda: self._take(mine),
                        f"its turn to {self._doing} {what}",
                        check=lambda: self._check(worker, what),
                    )
                else:
                    self._take_in_time(mine)
            yield
        finally:
            if worker is not None:
                self._waiting.discard(worker)
            self._end(mine)

    def is_held_by(self, worker: Worker) -> bool:
        """Whether a worker's own thread has it."""
        return any(
            holder.worker is worker and holder.ordinal is not None and not holder.is_over()
            for holder in tuple(self._holders)
        )

    def _take(self, mine: Holder) -> bool:
        with self._guard:
            self._holders[:] = [holder for holder in self._holders if not holder.is_over()]
            if not all(self._lets_in(holder, mine) for holder in self._holders):
                return False
            if mine not in self._holders:  # a wait may ask once more when it is over
                self._holders.append(mine)
            return True

    def _lets_in(self, holder: Holder, other: Holder) -> bool:
        if holder.lets_in(other):
            return True
        if not self._lets_pass or other.worker is None:
            return False
        return any(
            holder.worker in turn._waiting and turn.is_held_by(other.worker)
            for turn in tuple(_turns)
        )

    def _take_in_time(self, mine: Holder) -> None:
        until = time.monotonic() + _PATIENCE
        while not self._take(mine) and time.monotonic() < until:
            workers = [holder.worker for holder in tuple(self._holders)]
            if any(worker is not None and worker.waiting_for is not None for worker in workers):
                return
            _sleep(_LOOK)

    def _end(self, mine: Holder) -> None:
        with self._guard:
            if mine in self._holders:
                self._holders.remove(mine)
        for worker in list(self._waiting):
            worker.wake()

    def _check(self, worker: Worker, what: str) -> None:
        for holder in (h.worker for h in tuple(self._holders)):
            if holder is None:
                continue
            wait: Any = holder.waiting_for  # one of the collectives' says whom it waits for
            if (
                hasattr(wait, "missing")
                and holder.peers is worker.peers
                and not wait.settled()
                and worker.worker_id in wait.missing()
            ):
                raise CollectiveError(
                    f"deadlock: worker {worker.worker_id} waits for its turn to {self._doing} "
                    f"{what}, and worker {holder.worker_id}, which does such a thing now, waits "
                    f"for {wait}; workers take turns there, so it must not call collectives"
                )

    def reset(self) -> None:
        """In a forked child: no thread of the parent is there to end its turn."""
        self._guard = reentrant_lock()
        self._holders.clear()
        self._waiting.clear()


class Exclusive:
    """Something that one thread of the process may be in the middle of, whoever's it is.

    A worker waits on its own thread for its `Turn`, so a deadlock with a collective is told; the
    notebook's threads, and those that workers have started, wait for a lock that who has the turn
    takes too. A thread may enter again. One that an interrupt tore out of it is thrown out by the
    next that comes.

    `_holder` is written by the thread that holds `_lock`, and by who throws it out.

    Attributes
    ----------
    clean_ups
        Called when a thread is thrown out, to put right what it has left behind.
    """

    def __init__(self, doing: str) -> None:
        self.clean_ups: list[Callable[[], None]] = []
        self._turn = Turn(doing)
        self._doing = doing
        self._lock = threading.Lock()
        self._guard = reentrant_lock()
        self._holder: _Holder | None = None
        _exclusives.add(self)

    def is_held_here(self) -> bool:
        """Whether the calling thread is in the middle of it."""
        return self._holder is not None and self._holder.thread == threading.get_ident()

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Hold it; see `enter`."""
        self.enter(what)
        try:
            yield
        finally:
            self.leave()

    def enter(self, what: str) -> None:
        """Hold it until as many calls of `leave`.

        Raises
        ------
        CollectiveError
            If the worker that holds it waits for this one.
        """
        if not self.is_held_here():
            worker = current_worker_or_none()
            mine = _Holder(threading.get_ident(), worker, worker.executed if worker else 0)
            with ExitStack() as turn:
                turn.enter_context(self._turn.taken(what))
                turn.callback(self._release, mine)
                self._wait(what, mine)
                mine.turn = turn.pop_all()
        assert self._holder is not None
        self._holder.depth += 1

    def leave(self) -> None:
        """The end of an `enter` on this thread."""
        holder = self._holder
        assert holder is not None and self.is_held_here()
        holder.depth -= 1
        if not holder.depth:
            holder.turn.close()

    def _wait(self, what: str, mine: _Holder) -> None:
        waiter = waiter_here()
        if waiter is None:
            waiting_threads.add(mine.thread)
            try:
                while not self._take(mine, _PERIOD):
                    pass
            finally:
                waiting_threads.discard(mine.thread)
        elif not self._take(mine):
            waiter.wait_for(lambda: self._take(mine), f"its turn to {self._doing} {what}")

    def _take(self, mine: _Holder, timeout: float = 0.0) -> bool:
        with shield():  # or an interrupt would leave the lock taken by nobody
            if self._holder is not mine:  # a wait may ask once more when it is over
                self._throw_out()
                if not self._lock.acquire(timeout=timeout):
                    return False
                self._holder = mine
            return True

    def _throw_out(self) -> None:
        holder = self._holder
        if holder is not None and holder.is_gone() and not self.is_held_here():
            for clean_up in self.clean_ups:
                clean_up()
            self._release(holder)

    def _release(self, holder: _Holder) -> None:
        with self._guard:  # two may throw the same one out
            if self._holder is holder:
                self._holder = None
                self._lock.release()

    def reset(self) -> None:
        """In a forked child: no other thread of the parent is there to leave."""
        if not self.is_held_here():
            self._lock, self._holder = threading.Lock(), None
            self._guard = reentrant_lock()


@dataclass(eq=False)
class _Holder:
    """The thread that is in the middle of something, and how deep; worker's: in which command."""

    thread: int
    worker: Worker | None
    ordinal: int
    depth: int = 0
    turn: ExitStack = field(default_factory=ExitStack)

    def is_gone(self) -> bool:
        """Whether the command has ended in which it entered."""
        worker = self.worker
        return worker is not None and (worker.ended or worker.executed != self.ordinal)


_PERIOD = 0.05  # seconds between two looks of a thread that can't be woken
_exclusives: weakref.WeakSet[Exclusive] = weakref.WeakSet()


def _after_fork() -> None:
    for turn in tuple(_turns):
        turn.reset()
    for exclusive in tuple(_exclusives):
        exclusive.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def in_turn(exclusive: Exclusive, what: str, *names: str) -> Callable[[ModuleType, Patches], None]:
    """For `Row.on_import`: functions of a module, or methods of its classes, run one at a time."""

    def over(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run_in_turn(*args: Any, **kwargs: Any) -> Any:
            with exclusive.taken(what):
                return function(*args, **kwargs)

        return run_in_turn

    def change(module: ModuleType, patches: Patches) -> None:
        for path in names:
            owner, _, name = path.rpartition(".")
            target = getattr(module, owner) if owner else module
            patches.replace(target, name, over, everywhere=not owner)

    return change
