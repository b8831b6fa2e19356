"""A collective of a worker in a process of its own, from the call to its end.

A `RemoteWork` is told by the coordinator, on the link's thread, how far its collective is; its
worker waits for that, and then writes the results, or has its conductor do all of it
(conductor.py). `_state` only goes forward. What is left early by the worker is void: nothing is
written for it any more but what the library is in the middle of.
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
from ..call import DONE, FAILED, Call
from ..coordinator import protocol
from ..work import Work, check_thread
from .client import CoordinatorClient
from .conductor import LET_GO_SECONDS, Conductor, Connect, ProcessGroup

WAITING, READY, RUNNING, OVER = range(4)
_POLL_SECONDS = 0.02  # between two times that a worker reminds the coordinator of it

Error = tuple[type[Exception], str]


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


class RemoteWork(Work):
    """See the module."""

    def __init__(
        self, client: CoordinatorClient, conductor: Conductor, call: Call, job: Job
    ) -> None:
        self._client, self._conductor, self.job = client, conductor, job
        self.call = call
        self.seq = client.enter(self)
        self._state = WAITING
        self._task: _Carrying | None = None
        self._error: Error | None = None
        self._given: list[Sequence[bytes]] = []  # until somebody takes it, under `_absorbing`
        self._absorbing = threading.Lock()
        self._missing: tuple[int, ...] = ()
        self._polled = 0.0
        self._adopted = False

    # -- what the coordinator says, on the link's thread -------------------------------------------

    def heard(self, word: str, *rest: Any) -> None:
        """See `Entry`."""
        if word == protocol.GO:
            self._given.append(rest[0])
            self._state = READY
            if self.call.asynchronous:
                self._conductor.submit(self._absorb)
        elif word == protocol.RUN:
            self._task, self._state = _Carrying(self, rest[0]), RUNNING
            self._conductor.submit(self._task)
        elif word == protocol.FAIL:
            aborted, text = rest
            self.end((CollectiveAborted if aborted else CollectiveError, text))
        elif word == protocol.LATE:
            self.end((WaitTimeoutError, rest[0]))
        elif word == protocol.MISSING:
            self._missing = tuple(rest[0])
        self.call.worker.wake()

    def end(self, error: Error | None) -> None:
        """It is over; the first word stays."""
        if self._state != OVER:
            self._error = error
            self.call.close(DONE if error is None else FAILED)
            self._state = OVER
            self._client.leave(self.seq)
            self.call.worker.wake()

    def void(self) -> bool:
        """Whether nobody waits for it any more, or will."""
        worker = self.call.worker
        return self._state == OVER or worker.interrupts > 0 or self.call.ordinal < worker.resumed_at

    def carry_out(self, end: ProcessGroup) -> None:
        """Do it over a process group, on the conductor's thread."""
        self.job.carry_out(end, self.void)

    def tell(self, word: str, *rest: Any) -> None:
        """Say something about it to the coordinator."""
        self._client.tell(word, self.seq, *rest)

    # -- on the worker's thread ------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work`."""
        if self._state != OVER:
            check_thread(self.call)
            self._check_cut()
            if self._state in (WAITING, RUNNING):
                self._await(timeout)
            self._absorb()
        if self._error is not None:
            kind, text = self._error
            raise kind(text)
        if not self._adopted:
            self._adopted = True
            self.job.adopt()
        return self.result

    def _roused(self) -> bool:
        return self._state in (READY, OVER)

    def _check_cut(self) -> None:
        if self.call.ordinal < self.call.worker.resumed_at:
            self.end((CollectiveAborted, f"{self} was ended by an interrupt"))

    def _absorb(self) -> None:
        """Write what the coordinator has sent, if nobody has; waits for who does it just now."""
        with self._absorbing:
            if not self._given:
                return
            given = self._given.pop()
            try:
                with torch.inference_mode():
                    self.job.absorb(given)
            except BaseException as exc:
                self.end((CollectiveError, f"{self} failed: {type(exc).__name__}: {exc}"))
                if self.call.worker.thread_id == threading.get_ident():
                    raise
            else:
                self.end(None)

    def _await(self, timeout: float | None) -> None:
        call, worker, client = self.call, self.call.worker, self._client
        if call.asynchronous or timeout is not None:
            call.patient |= timeout is not None
            client.tell(protocol.WAIT, self.seq, call.patient)
        limit = timeout if timeout is not None else call.timeout
        try:
            try:
                worker.wait_for(self._roused, self, limit, self._look)
            except WaitTimeoutError:
                if self._state == WAITING:
                    client.tell(protocol.LATE, self.seq, limit)
                worker.wait_for(self._roused, self, None, self._look)
        except BaseException as exc:
            self._leave(exc)
            raise

    def _look(self) -> float | None:
        if self._state == RUNNING:
            self._conductor.pass_by()
        check = self._client.check
        return check() if check is not None else None

    def _leave(self, exc: BaseException) -> None:
        """The worker does not wait any more, and will not do its part."""
        self.end((CollectiveAborted, f"{self} was left: {type(exc).__name__}"))
        if not isinstance(exc, WorkerInterrupted):  # an interrupt ends it on all
            self._client.tell(protocol.LEFT, self.seq, type(exc).__name__)
        if self._task is not None and not self._task.let_go.wait(LET_GO_SECONDS):
            self._conductor.abandon()

    def alone(self) -> None:
        """There is no other member: do it now. The coordinator is only told."""
        try:
            with torch.inference_mode():
                self.job.alone()
        except BaseException:
            self.end((CollectiveError, f"{self} failed"))
            raise
        self.end(None)

    def done(self) -> bool:
        """See `Work`; who asks again and again is told too that it can't complete."""
        if self._state == OVER:
            return True
        if self.call.worker.thread_id == threading.get_ident():
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
            self._client.tell(protocol.POLL, self.seq, self.call.timeout if late else None)

    # -- for people ------------------------------------------------------------------------------

    def call_of(self, rank: int) -> Call | None:
        """The call, if it is that worker's; for the doctor."""
        return self.call if rank == self.call.rank else None

    def __str__(self) -> str:
        call, missing = self.call, self._missing
        signature = call.signature
        title = f"{signature.op} #{call.number + 1}{signature.of} in {call.group}"
        return title + (f" (missing: {name_ranks(missing)})" if missing else "")


class _Carrying:
    """The part of one member that its conductor does; see `conductor.Task`."""

    def __init__(self, work: RemoteWork, number: int) -> None:
        self._work = work
        self.ranks, self.number = work.call.group.ranks, number
        self.connect = work.job.connect
        self.let_go = threading.Event()

    def void(self) -> bool:
        """See `Task`."""
        return self._work.void()

    def perform(self, end: ProcessGroup) -> None:
        """See `Task`."""
        self._work.carry_out(end)

    def done(self) -> None:
        """See `Task`."""
        self.let_go.set()
        self._work.end(None)
        self._work.tell(protocol.OVER)

    def failed(self, text: str) -> None:
        """See `Task`. The coordinator says to all members what has happened."""
        self.let_go.set()
        if text and not self._work.void():
            self._work.tell(protocol.BROKEN, text)
