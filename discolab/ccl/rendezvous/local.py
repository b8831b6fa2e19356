"""Meeting and waiting: the threads around the board.

Each member contributes its call and tensors on the session's `Board`. The last to arrive does the
whole operation for all, or has the waiting members help, and wakes the others. While the
operation waits or runs, the tensors in it belong to the board; a member that waits and leaves
early (interrupt, timeout) fails it for all.

Used by each backend whose workers share an address space: `local` does the operation itself,
the others give it to a library once all members are there and agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from ...runtime.errors import CollectiveAborted, CollectiveError, WaitTimeoutError
from ...runtime.worker import Worker
from .. import memory
from ..backend import BackendStatistics
from ..board import diagnosis
from ..board.rendezvous import (
    RUNNING,
    Board,
    Chunks,
    Contribution,
    PendingCollective,
    Wait,
)
from ..call import Call
from ..work import CallWork

Execute = Callable[[PendingCollective, Sequence[Contribution]], "Chunks | None"]
Tensors = Sequence[torch.Tensor]


class LocalRendezvous:
    """The board of a session, and how its workers wait there."""

    def __init__(self, peers: Mapping[int, Worker]) -> None:
        self.board = Board()
        self.peers = peers

    def start(
        self, call: Call, srcs: Tensors, outs: Tensors, execute: Execute, *, abroad: bool = False
    ) -> LocalWork:
        """Join a collective; the last member executes it: at once, or by returning chunks to share.

        If it is done `abroad`, `execute` gives it to a library, which calls `finish` or `fail`
        later. Then nothing waits here for devices.
        """
        worker, board = call.worker, self.board
        events = memory.record(srcs, outs) if call.on_gpu else ()
        contribution = Contribution(call, srcs, outs, events)
        with board.lock:
            collective = board.join(contribution)
            if call.number == 0 and len(board.open) > 1:
                diagnosis.abandon(board, worker)
            mine = collective.state is RUNNING
            if mine:
                text = diagnosis.disagreement(board, collective, worker)
                if text is not None:
                    board.fail(collective, CollectiveError, text)
        if mine:
            if collective.error is None:
                collective.abroad = abroad
                self._execute(collective, worker, execute)
            self.wake(collective, worker)
        return LocalWork(self, collective, contribution)

    def _execute(self, collective: PendingCollective, worker: Worker, execute: Execute) -> None:
        contributions = [collective.contributions[rank] for rank in collective.group.ranks]
        on_gpu = collective.first.on_gpu and not collective.abroad
        tensors = (
            [t for contribution in contributions for t in (*contribution.srcs, *contribution.outs)]
            if on_gpu
            else []
        )
        try:
            if on_gpu:
                memory.wait_for(
                    [event for contribution in contributions for event in contribution.events],
                    tensors,
                )
                for tensor in tensors:  # a member may never wait, and let its memory go
                    memory.keep(tensor)
            with torch.inference_mode():
                chunks = execute(collective, contributions)
            if collective.abroad:
                return
            if chunks is not None:
                self._share(chunks, collective, worker)
            if on_gpu:
                done = memory.record(tensors)
                for contribution in contributions:
                    contribution.done = done
            with self.board.lock:
                self.board.finish(collective)
        except BaseException as exc:
            text = (
                f"{collective.title()} failed: {type(exc).__name__} on worker {worker.worker_id}, "
                f"which did it for all: {exc}"
            )
            self._fail(collective, worker, text)
            raise

    def _share(self, chunks: Chunks, collective: PendingCollective, worker: Worker) -> None:
        """Work on the chunks with as many of those that wait as the machine has cores for."""
        collective.chunks = chunks
        with self.board.lock:
            waiting = [rank for rank, wait in self.board.waiting.items() if wait is collective]
        for rank in waiting[: chunks.helpers()]:
            worker.peers[rank].wake()
        chunks.work()
        if not chunks.finished():
            self.wait(collective, worker, None, lambda: chunks.finished() or collective.settled())
        if collective.error is not None:
            raise collective.error[0](collective.error[1])

    def help(self, collective: PendingCollective, worker: Worker) -> None:
        """Work on the chunks of a collective that `worker` waits for."""
        chunks = collective.chunks
        assert chunks is not None
        try:
            chunks.work()
        except BaseException as exc:
            text = (
                f"{collective.title()} failed: {type(exc).__name__} on worker {worker.worker_id}, "
                f"which helped with it: {exc}"
            )
            self._fail(collective, worker, text)
            raise
        if chunks.finished():
            worker.peers[collective.executor].wake()

    def wait(
        self,
        wait: Wait,
        worker: Worker,
        timeout: float | None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Wait until it is settled, or `ready()`; to leave earlier fails it for all."""

        def check() -> float | None:
            with self.board.lock:
                verdict = diagnosis.judge(self.board, wait, worker)
                if verdict is None:
                    return diagnosis.SECOND_LOOK if wait.suspected is not None else None
                failed = diagnosis.fail(self.board, verdict)
            for other in failed:
                self.wake(other, worker)
            return None

        try:
            worker.wait_for(ready or wait.settled, wait, timeout, check)
        except WaitTimeoutError:
            assert timeout is not None
            self._give_up(wait, worker, timeout, check)
        except BaseException as exc:
            text = f"{wait} was left by worker {worker.worker_id}: {type(exc).__name__}"
            self._fail(wait, worker, text)
            raise

    def finish(self, collective: PendingCollective) -> None:
        """Say that a library has done what it was given; from any thread."""
        with self.board.lock:
            self.board.finish(collective)
        self._wake_all(collective)

    def fail(self, collective: PendingCollective, error: type[CollectiveError], text: str) -> None:
        """Say that a library can't do what it was given; from any thread."""
        with self.board.lock:
            self.board.fail(collective, error, text)
        self._wake_all(collective)

    def _wake_all(self, collective: PendingCollective) -> None:
        for rank in collective.group.ranks:
            self.peers[rank].wake()

    def replaced(self, worker: Worker) -> None:
        """End what waits for a worker that was lost, of which `worker` has the place."""
        rank = worker.worker_id
        with self.board.lock:
            ended = [
                collective
                for collective in self.board.open.values()
                if rank in collective.group.ranks and collective.ordinal < worker.joined_at
            ]
            for collective in ended:
                text = f"{collective.title()} can't complete" + diagnosis.account(
                    self.board, collective, worker
                )
                self.board.fail(collective, CollectiveError, text)
            self.board.replaced(rank)
        for collective in ended:
            self.wake(collective, worker)

    def enter(self, wait: Wait, rank: int) -> None:
        """Say that a worker waits, before it calls `wait`."""
        with self.board.lock:
            if not wait.settled():  # else nobody would take it out again
                self.board.waiting[rank] = wait

    def rest(self, wait: Wait, rank: int) -> None:
        """Say that a worker no longer waits."""
        with self.board.lock:
            self.board.rest(rank, wait)

    def statistics(self, backend: str) -> BackendStatistics:
        """What is on the board."""
        board = self.board
        with board.lock:
            worker = next(iter(self.peers.values()))
            board.refresh(worker)
            diagnosis.abandon(board, worker)
            board.sweep(self.peers)
            return BackendStatistics(backend, *board.summary())

    def look(self, collective: PendingCollective, call: Call) -> None:
        """Fail a collective that can't complete, or whose deadline is over; never waits."""
        worker = call.worker
        if worker.thread_id != threading.get_ident():
            return
        late = call.timeout if worker.clock.now() > call.due else None
        with self.board.lock:
            verdict = diagnosis.poll(self.board, collective, worker, late)
            diagnosis.fail(self.board, verdict)
        if collective.settled():
            self.wake(collective, worker)

    def _give_up(
        self, wait: Wait, worker: Worker, timeout: float, check: Callable[[], float | None]
    ) -> None:
        """Raise for a timeout, unless the last member has come just now."""
        with self.board.lock:
            if wait.settled():
                return
            running = isinstance(wait, PendingCollective) and wait.state is RUNNING
            if not running:
                text = diagnosis.gave_up(self.board, wait, worker, timeout)
                why = f"{wait}: worker {worker.worker_id} gave up after {timeout:g} s"
                self.board.fail(wait, CollectiveAborted, why)
        if running:
            worker.wait_for(wait.settled, wait, None, check)
        else:
            self.wake(wait, worker)
            raise WaitTimeoutError(text) from None

    def _fail(self, wait: Wait, worker: Worker, text: str) -> None:
        with self.board.lock:
            self.board.fail(wait, CollectiveAborted, text)
        self.wake(wait, worker)

    def wake(self, wait: Wait, worker: Worker) -> None:
        """Have the members of a settled wait look again."""
        for rank in wait.members():
            if rank != worker.worker_id:
                worker.peers[rank].wake()


