"""Meeting and waiting: the threads around the board.

Each member posts its call and tensors on the session's `Board`. The last to arrive does the
whole operation for all, or has its waiting fellows help, and wakes the others. While the
operation waits or runs, the tensors in it belong to the board; a member that waits and leaves
early (interrupt, timeout) fails it for all.

Used by each backend whose workers share an address space: `local` does the operation itself,
the others give it to a library once all members are there and agree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...runtime.errors import CollectiveAborted, CollectiveError, SessionError, WaitTimeoutError
from ...runtime.worker import Worker
from .. import moves
from ..backend import BackendStatistics
from ..call import DONE, Call
from ..work import Work
from . import verdicts
from .board import Board
from .tickets import Tickets
from .waits import RUNNING, Meeting, Post, Reception, Wait

Execute = Callable[[Meeting, Sequence[Post]], "Tickets | None"]
Tensors = Sequence[torch.Tensor]


class Meetings:
    """The board of a session, and how its workers wait there."""

    def __init__(self, peers: Mapping[int, Worker]) -> None:
        self.board = Board()
        self.peers = peers

    def start(self, call: Call, srcs: Tensors, outs: Tensors, execute: Execute) -> MeetingWork:
        """Post; the last one executes for all: at once, or by returning tickets to share.

        If it sets ``meeting.abroad``, somebody calls `finish` or `fail` later.
        """
        worker, board = call.worker, self.board
        events = moves.posted(srcs, outs) if call.on_gpu else ()
        post = Post(call, srcs, outs, events)
        with board.lock:
            meeting = board.join(post)
            if call.number == 0 and len(board.open) > 1:
                verdicts.abandon(board, worker)
            mine = meeting.state is RUNNING
            if mine:
                text = verdicts.disagreement(board, meeting, worker)
                if text is not None:
                    board.fail(meeting, CollectiveError, text)
        if mine:
            if meeting.error is None:
                self._execute(meeting, worker, execute)
            self.wake(meeting, worker)
        return MeetingWork(self, meeting, post)

    def _execute(self, meeting: Meeting, worker: Worker, execute: Execute) -> None:
        posts = [meeting.posts[rank] for rank in meeting.group.ranks]
        on_gpu = meeting.first.on_gpu
        tensors = [t for post in posts for t in (*post.srcs, *post.outs)] if on_gpu else []
        try:
            if on_gpu:
                moves.enter([event for post in posts for event in post.events], tensors)
            with torch.inference_mode():
                tickets = execute(meeting, posts)
            if meeting.abroad:
                return
            if tickets is not None:
                self._share(tickets, meeting, worker)
            if on_gpu:
                meeting.done = moves.posted(tensors)
            with self.board.lock:
                self.board.finish(meeting)
        except BaseException as exc:
            text = (
                f"{meeting.title()} failed: {type(exc).__name__} on worker {worker.worker_id}, "
                f"which did it for all: {exc}"
            )
            self._fail(meeting, worker, text)
            raise

    def _share(self, tickets: Tickets, meeting: Meeting, worker: Worker) -> None:
        """Work on the tickets with as many of those that wait as the machine has cores for."""
        meeting.tickets = tickets
        with self.board.lock:
            waiting = [rank for rank, wait in self.board.waiting.items() if wait is meeting]
        for rank in waiting[: tickets.helpers()]:
            worker.peers[rank].wake()
        tickets.work()
        if not tickets.finished():
            self.wait(meeting, worker, None, lambda: tickets.finished() or meeting.settled())
        if meeting.error is not None:
            raise meeting.error[0](meeting.error[1])

    def help(self, meeting: Meeting, worker: Worker) -> None:
        """Work on the tickets of a meeting that `worker` waits for."""
        tickets = meeting.tickets
        assert tickets is not None
        try:
            tickets.work()
        except BaseException as exc:
            text = (
                f"{meeting.title()} failed: {type(exc).__name__} on worker {worker.worker_id}, "
                f"which helped with it: {exc}"
            )
            self._fail(meeting, worker, text)
            raise
        if tickets.finished():
            worker.peers[meeting.executor].wake()

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
                verdict = verdicts.judge(self.board, wait, worker)
                if verdict is None:
                    return verdicts.SECOND_LOOK if wait.suspected is not None else None
                for one in verdict.waits:
                    self.board.fail(one, verdict.error, verdict.text)
            for one in verdict.waits:
                self.wake(one, worker)
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

    def finish(self, meeting: Meeting) -> None:
        """Say that a library has done what it was given; from any thread."""
        with self.board.lock:
            self.board.finish(meeting)
        self._wake_all(meeting)

    def fail(self, meeting: Meeting, error: type[CollectiveError], text: str) -> None:
        """Say that a library can't do what it was given; from any thread."""
        with self.board.lock:
            self.board.fail(meeting, error, text)
        self._wake_all(meeting)

    def _wake_all(self, meeting: Meeting) -> None:
        for rank in meeting.group.ranks:
            self.peers[rank].wake()

    def enter(self, wait: Wait, rank: int) -> None:
        """Say that a worker waits, before it calls `wait`."""
        with self.board.lock:
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
            verdicts.abandon(board, worker)
            board.sweep(self.peers)
            held = [str(meeting) for meeting in board.open.values()]
            held += [f"{m.title()} (failed)" for m in board.failed.values()]
            receivers = [str(w) for w in board.waiting.values() if isinstance(w, Reception)]
            return BackendStatistics(
                backend, len(held), len(board.mailbox), tuple(held + receivers)
            )

    def look(self, meeting: Meeting, call: Call) -> None:
        """Fail a meeting that can't complete, or whose deadline is over; never waits."""
        worker = call.worker
        if worker.thread_id != threading.get_ident():
            return
        with self.board.lock:
            verdict = verdicts.absent(self.board, meeting, worker)
            late = worker.clock.now() > call.due
            if verdict is not None:
                self.board.fail(meeting, verdict.error, verdict.text)
            elif late and meeting.state is not RUNNING and not meeting.settled():
                text = verdicts.gave_up(self.board, meeting, worker, call.timeout or 0.0)
                self.board.fail(meeting, CollectiveAborted, text)
        if meeting.settled():
            self.wake(meeting, worker)

    def _give_up(
        self, wait: Wait, worker: Worker, timeout: float, check: Callable[[], float | None]
    ) -> None:
        """Raise for a timeout, unless the last member has come just now."""
        with self.board.lock:
            if wait.settled():
                return
            running = isinstance(wait, Meeting) and wait.state is RUNNING
            if not running:
                text = verdicts.gave_up(self.board, wait, worker, timeout)
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


