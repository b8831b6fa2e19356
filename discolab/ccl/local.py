"""The backend for workers of one address space: they meet on a board, the last one does it all.

Each member posts its tensors on the session's `Board`. The last to arrive does the whole
operation for all, in the order of the ranks, writing into every member's own output, and
wakes the others. While the operation is PENDING or RUNNING the tensors in it belong to the
board; a member that leaves early (interrupt, timeout) fails it for all.

Messages are copied at `send`, which therefore never waits, whatever their size.

The `LocalBackend` of a session is in `Worker.shared`; its board's lock guards its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..runtime.errors import (
    CollectiveAborted,
    CollectiveError,
    WaitTimeoutError,
)
from ..runtime.worker import Worker
from . import moves, verdicts
from .backend import Backend, BackendStatistics, Call, Tensor
from .blocks import Job, reduce_in_blocks
from .board import Board
from .mailbox import Message
from .reductions import combine
from .waits import RUNNING, Meeting, Post, Reception, Signature, Wait, kind

Work = Callable[[Sequence[Post]], None]


class LocalBackend(Backend):
    """Collectives through shared memory; CPU, or any CUDA devices of the process."""

    name = "local"

    def __init__(self, peers: Mapping[int, Worker]) -> None:
        self.board = Board()
        self._peers = peers

    # -- the operations ----------------------------------------------------------------------

    def all_reduce(self, call: Call, src: Tensor, out: Tensor, reduction: str) -> None:
        """See `Backend`."""
        self._meet(call, _signature(call, src, reduction), src, out, _reduce(reduction))

    def reduce(
        self, call: Call, src: Tensor, out: Tensor | None, reduction: str, root: int
    ) -> None:
        """See `Backend`."""
        self._meet(call, _signature(call, src, reduction, root), src, out, _reduce(reduction))

    def all_gather(self, call: Call, src: Tensor, out: Tensor) -> None:
        """See `Backend`."""
        self._meet(call, _signature(call, src), src, out, _gather)

    def gather(self, call: Call, src: Tensor, out: Tensor | None, root: int) -> None:
        """See `Backend`."""
        self._meet(call, _signature(call, src, root=root), src, out, _gather)

    def reduce_scatter(self, call: Call, src: Tensor, out: Tensor, reduction: str) -> None:
        """See `Backend`."""

        def work(posts: Sequence[Post]) -> None:
            parts = zip(
                *(moves.rows(source, len(posts)) for source in _sources(posts)), strict=True
            )
            jobs = [Job([_out(p)], list(part)) for p, part in zip(posts, parts, strict=True)]
            if not reduce_in_blocks(jobs, reduction):
                totals = moves.rows(combine(_sources(posts), reduction), len(posts))
                moves.move_all([(_out(p), total) for p, total in zip(posts, totals, strict=True)])

        self._meet(call, _signature(call, src, reduction), src, out, work)

    def broadcast(self, call: Call, src: Tensor | None, out: Tensor, root: int) -> None:
        """See `Backend`."""

        def work(posts: Sequence[Post]) -> None:
            (source,) = _sources(posts)
            moves.move_all([(_out(post), source) for post in posts])

        self._meet(call, _signature(call, out, root=root), src, out, work)

    def scatter(self, call: Call, src: Tensor | None, out: Tensor, root: int) -> None:
        """See `Backend`."""

        def work(posts: Sequence[Post]) -> None:
            (source,) = _sources(posts)
            parts = moves.rows(source, len(posts))
            moves.move_all([(_out(p), part) for p, part in zip(posts, parts, strict=True)])

        self._meet(call, _signature(call, out, root=root), src, out, work)

    def barrier(self, call: Call) -> None:
        """See `Backend`."""
        self._meet(call, Signature("barrier"), None, None, lambda posts: None)

    def send(self, call: Call, src: Tensor, peer: int) -> None:
        """See `Backend`. Copies at once and never waits."""
        worker, board = call.worker, self.board
        copy = moves.copy_of(src)
        direct = worker.current is not None and call.site is worker.current[-1]
        message = Message(copy, worker.executed, call.site, moves.posted(copy), direct)
        with board.lock:
            board.refresh(worker)
            board.mailbox.put((worker.worker_id, peer), message, worker.peers)
        worker.peers[peer].wake()

    def recv(self, call: Call, out: Tensor, peer: int) -> None:
        """See `Backend`."""
        worker = call.worker
        message = self._next_message(call, out, peer)
        got = message.tensor
        if got.shape != out.shape or got.dtype != out.dtype:
            raise CollectiveError(
                f"recv of {_kind(out)} on worker {worker.worker_id}{verdicts.where(call.site)}: "
                f"worker {peer} sent {_kind(got)}{verdicts.where(message.site)}; shape and dtype "
                "must be the same (the message is used up)"
            )
        moves.enter(message.events, (got, out))
        with torch.inference_mode():
            moves.as_bytes(out).copy_(moves.as_bytes(got))
        moves.keep(got)

    def statistics(self) -> BackendStatistics:
        """See `Backend`."""
        board = self.board
        with board.lock:
            board.sweep(self._peers)
            held = [str(meeting) for meeting in board.open.values()]
            held += [f"{m.title()} (failed)" for m in board.failed.values()]
            receivers = [str(w) for w in board.waiting.values() if isinstance(w, Reception)]
            return BackendStatistics(
                self.name, len(held), len(board.mailbox), tuple(held + receivers)
            )

    # -- meeting -----------------------------------------------------------------------------

    def _meet(
        self, call: Call, signature: Signature, src: Tensor | None, out: Tensor | None, work: Work
    ) -> None:
        """Post, and return once the operation is done; the last one does it."""
        worker, board = call.worker, self.board
        post = Post(worker.worker_id, signature, call.site, src, out, moves.posted(src, out))
        with board.lock:
            meeting = board.join(worker, call.group, post)
            mine = meeting.state is RUNNING
            if mine:
                text = verdicts.disagreement(board, meeting, worker)
                if text is not None:
                    board.fail(meeting, CollectiveError, text)
        if not mine:
            self._await(meeting, worker, call.timeout)
        else:
            if meeting.error is None:
                self._execute(meeting, worker, work)
            self._wake(meeting, worker)
        if meeting.error is not None:
            raise meeting.error[0](meeting.error[1])
        moves.adopt(meeting.done, (src, out))

    def _execute(self, meeting: Meeting, worker: Worker, work: Work) -> None:
        posts = [meeting.posts[rank] for rank in meeting.group.ranks]
        tensors = [tensor for post in posts for tensor in (post.src, post.out)]
        try:
            moves.enter([event for post in posts for event in post.events], tensors)
            with torch.inference_mode():
                work(posts)
            meeting.done = moves.leave(*tensors)
            with self.board.lock:
                self.board.finish(meeting)
        except BaseException as exc:
            text = (
                f"{meeting.title()} failed: {type(exc).__name__} on worker {worker.worker_id}, "
                f"which did it for all: {exc}"
            )
            with self.board.lock:
                self.board.fail(meeting, CollectiveAborted, text)
            self._wake(meeting, worker)
            raise

    def _await(self, wait: Wait, worker: Worker, timeout: float | None) -> None:
        """Wait until it is settled; to leave earlier fails it for all."""

        def check() -> None:
            with self.board.lock:
                verdict = verdicts.judge(self.board, wait, worker, patient=timeout is not None)
                if verdict is None:
                    return
                for one in verdict.waits:
                    self.board.fail(one, verdict.error, verdict.text)
            for one in verdict.waits:
                self._wake(one, worker)

        try:
            worker.wait_for(wait.settled, wait, timeout, check)
        except WaitTimeoutError:
            assert timeout is not None
            self._give_up(wait, worker, timeout, check)
        except BaseException as exc:
            text = f"{wait} was left by worker {worker.worker_id}: {type(exc).__name__}"
            self._leave(wait, worker, text)
            raise
        finally:
            with self.board.lock:
                self.board.rest(worker.worker_id, wait)

    def _give_up(
        self, wait: Wait, worker: Worker, timeout: float, check: Callable[[], None]
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
            self._wake(wait, worker)
            raise WaitTimeoutError(text) from None

    def _leave(self, wait: Wait, worker: Worker, text: str) -> None:
        with self.board.lock:
            self.board.fail(wait, CollectiveAborted, text)
        self._wake(wait, worker)

    def _wake(self, wait: Wait, worker: Worker) -> None:
        """Have the members of a settled wait look again."""
        for rank in wait.members():
            if rank != worker.worker_id:
                worker.peers[rank].wake()

    def _next_message(self, call: Call, out: Tensor, peer: int) -> Message:
        worker, board = call.worker, self.board
        pair = (peer, worker.worker_id)
        while True:
            with board.lock:
                board.refresh(worker)
                message = board.mailbox.take(pair, worker.executed, worker.peers)
                if message is not None:
                    return message
                wait = Reception(board.mailbox, pair, worker.executed, _kind(out), call.site)
                verdict = verdicts.lost(board, wait, worker)
                if verdict is not None:
                    board.fail(wait, verdict.error, verdict.text)
                else:
                    board.waiting[worker.worker_id] = wait
            if wait.error is None:
                self._await(wait, worker, call.timeout)
            if wait.error is not None:
                raise wait.error[0](wait.error[1])


def _reduce(reduction: str) -> Work:
    def work(posts: Sequence[Post]) -> None:
        outs = [post.out for post in posts if post.out is not None]
        if not reduce_in_blocks([Job(outs, _sources(posts))], reduction):
            total = combine(_sources(posts), reduction)
            moves.move_all([(out, total) for out in outs])

    return work


def _gather(posts: Sequence[Post]) -> None:
    sources = _sources(posts)
    pairs = []
    for post in posts:
        if post.out is not None:
            whole = post.out
            pieces = list(whole) if sources[0].dim() == 0 else moves.rows(whole, len(posts))
            pairs += list(zip(pieces, sources, strict=True))
    moves.move_all(pairs)


def _signature(
    call: Call, tensor: Tensor, reduction: str | None = None, root: int | None = None
) -> Signature:
    shape, device = tuple(tensor.shape), tensor.device.type
    return Signature(call.name, reduction, root, tensor.dtype, shape, device)


def _sources(posts: Sequence[Post]) -> list[Tensor]:
    return [post.src for post in posts if post.src is not None]


def _out(post: Post) -> Tensor:
    assert post.out is not None
    return post.out


def _kind(tensor: Tensor) -> str:
    return kind(tensor.dtype, tensor.shape)