class LocalWork(CallWork):
    """One worker's part in a collective."""

    def __init__(
        self, rendezvous: LocalRendezvous, collective: PendingCollective, contribution: Contribution
    ) -> None:
        self._rendezvous, self._collective = rendezvous, collective
        self.call, self._contribution = contribution.call, contribution

    def complete(self, timeout: float | None) -> None:
        collective, contribution = self._collective, self._contribution
        if not collective.settled():
            self._await(timeout)
        if collective.error is not None:
            error, text = collective.error
            self._error = error(text)
        elif contribution.done:
            memory.wait_for(contribution.done, contribution.srcs, contribution.outs)
        self.over = True
        del self._contribution  # the tensors are the worker's again

    def done(self) -> bool:
        """See `Work`. A worker that polls is told too if it can't complete.

        On devices it is over when they have done it: whoever has polled may not wait as well.
        """
        collective = self._collective
        if not collective.settled():
            self._rendezvous.look(collective, self.call)
        return collective.settled() and (
            self.over or all(event.query() for event in self._contribution.done)
        )

    def _await(self, timeout: float | None) -> None:
        call, collective, rendezvous = self.call, self._collective, self._rendezvous
        if call.asynchronous:
            rendezvous.enter(collective, call.rank)
        try:
            rendezvous.wait(collective, call.worker, timeout, collective.roused)
            if not collective.settled():
                rendezvous.help(collective, call.worker)
                rendezvous.wait(collective, call.worker, None)
        finally:
            if not collective.settled():  # else it was taken out already
                rendezvous.rest(collective, call.rank)
