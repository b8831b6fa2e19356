"""The board: where workers of one address space meet for a collective, as pure state.

There is one `Board` a session, shared by its workers. `lock` guards all of it; the methods are
called under it unless they say otherwise. Nothing waits, and no tensor is read or written,
under the lock. Only a worker's own thread enters or removes that worker.

A collective is known by its group, the ordinal of the command (`Worker.executed`, the same
number on all workers) and its number among the collectives of this group in this command.
An interrupt can tear a worker out between any two statements. So every entry carries its
ordinal, and `refresh` drops what is from before the last interrupt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ...runtime.errors import CollectiveAborted, CollectiveError
from ..call import DONE, FAILED, Call
from .mailbox import Mailbox
from .peers import Peer
from .waits import RUNNING, Key, Meeting, Post, Wait

_Counts = dict[tuple[tuple[int, ...], str], int]


class Board:
    """Meetings that are open or have failed, messages, and who waits for what.

    Attributes
    ----------
    cut
        The call in which the last interrupt ended: what is from before it is void.
    on_fail
        Called with each wait that fails, under the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[Key, Meeting] = {}
        self.failed: dict[Key, Meeting] = {}
        self.mailbox = Mailbox()
        self.waiting: dict[int, Wait] = {}
        self.cut = 0
        self.on_fail: Callable[[Wait], None] | None = None
        self._counts: dict[int, tuple[int, _Counts]] = {}

    # -- meetings --------------------------------------------------------------------------

    def join(self, post: Post) -> Meeting:
        """Enter a post; the meeting is RUNNING if it was the last, or may have failed already."""
        call = post.call
        worker: Peer = call.worker
        group = call.group
        self.refresh(worker)
        if self.failed:
            self.sweep(worker.peers)
        if call.number < 0:  # or it was counted where it was made
            call.number = self._next_number(call)
        key = (group.ranks, group.tag, call.ordinal, call.number)
        meeting = self.failed.get(key) or self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Meeting(group, call.ordinal, call.number)
        rank = worker.worker_id
        if meeting.state is FAILED:
            call.close(FAILED)
            meeting.posts[rank] = Post(call)
            self.sweep(worker.peers)
            return meeting
        if meeting.posts and not call.signature.agrees(meeting.first.signature):
            meeting.disagree = True
        meeting.posts[rank] = post
        if len(meeting.posts) == len(group.ranks):
            meeting.state = RUNNING
            meeting.executor = rank
            del self.open[key]
        elif not call.asynchronous:
            self.waiting[rank] = meeting
        return meeting

    def finish(self, meeting: Meeting) -> None:
        """Say that all is done."""
        if meeting.state is RUNNING:
            meeting.state = DONE
            for post in meeting.posts.values():
                post.call.close(DONE)

    def fail(self, wait: Wait, error: type[CollectiveError], text: str) -> None:
        """End a wait for all its members, those that come later too; the first reason stays."""
        if wait.error is not None or (isinstance(wait, Meeting) and wait.state is DONE):
            return
        wait.error = (error, text)
        for rank in wait.members():
            call = wait.call_of(rank)
            if call is not None:
                call.close(FAILED)
        if isinstance(wait, Meeting):
            wait.state = FAILED
            self.open.pop(wait.key, None)
            if wait.missing():
                self.failed[wait.key] = wait
            for rank, post in wait.posts.items():
                wait.posts[rank] = Post(post.call)
        if self.on_fail is not None:
            self.on_fail(wait)

    def rest(self, rank: int, wait: Wait) -> None:
        """Say that a worker no longer waits."""
        if self.waiting.get(rank) is wait:
            del self.waiting[rank]

    # -- order -----------------------------------------------------------------------------

    def refresh(self, worker: Peer) -> None:
        """Drop what is from before the last interrupt, which ended it on all workers."""
        cut = worker.resumed_at
        if cut <= self.cut:
            return
        self.cut = cut
        for meeting in [meeting for meeting in self.open.values() if meeting.ordinal < cut]:
            self.fail(meeting, CollectiveAborted, f"{meeting} was ended by an interrupt")
        for key in [key for key in self.failed if key[2] < cut]:
            del self.failed[key]
        for rank in [rank for rank, wait in self.waiting.items() if wait.ordinal < cut]:
            del self.waiting[rank]
        self.mailbox.cut(cut)

    def sweep(self, peers: Mapping[int, Peer]) -> None:
        """Forget failed meetings to which nobody can come any more, and void messages."""
        self.mailbox.purge(peers)
        for key, meeting in list(self.failed.items()):
            if not any(_may_come(peers.get(rank), meeting) for rank in meeting.missing()):
                del self.failed[key]

    def _next_number(self, call: Call) -> int:
        """How many collectives of this group the worker has called before in this command."""
        rank, group = call.worker.worker_id, (call.group.ranks, call.group.tag)
        ordinal, counts = self._counts.get(rank, (-1, {}))
        if ordinal != call.ordinal:
            counts = {}
            self._counts[rank] = (call.ordinal, counts)
        number = counts.get(group, 0)
        counts[group] = number + 1
        return number


def _may_come(peer: Peer | None, meeting: Meeting) -> bool:
    return peer is not None and not peer.ended and peer.executed <= meeting.ordinal
