"""What workers wait for on the board: meetings and receptions, and what they are made of.

Plain entries without a lock: the `Board` that holds them guards them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch

from ...runtime.errors import CollectiveError
from ...runtime.failures import name_ranks
from ..call import DONE, FAILED, WAITING, Call
from ..groups import Group
from .mailbox import Mailbox, Pair
from .tickets import Tickets

RUNNING = "running"
Key = tuple[tuple[int, ...], str, int, int]


class Post:
    """One worker's part in a meeting; without its tensors once that has failed."""

    __slots__ = ("call", "events", "outs", "srcs")

    def __init__(
        self,
        call: Call,
        srcs: Sequence[torch.Tensor] = (),
        outs: Sequence[torch.Tensor] = (),
        events: Sequence[torch.cuda.Event] = (),
    ) -> None:
        self.call, self.srcs, self.outs, self.events = call, srcs, outs, events


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
        """The workers each of which must do something before it can be over."""
        raise NotImplementedError

    def members(self) -> Collection[int]:
        """The workers that wait."""
        raise NotImplementedError

    def call_of(self, rank: int) -> Call | None:
        """The call with which a worker takes part; None if it does not."""
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
    """One collective. ``str()`` reads ``all_reduce #1 of float32[4] in workers 0-3``.

    `tickets` are there while the members that wait may help; `abroad` is set once the last one has
    given it to a library, which then goes on by itself.
    """

    __slots__ = (
        "abroad", "disagree", "done", "executor", "group", "number", "posts", "state", "tickets",
    )  # fmt: skip

    def __init__(self, group: Group, ordinal: int, number: int) -> None:
        super().__init__(ordinal)
        self.group = group
        self.number = number
        self.posts: dict[int, Post] = {}
        self.state = WAITING
        self.executor = -1
        self.disagree = False
        self.done: Sequence[torch.cuda.Event] = ()
        self.tickets: Tickets | None = None
        self.abroad = False

    @property
    def key(self) -> Key:
        """Under which the board holds it."""
        return self.group.ranks, self.group.tag, self.ordinal, self.number

    @property
    def first(self) -> Call:
        """The call of whoever joined first."""
        return next(iter(self.posts.values())).call

    def settled(self) -> bool:
        """Whether it is done or has failed; needs no lock."""
        return self.state is DONE or self.state is FAILED

    def roused(self) -> bool:
        """Whether it is over or a member that waits can help; needs no lock."""
        return (
            self.state is DONE
            or self.state is FAILED
            or (self.tickets is not None and self.tickets.left())
        )

    def missing(self) -> Collection[int]:
        """Members that have not joined."""
        return [rank for rank in self.group.ranks if rank not in self.posts]

    def members(self) -> Collection[int]:
        """Members that have joined."""
        return list(self.posts)

    def call_of(self, rank: int) -> Call | None:
        """The call with which a member has joined."""
        post = self.posts.get(rank)
        return post.call if post is not None else None

    def title(self) -> str:
        """Its name without who is missing."""
        signature = self.first.signature
        return f"{signature.op} #{self.number + 1}{signature.of} in {self.group}"

    def __str__(self) -> str:
        missing = self.missing()
        return self.title() + (f" (missing: {name_ranks(missing)})" if missing else "")


class Reception(Wait):
    """One worker's wait for a message from one of some senders.

    `patient`: the user gave a timeout, so a sender that is idle may be sent to work later.
    """

    __slots__ = ("call", "mailbox", "pairs", "patient")

    def __init__(
        self, mailbox: Mailbox, pairs: Sequence[Pair], call: Call, patient: bool = False
    ) -> None:
        super().__init__(call.ordinal)
        self.mailbox, self.pairs, self.call, self.patient = mailbox, pairs, call, patient

    @property
    def senders(self) -> list[int]:
        """Of whom one must send."""
        return [pair[0] for pair in self.pairs]

    def settled(self) -> bool:
        """Whether a message is there or none can come; needs no lock."""
        return self.error is not None or any(pair in self.mailbox for pair in self.pairs)

    def missing(self) -> Collection[int]:
        """The sender, while it has sent nothing; of several senders none is needed."""
        return () if len(self.pairs) > 1 or self.settled() else (self.pairs[0][0],)

    def members(self) -> Collection[int]:
        """The receiver."""
        return (self.call.rank,)

    def call_of(self, rank: int) -> Call | None:
        """The call of the receiver."""
        return self.call if rank == self.call.rank else None

    def __str__(self) -> str:
        what = self.call.signature.of.removeprefix(" of ")
        whom = f"worker {self.senders[0]}" if len(self.pairs) == 1 else "any worker"
        tag = self.pairs[0][2]
        return f"recv of {what} from {whom}" + (f" with tag {tag}" if tag else "")