class MeetingWork(Work):
    """One worker's part in a meeting."""

    __slots__ = ("_meeting", "_meetings", "_over", "_post", "result")

    def __init__(self, meetings: Meetings, meeting: Meeting, post: Post) -> None:
        self._meetings, self._meeting, self._post = meetings, meeting, post
        self._over = False
        self.result: Any = None

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work`."""
        if not self._over:
            call, meeting = self._post.call, self._meeting
            check_thread(call)
            if not meeting.settled():
                call.patient |= timeout is not None
                self._await(timeout if timeout is not None else call.timeout)
            self._end(meeting, call.worker)
        if self._meeting.error is not None:
            error, text = self._meeting.error
            raise error(text)
        return self.result

    def done(self) -> bool:
        """See `Work`; who asks again and again is told too that it can't complete."""
        if not self._over and not self._meeting.settled():
            self._meetings.look(self._meeting, self._post.call)
        return self._meeting.settled()

    def _await(self, timeout: float | None) -> None:
        call, meeting, meetings = self._post.call, self._meeting, self._meetings
        if call.asynchronous:
            meetings.enter(meeting, call.rank)
        try:
            meetings.wait(meeting, call.worker, timeout, meeting.roused)
            if not meeting.settled():
                meetings.help(meeting, call.worker)
                meetings.wait(meeting, call.worker, None)
        finally:
            meetings.rest(meeting, call.rank)

    def _end(self, meeting: Meeting, worker: Worker) -> None:
        """The tensors are the worker's again."""
        if meeting.state is DONE and meeting.done:
            moves.adopt(meeting.done, self._post.srcs, self._post.outs)
        self._over = True
        self._post = Post(self._post.call)


def check_thread(call: Call) -> None:
    """Refuse to wait on a thread that is not the worker's.

    Raises
    ------
    SessionError
    """
    if call.worker.thread_id != threading.get_ident():
        raise SessionError(
            f"{call.name} was started by worker {call.rank}; only that worker's own thread can "
            "wait for it"
        )
