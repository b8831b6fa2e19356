"""Which process groups of a library there are, and which may go. Pure state; its owner guards it.

A `GroupHandle` stands for the process group of some workers, whatever the tags of the groups that
use it: members begin all that they do over process groups in one order, so none can wait for
another. It lasts until a member leaves the backend, something goes wrong on it, all groups that
have used it are forgotten (`torch.distributed.destroy_process_group`), or it is the longest unused
of more than `MOST`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

MOST = 32

Ranks = tuple[int, ...]


class GroupHandle:
    """One process group; `uses` counts what goes over it now."""

    __slots__ = ("number", "ranks", "tags", "uses")

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number
        self.tags: set[str] = set()
        self.uses = 0


class GroupHandles:
    """The process groups of one session. `close` is called for each that is dropped."""

    def __init__(self, close: Callable[[GroupHandle], None]) -> None:
        self._close = close
        self._numbers = itertools.count(1)
        self._kept: dict[Ranks, GroupHandle] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ranks: Ranks, tag: str = "") -> GroupHandle:
        """The process group between these workers, for one use that ends with `give_back`."""
        handle = self._kept.pop(ranks, None)
        if handle is None:
            self._make_room(len(ranks))
            handle = GroupHandle(ranks, next(self._numbers))
        self._kept[ranks] = handle
        handle.tags.add(tag)
        handle.uses += 1
        return handle

    def give_back(self, handle: GroupHandle) -> None:
        """One use is over, and all members have done their part of it."""
        handle.uses -= 1

    def drop(self, handle: GroupHandle) -> None:
        """Something went wrong on it: nobody knows what is still on its way there."""
        if self._kept.get(handle.ranks) is handle:
            del self._kept[handle.ranks]
            self._close(handle)

    def drop_all(self) -> None:
        """As `drop`, with each."""
        for handle in list(self._kept.values()):
            self.drop(handle)

    def forget(self, ranks: Ranks, tag: str) -> None:
        """A group will not be used again."""
        handle = self._kept.get(ranks)
        if handle is not None:
            handle.tags.discard(tag)
            if not handle.tags:
                self.drop(handle)

    def leave(self, rank: int) -> None:
        """A worker uses no process group any more."""
        for handle in list(self._kept.values()):
            if rank in handle.ranks:
                self.drop(handle)

    def drop_oldest(self) -> bool:
        """Drop the longest unused one, if one is not in use."""
        idle = next((handle for handle in self._kept.values() if handle.uses == 0), None)
        if idle is not None:
            self.drop(idle)
        return idle is not None

    def _make_room(self, _members: int) -> None:
        """Drop those longest unused, so that one with so many members can be made."""
        while len(self._kept) >= MOST and self.drop_oldest():
            pass
