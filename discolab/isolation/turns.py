"""Things of which only one worker, or one thread, of the process may be in the middle.

A `Turn` is held by a worker for a while; the others wait for it as for everything else, and can be
interrupted. A turn that an interrupt tore out of ends with its command. `_guard` guards `_holder`
and `_waiting`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..runtime.errors import CollectiveError
from ..runtime.waiter import waiter_here
from ..runtime.worker import Worker, current_worker_or_none

Holder = tuple[Worker, int]  # and the command that it runs

_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


class Turn:
    """The right to do something that one worker at a time may do; ``doing`` says what."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._guard = threading.Lock()
        self._holder: list[Holder] = []
        self._waiting: set[Worker] = set()
        _turns.add(self)

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Hold it; at once on a thread that is no worker's own, or that holds it already.

        Raises
        ------
        CollectiveError
            If the worker that holds it waits for this one.
        """
        worker = current_worker_or_none()
        if worker is None or worker.thread_id != threading.get_ident():
            yield
            return
        mine = (worker, worker.executed)
        if mine in self._holder:
            yield
            return
        try:
            if not self._take(mine):
                self._waiting.add(worker)
                worker.wait_for(
                    lambda: self._take(mine),
                    f"its turn to {self._doing} {what}",
                    check=lambda: self._check(worker, what),
                )
            yield
        finally:
            self._waiting.discard(worker)
            self._end(mine)

    def _take(self, mine: Holder) -> bool:
        with self._guard:
            if self._holder:
                worker, ordinal = self._holder[0]
                if self._holder[0] != mine and worker.executed == ordinal and not worker.ended:
                    return False
            self._holder[:] = [mine]
            return True

    def _end(self, mine: Holder) -> None:
        with self._guard:
            if mine in self._holder:
                self._holder.clear()
        for worker in tuple(self._waiting):
            worker.wake()

    def _check(self, worker: Worker, what: str) -> None:
        for holder, _ in tuple(self._holder):
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
        self._guard = threading.Lock()
        self._holder.clear()
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
            with ExitStack() as turn:
                turn.enter_context(self._turn.taken(what))
                self._wait(what)
                mine = _Holder(threading.get_ident(), worker, worker.executed if worker else 0)
                mine.turn = turn.pop_all()
                self._holder = mine
        assert self._holder is not None
        self._holder.depth += 1

    def leave(self) -> None:
        """The end of an `enter` on this thread."""
        holder = self._holder
        assert holder is not None and self.is_held_here()
        holder.depth -= 1
        if not holder.depth:
            self._release(holder)
            holder.turn.close()

    def _wait(self, what: str) -> None:
        waiter = waiter_here()
        if waiter is None:
            while not self._lock.acquire(timeout=_PERIOD):
                self._throw_out()
        elif not self._take():
            waiter.wait_for(self._take, f"its turn to {self._doing} {what}")

    def _take(self) -> bool:
        self._throw_out()
        return self._lock.acquire(blocking=False)

    def _throw_out(self) -> None:
        holder = self._holder
        if holder is not None and holder.is_gone() and not self.is_held_here():
            for clean_up in self.clean_ups:
                clean_up()
            self._release(holder)

    def _release(self, holder: _Holder) -> None:
        if self._holder is holder:
            self._holder = None
            self._lock.release()

    def reset(self) -> None:
        """In a forked child: no other thread of the parent is there to leave."""
        if not self.is_held_here():
            self._lock, self._holder = threading.Lock(), None


@dataclass
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
