"""Things of which only one worker of the process may be in the middle.

A `Turn` is held by a worker for a while; the others wait for it as for everything else, and can be
interrupted. A turn that an interrupt tore out of ends with its command. `_guard` guards `_holder`
and `_waiting`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..runtime.errors import CollectiveError
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


def _after_fork() -> None:
    for turn in tuple(_turns):
        turn.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
