"""A worker's end of the way to the coordinator.

A `CoordinatorClient` belongs to one worker and lies in its `shared`. The link's thread hands it
the coordinator's messages; each is for an `Entry`, by the number that the client gave to it, or,
with number 0, for the listener to its word.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ...runtime.errors import SessionError, WaitTimeoutError
from ...runtime.interrupts import TICK, shield
from ...runtime.worker import Worker
from ..coordinator import protocol
from ..coordinator.protocol import SERVICE

_CLIENT = "discolab.ccl.client"


class Entry(Protocol):
    """Something that the coordinator sends messages to, by its number."""

    def receive(self, word: str, *rest: Any) -> None:
        """Take a message of the coordinator's; on the link's thread, so be quick."""


class CoordinatorClient:
    """See the module."""

    def __init__(self, worker: Worker) -> None:
        assert worker.link is not None
        self.worker = worker
        self.link = worker.link
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._listeners: dict[str, Callable[..., None]] = {}
        self.link.listen(SERVICE, self._receive)

    # -- saying ------------------------------------------------------------------------------------

    def tell(self, word: str, *rest: Any) -> None:
        """Send the coordinator a message, from any thread; atomic with respect to interrupts.

        Raises
        ------
        WorkerInterrupted
            On the worker's own thread, while an interrupt is under way.
        """
        worker = self.worker
        if os.getpid() != self._pid:
            raise SessionError(
                f"this process was forked in worker {worker.worker_id}; it takes no part in "
                "collectives, and has no way to the other workers"
            )
        value = (word, worker.executed, worker.resumed_at, *rest)
        if worker.thread_id == threading.get_ident() and not worker.ended:
            with shield():
                self.link.tell(SERVICE, value)
        else:
            self.link.tell(SERVICE, value)

    def ask(
        self,
        word: str,
        *rest: Any,
        what: str = "the session",
        timeout: float | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Ask the coordinator; its answer. A worker waits for it as for everything else.

        Parameters
        ----------
        timeout
            Seconds; None: as long as the coordinator lives.
        wanted
            Whether somebody still wants the answer; asked on other threads than the worker's.

        Raises
        ------
        WaitTimeoutError
        SessionError
            If nobody wants it any more.
        """
        worker, question = self.worker, _Question()
        seq = self.enter(question)
        own = worker.thread_id == threading.get_ident()
        if own:
            question.wake = worker.wake
        try:
            self.tell(word, seq, *rest)
            if own:
                worker.wait_for(question.answered, what, timeout, self.check)
            else:
                question.wait(what, timeout, wanted)
            return question.answer[0]
        except WaitTimeoutError:
            self.tell(protocol.LEFT, seq, "timeout")
            raise
        finally:
            self.leave(seq)

    # -- being told --------------------------------------------------------------------------------

    def enter(self, entry: Entry) -> int:
        """Register an entry; its number."""
        seq = next(self._numbers)
        self._entries[seq] = entry
        return seq

    def leave(self, seq: int) -> None:
        """Drop what still comes for an entry."""
        self._entries.pop(seq, None)

    def next_number(self) -> int:
        """A number for something that gets no messages."""
        return next(self._numbers)

    def listen(self, word: str, listener: Callable[..., None]) -> None:
        """Have `listener` called with the messages of this word that are for no entry."""
        self._listeners[word] = listener

    def _receive(self, value: Any) -> None:
        word, seq, *rest = value
        if seq:
            entry = self._entries.get(seq)
            if entry is not None:
                entry.receive(word, *rest)
        elif word in self._listeners:
            self._listeners[word](*rest)

    # -- waiting -----------------------------------------------------------------------------------

    @property
    def check(self) -> Callable[[], float | None] | None:
        """For `Worker.wait_for`: worker 0 reminds the coordinator to look for stalls."""
        return self._look if self.worker.worker_id == 0 else None

    def _look(self) -> None:
        self.tell(protocol.LOOK)


class _Question:
    """A question to the coordinator."""

    def __init__(self) -> None:
        self.answer: list[Any] = []
        self._came = threading.Event()
        self.wake: Callable[[], None] = self._came.set

    def receive(self, word: str, *rest: Any) -> None:
        """See `Entry`."""
        self.answer.append(rest[0])
        self._came.set()
        self.wake()

    def answered(self) -> bool:
        """Whether it is."""
        return bool(self.answer)

    def wait(self, what: str, timeout: float | None, wanted: Callable[[], bool]) -> None:
        """On a thread that is no worker's own."""
        left = timeout if timeout is not None else float("inf")
        while not self._came.wait(min(TICK, max(0.0, left))):
            left -= TICK
            if left <= 0:
                raise WaitTimeoutError(f"gave up after {timeout:g} s waiting for {what}")
            if not wanted():
                raise SessionError(f"nobody waits for {what} any more")


def has_coordinator(worker: Worker) -> bool:
    """Whether the workers of the session have several processes and meet at its coordinator."""
    return worker.link is not None and worker.num_workers > 1


def client_of(worker: Worker) -> CoordinatorClient:
    """The client of a worker whose session has a coordinator."""
    found: CoordinatorClient | None = worker.shared.get(_CLIENT)
    if found is None:
        found = worker.shared.setdefault(_CLIENT, CoordinatorClient(worker))
    return found
