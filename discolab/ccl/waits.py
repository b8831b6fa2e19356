"""What workers wait for on the board: meetings and receptions, and what they are made of.

Plain entries without a lock: the `Board` that holds them guards them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from ..runtime.errors import CollectiveError
from ..runtime.failures import name_ranks
from .backend import Site
from .groups import Group
from .mailbox import Mailbox, Pair

PENDING, RUNNING, DONE, FAILED = "pending", "running", "done", "failed"
Key = tuple[tuple[int, ...], int, int]


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

    __slots__ = ("mailbox", "pair", "site", "what")

    def __init__(
        self, mailbox: Mailbox, pair: Pair, ordinal: int, what: str, site: Site | None
    ) -> None:
        super().__init__(ordinal)
        self.mailbox, self.pair, self.what, self.site = mailbox, pair, what, site

    def settled(self) -> bool:
        """Whether a message is there or none can come; needs no lock."""
        return self.error is not None or self.pair in self.mailbox

    def missing(self) -> Collection[int]:
        """The sender, while it has sent nothing."""
        return () if self.pair in self.mailbox else (self.pair[0],)

    def members(self) -> Collection[int]:
        """The receiver."""
        return (self.pair[1],)

    def __str__(self) -> str:
        return f"recv of {self.what} from worker {self.pair[0]}"


def kind(dtype: torch.dtype, shape: Collection[int] | None) -> str:
    """``float32[4, 4]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape or ())}"
