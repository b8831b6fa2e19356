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
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from ..runtime.errors import CollectiveError
from ..runtime.failures import name_ranks
from ..runtime.worker import Worker
from .backend import Site
from .groups import Group

PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
Key = tuple[tuple[int, ...], int, int]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Signature:
    """What all members of one collective must agree on."""

    op: str
    reduction: str | None = None
    root: int | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    device: str | None = None

    def __str__(self) -> str:
        reduction = f"({self.reduction})" if self.reduction else ""
        root = f" with root worker {self.root}" if self.root is not None else ""
        on = f" on {self.device}" if self.device not in (None, "cpu") else ""
        return f"{self.op}{reduction}{self.of}{root}{on}"

    @property
    def of(self) -> str:
        """`` of float32[4, 4]``, "" without a tensor."""
        return "" if self.dtype is None else f" of {kind(self.dtype, self.shape)}"


@dataclass(slots=True)
class Post:
    """One worker's part in a meeting."""

    rank: int
    signature: Signature
    site: Site | None
    src: torch.Tensor | None = None
    out: torch.Tensor | None = None
    events: list[torch.cuda.Event] = field(default_factory=list)


class Wait:
    """Something on the board that workers wait for."""

    __slots__ = ("error", "ordinal", "suspected")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.error: tuple[type[CollectiveError], str] | None = None
        self.suspected: float | None = None

    def settled(self) -> bool:
        """Whether the waiting is over; needs no lock."""
        return self.error is not None

    def missing(self) -> Collection[int]:
        """The workers without which it can't be over."""
        raise NotImplementedError

    def members(self) -> Collection[int]:
        """The workers that wait."""
        raise NotImplementedError

    def stable(self, suspicious: bool, seconds: float) -> bool:
        """Whether every look in the last `seconds` found it suspicious."""
        now = time.monotonic()
        if not suspicious:
            self.suspected = None
        elif self.suspected is None:
            self.suspected = now
        return suspicious and self.suspected is not None and now - self.suspected >= seconds


class Meeting(Wait):
    """One collective. ``str()`` reads ``all_reduce #1 of float32[4] in workers 0-3``."""

    __slots__ = ("disagree", "done", "executor", "group", "number", "posts", "state")

    def __init__(self, group: Group, ordinal: int, number: int) -> None:
        super().__init__(ordinal)
        self.group = group
        self.number = number
        self.posts: dict[int, Post] = {}
        self.state = PENDING
        self.executor = -1
        self.disagree = False
        self.done: list[torch.cuda.Event] = []

    @property
    def key(self) -> Key:
        """Under which the board holds it."""
        return self.group.ranks, self.ordinal, self.number

    @property
    def first(self) -> Post:
        """The post of whoever joined first."""
        return next(iter(self.posts.values()))

    def settled(self) -> bool:
        """Whether it is done or has failed; needs no lock."""
        return self.state is DONE or self.state is FAILED

    def missing(self) -> Collection[int]:
        """Members that have not joined."""
        return [rank for rank in self.group.ranks if rank not in self.posts]

    def members(self) -> Collection[int]:
        """Members that have joined."""
        return list(self.posts)

    def title(self) -> str:
        """Its name without who is missing."""
        signature = self.first.signature
        return f"{signature.op} #{self.number + 1}{signature.of} in {self.group}"

    def __str__(self) -> str:
        missing = self.missing()
        return self.title() + (f" (missing: {name_ranks(missing)})" if missing else "")


class Reception(Wait):
    """One worker's wait for a message."""

    __slots__ = ("board", "pair", "site", "what")

    def __init__(self, board: Board, pair: Pair, ordinal: int, what: str, site: Site | None):
        super().__init__(ordinal)
        self.board, self.pair, self.what, self.site = board, pair, what, site

    def settled(self) -> bool:
        """Whether a message is there or none can come; needs no lock."""
        return self.error is not None or self.pair in self.board.messages

    def missing(self) -> Collection[int]:
        """The sender, while it has sent nothing."""
        return () if self.pair in self.board.messages else (self.pair[0],)

    def members(self) -> Collection[int]:
        """The receiver."""
        return (self.pair[1],)

    def __str__(self) -> str:
        return f"recv of {self.what} from worker {self.pair[0]}"


@dataclass(slots=True)
class Message:
    """A tensor on its way: a copy that belongs to nobody else."""

    tensor: torch.Tensor
    ordinal: int
    site: Site | None
    events: list[torch.cuda.Event]


