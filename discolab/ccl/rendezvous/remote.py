"""A collective of a worker in a process of its own, from the call to its end.

On the link's thread the coordinator tells a `RemoteWork` how far its collective is. The worker
waits for that and then writes the results, or its conductor carries all of it out (conductor.py).
`_state` only goes forward. A collective that the worker has left early is void: nothing is written
for it any more, except for a step that the library has begun.
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
from ...runtime.interrupts import plain_lock
from ..call import Call
from ..coordinator import protocol
from ..work import CallWork
from .client import CoordinatorClient
from .conductor import LET_GO_SECONDS, Conductor, Connect, ProcessGroup, Ranks, Task

WAITING, READY, RUNNING, OVER = range(4)
_POLL_SECONDS = 0.02  # between two times that a worker reminds the coordinator of it


class RemoteWait:
    """Something that a worker waits for and that the coordinator knows by its number, `seq`.

    The words of the coordinator are for `heard` (see `client.Entry`).
    """

    def __init__(self, client: CoordinatorClient, conductor: Conductor, call: Call) -> None:
        self._client, self._conductor, self.call = client, conductor, call
        self.seq = client.enter(self)
        self._task: Task | None = None

    def heard(self, word: str, *rest: Any) -> None:
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
        connect: Connect,
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

        self._task = Task(ranks, number, connect, self.void, perform, over, failed)
        self._conductor.submit(self._task)

    def _await(
        self,
        ready: Callable[[], bool],
        late: Callable[[], bool],
        timeout: float | None,
        check: Callable[[], float | None] | None,
    ) -> None:
        """Wait until it is `ready()`; if it is `late()` at the deadline, ask who is missing."""
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


class Job:
    """What is to be done once all members are there: one of `absorb` and `carry_out`.

    `connect` makes what is done over (`conductor.Task`).
    """

    connect: Connect

    def absorb(self, given: Sequence[bytes]) -> None:
        """Write the results of what all members have given through the coordinator."""
        raise NotImplementedError

    def carry_out(self, end: ProcessGroup, void: Callable[[], bool]) -> None:
        """Do it over a process group, on the conductor's thread; raises `Gone` once it is void."""
        raise NotImplementedError

    def alone(self) -> None:
        """Do it where there is no other member."""
        raise NotImplementedError

    def adopt(self) -> None:
        """On the worker's thread, once it is over: the results are the worker's."""


class RemoteWork(RemoteWait, CallWork):
    """See the module."""

    def __init__(
        self, client: CoordinatorClient, conductor: Conductor, call: Call, job: Job
    ) -> None:
        CallWork.__init__(self, call)
        self.job = job
        self._state = WAITING
        self._given: list[Sequence[bytes]] = []  # until somebody takes it, under `_absorbing`
        self._absorbing = plain_lock()
        self._missing: tuple[int, ...] = ()
        self._polled = 0.0
        self._adopted = False
        RemoteWait.__init__(self, client, conductor, call)

    # -- what the coordinator says, on the link's thread -------------------------------------------

    def heard(self, word: str, *rest: Any) -> None:
        """See `Entry`."""
        if word == protocol.GO:
            self._given.append(rest[0])
            self._state = READY
            if self.call.asynchronous:
                self._conductor.submit(self._absorb)
        elif word == protocol.RUN:
            self._state = RUNNING
            self._submit(
                self.call.group.ranks, rest[0], self.job.connect, self._carry_out, self.end
            )
        elif word == protocol.MISSING:
            self._missing = tuple(rest[0])
        else:
            self.end(error_of(word, rest))
        self.call.worker.wake()

    def end(self, error: Exception | None = None) -> None:
        """It is over; the first word stays."""
        if self._state != OVER:
            super().end(error)
            self._state = OVER
            self._client.leave(self.seq)
            self.call.worker.wake()

    def void(self) -> bool:
        """See `RemoteWait`."""
        return self._state == OVER or super().void()

    def _carry_out(self, end: ProcessGroup) -> None:
        self.job.carry_out(end, self.void)

    # -- on the worker's thread ------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work`."""
        result = super().wait(timeout)
        if not self._adopted:
            self._adopted = True
            self.job.adopt()
        return result

    def complete(self, timeout: float | None) -> None:
        """See `CallWork`."""
        self._check_cut()
        if self._state in (WAITING, RUNNING):
            if self.call.asynchronous:
                self.tell(protocol.WAIT, self.call.patient)
            self._await(self._roused, lambda: self._state == WAITING, timeout, self._look)
        self._absorb()

    def _roused(self) -> bool:
        return self._state in (READY, OVER)

    def _check_cut(self) -> None:
        if self.call.ordinal < self.call.worker.resumed_at:
            self.end(CollectiveAborted(f"{self} was ended by an interrupt"))

    def _absorb(self) -> None:
        """Write what the coordinator has sent, once; waits for a thread that is doing so."""
        with self._absorbing:
            if not self._given:
                return
            given = self._given.pop()
            try:
                with torch.inference_mode():
                    self.job.absorb(given)
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

    def alone(self) -> None:
        """Carry it out now, as there is no other member. The coordinator is only told."""
        try:
            with torch.inference_mode():
                self.job.alone()
        except BaseException:
            self.end(CollectiveError(f"{self} failed"))
            raise
        self.end()

    def done(self) -> bool:
        """See `Work`. A worker that polls is told too if it can't complete."""
        if self._state != OVER and self.call.worker.thread_id == threading.get_ident():
            self._check_cut()
            self._absorb()
            self._poll()
            if self._state == RUNNING:
                self._conductor.pass_by()
        return self._state == OVER

    def _poll(self) -> None:
        now = time.monotonic()
        if self._state == WAITING and now - self._polled > _POLL_SECONDS:
            self._polled = now
            late = self.call.worker.clock.now() > self.call.due
            self.tell(protocol.POLL, self.call.timeout if late else None)

    def __str__(self) -> str:
        missing = f" (missing: {name_ranks(self._missing)})" if self._missing else ""
        return self.call.title + missing
