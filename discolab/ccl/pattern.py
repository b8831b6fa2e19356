"""Which of a member's tensors go to whom in a collective: the one place that knows. No state.

A collective is a `Pattern`. All members know all of it. So each can tell alone what it gives to
another one and what it takes from it, in the same order; and one that sees the tensors of all of
them can list what is to be done (`jobs`). Members are counted by their places in the group here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from .groups import Group

Tensors = Sequence[torch.Tensor]

LIKE_BY_LIKE, TO_ALL, PART_BY_PART, CROSSWISE = range(4)


class Job(NamedTuple):
    """Reduce `sources`, in their order, into each of `outs`; a single source is copied."""

    outs: list[torch.Tensor]
    sources: list[torch.Tensor]


class Part(Protocol):
    """The tensors of one member."""

    srcs: Tensors
    outs: Tensors


@dataclass(slots=True, eq=False)
class Pattern:
    """One collective among `members`; `count` tensors belong together (Backend's k). Never changed.

    Attributes
    ----------
    kind
        LIKE_BY_LIKE: the k-th sources of all into the k-th outputs of all.
        TO_ALL: the k-th source of the i-th member into the (k * n + i)-th outputs of all.
        PART_BY_PART: the (k * n + i)-th sources of all into the k-th output of the i-th member.
        CROSSWISE: the j-th source of the i-th member into the i-th output of the j-th.
    giver, taker
        The only member that gives, or takes; None: all do.
    reduction
        How what comes from several members is reduced; None: there is only one.
    givers, takers
        The members that give something, and those that take something.
    same_for_all
        Whether a member gives the same to all.
    gives
        By taker: which of its sources a giver gives to that one.
    takes
        By giver: for which of its outputs a taker gets those from that one.
    """

    kind: int
    members: int
    count: int
    giver: int | None = None
    taker: int | None = None
    reduction: str | None = None

    givers: Sequence[int] = field(init=False)
    takers: Sequence[int] = field(init=False)
    same_for_all: bool = field(init=False)
    gives: Sequence[range] = field(init=False)
    takes: Sequence[range] = field(init=False)

    def __post_init__(self) -> None:
        n, kind = self.members, self.kind
        self.givers = range(n) if self.giver is None else (self.giver,)
        self.takers = range(n) if self.taker is None else (self.taker,)
        self.same_for_all = kind in (LIKE_BY_LIKE, TO_ALL)
        like = [range(self.count)] * n
        part = [range(i, self.count * n, n) for i in range(n)]
        own = [range(i, i + 1) for i in range(n)]
        self.gives = own if kind == CROSSWISE else part if kind == PART_BY_PART else like
        self.takes = own if kind == CROSSWISE else part if kind == TO_ALL else like

    def jobs(self, parts: Sequence[Part]) -> list[Job]:
        """All that is to be done, from the tensors of all members.

        Members that give nothing have no sources, those that take nothing no outputs.
        """
        n, ks = self.members, range(self.count)
        if self.kind == LIKE_BY_LIKE:
            givers = [part.srcs for part in parts if part.srcs]
            takers = [part.outs for part in parts if part.outs]
            return [Job([outs[k] for outs in takers], [srcs[k] for srcs in givers]) for k in ks]
        if self.kind == TO_ALL:
            return [
                Job([taker.outs[k * n + i] for taker in parts if taker.outs], [giver.srcs[k]])
                for i, giver in enumerate(parts)
                for k in ks
            ]
        if self.kind == PART_BY_PART:
            return [
                Job([taker.outs[k]], [giver.srcs[k * n + i] for giver in parts if giver.srcs])
                for i, taker in enumerate(parts)
                for k in ks
            ]
        return [
            Job([taker.outs[i]], [giver.srcs[j]])
            for i, giver in enumerate(parts)
            for j, taker in enumerate(parts)
        ]


_KINDS = {
    "all_reduce": LIKE_BY_LIKE,
    "reduce": LIKE_BY_LIKE,
    "broadcast": LIKE_BY_LIKE,
    "all_gather": TO_ALL,
    "gather": TO_ALL,
    "reduce_scatter": PART_BY_PART,
    "scatter": PART_BY_PART,
    "all_to_all": CROSSWISE,
}
_KINDS |= {f"{op}_coalesced": _KINDS[op] for op in ("all_reduce", "all_gather", "reduce_scatter")}
_FROM_ROOT = ("broadcast", "scatter")


def pattern_of(
    op: str,
    group: Group,
    srcs: Tensors,
    outs: Tensors,
    reduction: str | None = None,
    root: int | None = None,
) -> Pattern:
    """The pattern of an operation, from one member's tensors; `root` is a rank."""
    kind = _KINDS[op]
    count = len(outs) if kind == PART_BY_PART else 1 if kind == CROSSWISE else len(srcs or outs)
    giver = taker = None
    if root is not None:
        place = group.index(root)
        giver, taker = (place, None) if op in _FROM_ROOT else (None, place)
    return _pattern(kind, len(group.ranks), count, giver, taker, reduction)


_pattern = lru_cache(maxsize=256)(Pattern)  # as most calls are like one before
