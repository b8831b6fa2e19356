"""A collective of a worker in a process of its own, from the call to its end.

On the link's thread the coordinator tells a `RemoteWork` how far its collective is. The worker
waits for that and then writes the results, or its conductor carries all of it out (conductor.py).
A collective that the worker has left early is void: nothing is written for it any more, except for
a step that the library has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...runtime.errors import (
    CollectiveAborted,
    CollectiveError,
    WaitTimeoutError,
    WorkerInterrupted,
)
from ...runtime.failures import name_ranks
from ..call import Call
from ..coordinator import protocol
from ..work import CallWork
from .client import CoordinatorClient
from .conductor import LET_GO_SECONDS, Conductor, Connect, ProcessGroup, Ranks, Task

WAITING, READY, RUNNING = range(3)
_POLL_SECONDS = 0.02  # between two times that a worker reminds the coordinator of it


class RemoteWait:
    """Something that a worker waits for and that the coordinator knows by its number, `seq`.

    The words of the coordinator are for `receive` (see `client.Entry`).
    """

    _task: Task | None = None

    def __init__(
        self, client: CoordinatorClient, conductor: Conductor, connect: Connect, call: Call
    ) -> None:
        self._client, self._conductor, self._connect = client, conductor, connect
        self.call = call
        self.seq = client.enter(self)  # from now on the link's thread may have something for it

    def receive(self, word: str, *rest: Any) -> None:
        """See `Entry`."""
        raise NotImplementedError

    def void(self) -> bool:
        """Whether nobody waits for it any more, or will."""
        worker = self.call.worker
        return worker.interrupts > 0 or self.call.ordinal < worker.resumed_at

    def tell(self, word: str, *rest: Any) -> None:
        """Say something about it to the coordinator."""
        self._client.tell(word, self.seq, *rest)

    def call_of(self, rank: int) -> Call | None:
        """The call, if it is that worker's; for the doctor."""
        return self.call if rank == self.call.rank else None

    def _submit(
        self,
        ranks: Ranks,
        number: int,
        perform: Callable[[ProcessGroup], None],
        done: Callable[[], None],
    ) -> None:
        """Have the conductor do it over a process group; the coordinator hears how that went."""

        def over() -> None:
            done()
            self.tell(protocol.OVER)

        def failed(text: str) -> None:
            if text and not self.void():
                self.tell(protocol.BROKEN, text)

        self._task = Task(ranks, number, self._connect, self.void, perform, over, failed)
        self._conductor.submit(self._task)

    def _await(
        self,
        ready: Callable[[], bool],
        late: Callable[[], bool],
        timeout: float | None,
        check: Callable[[], float | None] | None,
    ) -> None:
        """Wait until it is `ready()`; if it is `late()` at the deadline, ask which are missing."""
        worker = self.call.worker
        try:
            try:
                worker.wait_for(ready, self, timeout, check)
            except WaitTimeoutError:
                if late():
                    self.tell(protocol.LATE, timeout)
                worker.wait_for(ready, self, None, check)
        except BaseException as exc:
            self._leave(exc)
            raise

    def _leave(self, exc: BaseException) -> None:
        """Give up: the worker does not wait any more, and will not do its part."""
        if not isinstance(exc, WorkerInterrupted):  # an interrupt ends it on all
            self.tell(protocol.LEFT, type(exc).__name__)
        if self._task is not None and not self._task.let_go.wait(LET_GO_SECONDS):
            self._conductor.abandon()


def error_of(word: str, rest: Sequence[Any]) -> Exception | None:
    """The error that a word of the coordinator means, if it is one."""
    if word == protocol.FAIL:
        aborted, text = rest
        return (CollectiveAborted if aborted else CollectiveError)(text)
    return WaitTimeoutError(rest[0]) if word == protocol.LATE else None


class RemoteWork(RemoteWait, CallWork):
    """See the module. A subclass has what is to be done: one of `absorb` and `carry_out`."""

    _state = WAITING
    _given: Sequence[Any] | None = None  # until a thread takes it, under `Conductor.absorbing`
    _missing: tuple[int, ...] = ()
    _polled = 0.0

    # -- what is to be done ------------------------------------------------------------------------

    def absorb(self, given: Sequence[Any]) -> None:
        """Write the results of what all members have given through the coordinator."""
        raise NotImplementedError

    def carry_out(self, end: ProcessGroup) -> None:
        """Do it over a process group, on the conductor's thread; raises `Gone` once it is void."""
        raise NotImplementedError

    # -- what the coordinator says, on the link's thread -------------------------------------------

    def receive(self, word: str, *rest: Any) -> None:
        if word == protocol.GO:
            self._given = rest
            self._state = READY
            if self.call.asynchronous:
                self._conductor.submit(self._absorb)
        elif word == protocol.RUN:
            self._state = RUNNING
            self._submit(self.call.group.ranks, rest[0], self.carry_out, self.end)
        elif word == protocol.MISSING:
            self._missing = tuple(rest[0])
        else:
            self.end(error_of(word, rest))
        self.call.worker.wake()

    def end(self, error: Exception | None = None) -> None:
        """It is over; the first word stays."""
        if not self.over:
            super().end(error)
            self._client.leave(self.seq)
            worker = self.call.worker
            if worker.thread_id != threading.get_ident():
                worker.wake()

    def void(self) -> bool:
        return self.over or super().void()

    # -- on the worker's thread ------------------------------------------------------------------

    def complete(self, timeout: float | None) -> None:
        call = self.call
        if call.ordinal < call.worker.resumed_at:
            self._end_as_cut()
        else:
            if call.asynchronous and not self._roused():
                self.tell(protocol.WAIT, call.patient)
            self._await(self._roused, lambda: self._state == WAITING, timeout, self._look)
        if not self.over:
            self._absorb()

    def _roused(self) -> bool:
        return self._state == READY or self.over

    def _end_as_cut(self) -> None:
        self.end(CollectiveAborted(f"{self} was ended by an interrupt"))

    def _absorb(self) -> None:
        """Write what the coordinator has sent, once; waits for a thread that is doing so."""
        with self._conductor.absorbing:
            given, self._given = self._given, None
            if given is None or self.over:
                return
            try:
                with torch.inference_mode():
                    self.absorb(given)
            except BaseException as exc:
                self.end(CollectiveError(f"{self} failed: {type(exc).__name__}: {exc}"))
                if self.call.worker.thread_id == threading.get_ident():
                    raise
            else:
                self.end()

    def _look(self) -> float | None:
        if self._state == RUNNING:
            self._conductor.pass_by()
        check = self._client.check
        return check() if check is not None else None

    def _leave(self, exc: BaseException) -> None:
        self.end(CollectiveAborted(f"{self} was left: {type(exc).__name__}"))
        super()._leave(exc)

    def done(self) -> bool:
        """See `Work`. A worker that polls is told too if it can't complete."""
        worker = self.call.worker
        if not self.over and worker.thread_id == threading.get_ident():
            if self.call.ordinal < worker.resumed_at:
                self._end_as_cut()
            self._absorb()
            self._poll()
            if self._state == RUNNING:
                self._conductor.pass_by()
        return self.over

    def _poll(self) -> None:
        now = time.monotonic()
        if self._state == WAITING and not self.over and now - self._polled > _POLL_SECONDS:
            self._polled = now
            late = self.call.worker.clock.now() > self.call.due
            self.tell(protocol.POLL, self.call.timeout if late else None)

    def __str__(self) -> str:
        missing = f" (missing: {name_ranks(self._missing)})" if self._missing else ""
        return self.call.title + missing
