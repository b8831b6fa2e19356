"""Lanes: the connections of a library between some workers, as the hub counts them.

Each member of a lane has its own end of it, a process group of the library, which it makes when it
is first told to use the lane, under the lane's number. A lane is given up, and its members close
their ends, once something went wrong on it, a member leaves, the groups that used it are forgotten,
or it is the longest unused of more than `MOST`. The next one of the same workers has a new number,
so that an end that is left of an old lane is never taken for one of the new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from . import letters

MOST = 32

Ranks = tuple[int, ...]


class Lane:
    """`uses` counts what goes over it now."""

    __slots__ = ("number", "ranks", "tags", "uses")

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number
        self.tags: set[str] = set()
        self.uses = 0


class Lanes:
    """The lanes of one session.

    Parameters
    ----------
    tell
        Says something to a worker.
    forget
        Forgets the keys that begin so, with which the ends of a lane have found each other.
    """

    def __init__(
        self, tell: Callable[[int, tuple[object, ...]], None], forget: Callable[[str], None]
    ) -> None:
        self._tell, self._forget = tell, forget
        self._numbers = itertools.count(1)
        self._kept: dict[Ranks, Lane] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ranks: Ranks, tag: str = "") -> Lane:
        """The lane between these workers, for one use that ends with `give_back`."""
        lane = self._kept.pop(ranks, None)
        if lane is None:
            self._make_room()
            lane = Lane(ranks, next(self._numbers))
        self._kept[ranks] = lane
        lane.tags.add(tag)
        lane.uses += 1
        return lane

    def give_back(self, lane: Lane) -> None:
        """One use is over, and all members have done their part of it."""
        lane.uses -= 1

    def drop(self, lane: Lane) -> None:
        """Something went wrong on it: nobody knows what is still on its way there."""
        if self._kept.get(lane.ranks) is lane:
            del self._kept[lane.ranks]
            self._forget(f"{lane.number}/")
            for rank in lane.ranks:
                self._tell(rank, (letters.CLOSE, 0, lane.ranks, lane.number))

    def forget(self, ranks: Ranks, tag: str) -> None:
        """A group will not be used again."""
        lane = self._kept.get(ranks)
        if lane is not None:
            lane.tags.discard(tag)
            if not lane.tags:
                self.drop(lane)

    def leave(self, rank: int) -> None:
        """A worker uses no lane any more."""
        self._drop_all(lane for lane in self._kept.values() if rank in lane.ranks)

    def _drop_all(self, lanes: Iterable[Lane]) -> None:
        for lane in list(lanes):
            self.drop(lane)

    def _make_room(self) -> None:
        while len(self._kept) >= MOST:
            idle = next((lane for lane in self._kept.values() if lane.uses == 0), None)
            if idle is None:
                return
            self.drop(idle)