class Board:
    """Meetings that are open or have failed, messages, and who waits for what."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[Key, Meeting] = {}
        self.failed: dict[Key, Meeting] = {}
        self.messages: dict[Pair, deque[Message]] = {}
        self.waiting: dict[int, Wait] = {}
        self._counts: dict[int, tuple[int, dict[tuple[int, ...], int]]] = {}
        self._cut = 0

    # -- meetings --------------------------------------------------------------------------

    def join(self, worker: Worker, group: Group, post: Post) -> Meeting:
        """Enter a post; the meeting is RUNNING if it was the last, or may have failed already."""
        self.refresh(worker)
        if self.failed:
            self.sweep(worker.peers)
        key = (group.ranks, worker.executed, self._next_number(worker, group))
        meeting = self.failed.get(key) or self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Meeting(group, key[1], key[2])
        if meeting.state is FAILED:
            meeting.posts[post.rank] = _without_tensors(post)
            self.sweep(worker.peers)
            return meeting
        meeting.disagree |= post.signature != meeting.first.signature if meeting.posts else False
        meeting.posts[post.rank] = post
        if len(meeting.posts) == len(group.ranks):
            meeting.state = RUNNING
            meeting.executor = post.rank
            del self.open[key]
        else:
            self.waiting[post.rank] = meeting
        return meeting

    def finish(self, meeting: Meeting) -> None:
        """Say that all is done."""
        if meeting.state is RUNNING:
            meeting.state = DONE

    def fail(self, wait: Wait, error: type[CollectiveError], text: str) -> None:
        """End a wait for all its members, those that come later too; the first reason stays."""
        if wait.error is not None or (isinstance(wait, Meeting) and wait.state is DONE):
            return
        wait.error = (error, text)
        if isinstance(wait, Meeting):
            wait.state = FAILED
            self.open.pop(wait.key, None)
            if wait.missing():
                self.failed[wait.key] = wait
            for rank, post in wait.posts.items():
                wait.posts[rank] = _without_tensors(post)

    def rest(self, rank: int, wait: Wait) -> None:
        """Say that a worker no longer waits."""
        if self.waiting.get(rank) is wait:
            del self.waiting[rank]

    # -- messages --------------------------------------------------------------------------

    def put(self, pair: Pair, message: Message) -> None:
        """Append a message from ``pair[0]`` to ``pair[1]``."""
        if message.ordinal >= self._cut:
            self.messages.setdefault(pair, deque()).append(message)

    def take(self, pair: Pair) -> Message | None:
        """The oldest message of a pair, removed."""
        box = self.messages.get(pair)
        if box is None:
            return None
        message = box.popleft()
        if not box:
            del self.messages[pair]
        return message

    # -- order -----------------------------------------------------------------------------

    def refresh(self, worker: Worker) -> None:
        """Drop what is from before the last interrupt, which ended it on all workers."""
        cut = worker.resumed_at
        if cut <= self._cut:
            return
        self._cut = cut
        for table in (self.open, self.failed):
            for key in [key for key in table if key[1] < cut]:
                del table[key]
        for rank in [rank for rank, wait in self.waiting.items() if wait.ordinal < cut]:
            del self.waiting[rank]
        for pair, box in list(self.messages.items()):
            kept = deque(message for message in box if message.ordinal >= cut)
            if kept:
                self.messages[pair] = kept
            else:
                del self.messages[pair]

    def sweep(self, peers: Mapping[int, Worker]) -> None:
        """Forget failed meetings to which nobody can come any more."""
        for key, meeting in list(self.failed.items()):
            if not any(_may_come(peers.get(rank), meeting) for rank in meeting.missing()):
                del self.failed[key]

    def stuck(self) -> dict[int, Wait]:
        """Workers that wait for each other so that none of them can ever go on.

        A worker that waits on nothing here may still do anything; one that waits can go on
        if all that it waits for can. Who is left is in a cycle, or waits for one.
        """
        stuck = {rank: wait for rank, wait in self.waiting.items() if not wait.settled()}
        changed = True
        while changed:
            changed = False
            for rank, wait in list(stuck.items()):
                missing = wait.missing()
                running = isinstance(wait, Meeting) and wait.state is RUNNING
                if running or not any(other in stuck for other in missing):
                    del stuck[rank]
                    changed = True
        return stuck

    def _next_number(self, worker: Worker, group: Group) -> int:
        ordinal, counts = self._counts.get(worker.worker_id, (-1, {}))
        if ordinal != worker.executed:
            counts = {}
            self._counts[worker.worker_id] = (worker.executed, counts)
        number = counts.get(group.ranks, 0)
        counts[group.ranks] = number + 1
        return number


def kind(dtype: torch.dtype, shape: Collection[int] | None) -> str:
    """``float32[4, 4]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape or ())}"


def _may_come(peer: Worker | None, meeting: Meeting) -> bool:
    return peer is not None and not peer.ended and peer.executed <= meeting.ordinal


def _without_tensors(post: Post) -> Post:
    return Post(post.rank, post.signature, post.site)
