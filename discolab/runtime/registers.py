"""Register ids: pure state, no thread and no channel.

A session owns a `RegisterFile` and touches it only under its lock, except `dropped`: a deque to
which the death of a DRef, on any thread and in the garbage collector, appends its handle. A weak
reference does that in C: no code of Python runs that Ctrl-C or an interrupt could cut short, and no
exception of theirs is lost in a finalizer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any


class Handle(weakref.ref[Any]):
    """Stands for a DRef in a `RegisterFile`; when the DRef dies, its `dropped` receives this.

    Attributes
    ----------
    reg_id
        The register that the DRef held.
    """

    __slots__ = ("reg_id",)

    reg_id: int


class _GivenBack:
    """In the place of the handle of a DRef that was never finished."""

    __slots__ = ("reg_id",)

    def __init__(self, reg_id: int) -> None:
        self.reg_id = reg_id


class RegisterFile:
    """Gives out register ids from 1; the id freed last is given out first.

    An id goes round: `take` -> `hold` (a DRef lives) -> `dropped` -> `collect` or `take` -> ….

    Attributes
    ----------
    dropped
        Handles of DRefs that are gone.
    drop
        Appends to it.
    """

    def __init__(self) -> None:
        self.dropped: deque[Handle | _GivenBack] = deque()
        self.drop: Callable[[Any], None] = self.dropped.append
        self._held: dict[int, Handle | _GivenBack] = {}
        self._free: list[int] = []
        self._next = 1

    def take(self) -> int:
        """An unused id. A dropped one is reused at once: the new value replaces the old."""
        while self.dropped:
            reg_id = self._released(self.dropped.pop())
            if reg_id:
                return reg_id
        if self._free:
            return self._free.pop()
        reg_id = self._next
        self._next = reg_id + 1
        return reg_id

    def hold(self, reg_id: int, ref: object) -> None:
        """Tie a register to the life of the DRef that has taken it."""
        handle = Handle(ref, self.drop)
        handle.reg_id = reg_id
        self._held[reg_id] = handle

    def give_back(self, reg_id: int) -> None:
        """Take back an id whose DRef was torn in the making, and whose death means nothing now."""
        handle = self._held.get(reg_id)
        if isinstance(handle, Handle) and handle() is None:
            return  # it is dead already, and its handle has come
        given_back = self._held[reg_id] = _GivenBack(reg_id)
        self.dropped.append(given_back)

    def collect(self) -> tuple[int, ...]:
        """Take back all dropped ids; the caller must have the workers forget them first."""
        count = len(self.dropped)
        ids = tuple(filter(None, [self._released(self.dropped.popleft()) for _ in range(count)]))
        self._free.extend(ids)
        return ids

    def _released(self, handle: Handle | _GivenBack) -> int:
        """The id that a handle sets free, 0 if another one has it meanwhile."""
        reg_id = handle.reg_id
        if self._held.get(reg_id) is not handle:
            return 0
        del self._held[reg_id]
        return reg_id

    def _idle(self) -> list[int]:
        dropped = [h.reg_id for h in tuple(self.dropped) if self._held.get(h.reg_id) is h]
        return [*self._free, *dropped]

    @property
    def live(self) -> int:
        """How many ids are in use."""
        return self._next - 1 - len(self._idle())

    def validate(self) -> None:
        """Assert that no id is free twice, and none that was never given out."""
        idle = self._idle()
        assert len(idle) == len(set(idle)), f"an id is free twice: {sorted(idle)}"
        assert all(0 < i < self._next for i in idle), f"never given out: {sorted(idle)}"
