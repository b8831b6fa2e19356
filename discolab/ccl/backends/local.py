"""The backend for workers of one address space: a collective reads its members' own tensors.

Members meet on a board (meetings.py); the last one does the operation for all, in the order of
the ranks, from every member's source into every member's output. Nothing is staged. A large
one is shared with members that wait. On CUDA it is launched on the last one's streams, which
wait for the others' by events; peer copies between GPUs are torch's.

Messages are copied at `send`, which therefore never waits, whatever their size.

The `LocalBackend` of a session is in `Worker.shared`; its board's lock guards its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..call import Call
from ..meeting.meetings import Meetings
from ..meeting.messages import Postman
from ..meeting.tickets import Tickets
from ..meeting.waits import Meeting, Post
from ..work import Finished, Work
from .jobs import Job, perform

Plan = Callable[[Sequence[Post]], list[Job]]


class LocalBackend(Backend):
    """Collectives through shared memory; CPU, or any CUDA devices of the process."""

    name = "local"

    def __init__(self, meetings: Meetings) -> None:
        self.meetings = meetings
        self._postman = Postman(meetings)

    # -- the operations ----------------------------------------------------------------------

    def all_reduce(self, call: Call, srcs: Tensors, outs: Tensors, reduction: str) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _like_by_like, reduction)

    def reduce(self, call: Call, srcs: Tensors, outs: Tensors, reduction: str, root: int) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _like_by_like, reduction)

    def all_gather(self, call: Call, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _to_all)

    def gather(self, call: Call, srcs: Tensors, outs: Tensors, root: int) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _to_all)

    def reduce_scatter(self, call: Call, srcs: Tensors, outs: Tensors, reduction: str) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _part_by_part, reduction)

    def broadcast(self, call: Call, srcs: Tensors, outs: Tensors, root: int) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _like_by_like)

    def scatter(self, call: Call, srcs: Tensors, outs: Tensors, root: int) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _part_by_part)

    def all_to_all(self, call: Call, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        return self._start(call, srcs, outs, _crosswise)

    def barrier(self, call: Call) -> Work:
        """See `Backend`."""
        return self.meetings.start(call, (), (), _nothing)

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        self._postman.send(call, src, peer, tag)
        return Finished()

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        """See `Backend`."""
        return self._postman.recv(call, out, peer, tag)

    def statistics(self) -> BackendStatistics:
        """See `Backend`."""
        return self.meetings.statistics(self.name)

    def _start(
        self, call: Call, srcs: Tensors, outs: Tensors, plan: Plan, reduction: str | None = None
    ) -> Work:
        def execute(_meeting: Meeting, posts: Sequence[Post]) -> Tickets | None:
            return perform(plan(posts), reduction)

        return self.meetings.start(call, srcs, outs, execute)


# -- what goes where: sources and outputs of the members' posts as jobs -------------------------


def _like_by_like(posts: Sequence[Post]) -> list[Job]:
    """The k-th sources of all into the k-th outputs of all."""
    count = max(len(post.srcs) for post in posts)
    return [
        Job([p.outs[k] for p in posts if p.outs], [p.srcs[k] for p in posts if p.srcs])
        for k in range(count)
    ]


def _to_all(posts: Sequence[Post]) -> list[Job]:
    """The k-th source of the i-th member into the (k * n + i)-th outputs of all."""
    n = len(posts)
    return [
        Job([p.outs[k * n + i] for p in posts if p.outs], [src])
        for i, post in enumerate(posts)
        for k, src in enumerate(post.srcs)
    ]


def _part_by_part(posts: Sequence[Post]) -> list[Job]:
    """The (k * n + i)-th sources of all into the k-th output of the i-th member."""
    n = len(posts)
    return [
        Job([out], [p.srcs[k * n + i] for p in posts if p.srcs])
        for i, post in enumerate(posts)
        for k, out in enumerate(post.outs)
    ]


def _crosswise(posts: Sequence[Post]) -> list[Job]:
    """The j-th source of the i-th member into the i-th output of the j-th."""
    return [
        Job([receiver.outs[i]], [sender.srcs[j]])
        for i, sender in enumerate(posts)
        for j, receiver in enumerate(posts)
    ]


def _nothing(_meeting: Meeting, _posts: Sequence[Post]) -> None:
    """A barrier is over once all are there."""
