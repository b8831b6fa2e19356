"""Which events of several workers are one collective, and which waited for which. Pure state.

Members of a collective have in common the ordinal of their command, their group and its tag, and
the number within these. Messages have no number; each is a round of its own in nobody's list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .events import COLLECTIVE, FAILED, STOPPED, Event

Key = tuple[int, tuple[int, ...], str, int]


class Round(NamedTuple):
    """One collective over its members.

    Attributes
    ----------
    name, detail, site, size
        Of the member of the lowest rank that is known; `size` in bytes.
    begins, ends
        When each member called it and was done; an end is 0 while it is not over.
    waits
        Nanoseconds from each member's call to the last one's; empty unless all have called. A
        member that went on before it was over has not waited.
    slowest
        Who called last; None unless all have called, or if there is one member only.
    failed
        Whether it has failed, or was stopped, on any member.
    asynchronous
        Whether a member went on before it was over.
    apart
        The members that did.
    """

    name: str
    detail: str
    site: str
    ordinal: int
    number: int
    group: tuple[int, ...]
    size: int
    begins: dict[int, int]
    ends: dict[int, int]
    waits: dict[int, int]
    slowest: int | None
    failed: bool
    asynchronous: bool
    apart: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether all members have called."""
        return len(self.begins) == len(self.group)

    @property
    def waited(self) -> int:
        """The waiting of all members together, if all have called."""
        return sum(self.waits.values())

    @property
    def goes_on(self) -> bool:
        """Whether a member is in it still."""
        return not all(self.ends.values())

    def waits_until(self, now: int) -> dict[int, int]:
        """How long each member has waited, also while others are awaited, or if they never came."""
        if self.complete:
            return self.waits
        return {
            rank: 0 if rank in self.apart else max(0, (self.ends[rank] or now) - begin)
            for rank, begin in self.begins.items()
        }


class Matcher:
    """Takes in collectives, one by one in any order, and says when all members have called.

    Parameters
    ----------
    most
        Rounds that are kept; the oldest go first.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._of: dict[Key, dict[int, Event]] = {}

    def add(self, rank: int, event: Event) -> dict[int, Event] | None:
        """Take in an event, or its later state; the members if all have called, else None."""
        if event.kind != COLLECTIVE or event.number < 0:
            return None
        key = event.ordinal, event.group, event.tag, event.number
        members = self._of.get(key)
        if members is None:
            while len(self._of) >= self._most:
                del self._of[next(iter(self._of))]
            members = self._of[key] = {}
        members[rank] = event
        return members if len(members) == len(event.group) else None

    def rounds(self) -> tuple[Round, ...]:
        """All that is known, by the time of the first call."""
        return tuple(sorted(map(_round, self._of.values()), key=lambda r: min(r.begins.values())))

    def validate(self) -> None:
        """Check what must always hold; for tests.

        Raises
        ------
        AssertionError
        """
        assert len(self._of) <= self._most
        for (ordinal, group, tag, number), members in self._of.items():
            assert 0 < len(members) <= len(group)
            assert set(members) <= set(group)
            for event in members.values():
                assert (event.ordinal, event.group, event.tag, event.number) == (
                    ordinal, group, tag, number,
                )  # fmt: skip


def waits_of(members: dict[int, Event]) -> dict[int, int]:
    """How long each member of a whole collective has waited for the last one, in ns."""
    last = max(event.begin for event in members.values())
    return {rank: _waited(event, last) for rank, event in sorted(members.items())}


def _waited(event: Event, last: int) -> int:
    if event.asynchronous:
        return 0
    left = event.until(last) if event.state in (FAILED, STOPPED) else last  # before it came
    return max(0, min(last, left) - event.begin)


def match(events: Iterable[tuple[int, Event]]) -> tuple[Round, ...]:
    """The rounds in events of several workers, each with its rank."""
    matcher = Matcher(most=1 << 62)
    for rank, event in events:
        matcher.add(rank, event)
    return matcher.rounds()


def _round(members: dict[int, Event]) -> Round:
    ranks = sorted(members)
    first = members[ranks[0]]
    whole = len(members) == len(first.group)
    waits = waits_of(members) if whole else {}
    slowest = max(ranks, key=lambda rank: (members[rank].begin, -rank)) if len(waits) > 1 else None
    return Round(
        first.name, first.detail, first.site, first.ordinal, first.number, first.group, first.size,
        {rank: members[rank].begin for rank in ranks},
        {rank: members[rank].end for rank in ranks},
        waits, slowest, any(event.state in (FAILED, STOPPED) for event in members.values()),
        any(event.asynchronous for event in members.values()),
        frozenset(rank for rank in ranks if members[rank].asynchronous),
    )  # fmt: skip
