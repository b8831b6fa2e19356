"""Register ids: pure state, no thread and no channel.

Owned by a session and touched only under its lock, except `dropped`: a deque to which any
thread, the garbage collector included, may append an id that no DRef holds any more.
"""

from __future__ import annotations

from collections import deque


class RegisterFile:
    """Gives out register ids from 1; the id freed last is given out first.

    An id goes round: `take` -> (a DRef lives) -> `dropped` -> `collect` or `take` -> ….
    """

    def __init__(self) -> None:
        self.dropped: deque[int] = deque()
        self._free: list[int] = []
        self._next = 1

    def take(self) -> int:
        """An unused id. A dropped one is reused at once: the new value replaces the old."""
        if self.dropped:
            return self.dropped.pop()
        if self._free:
            return self._free.pop()
        reg_id = self._next
        self._next = reg_id + 1
        return reg_id

    def give_back(self, reg_id: int) -> None:
        """Take back an id whose DRef was torn in the making, and maybe has dropped it itself."""
        if reg_id not in self.dropped:
            self.dropped.append(reg_id)

    def collect(self) -> tuple[int, ...]:
        """Take back all dropped ids; the caller must have the workers forget them first."""
        count = len(self.dropped)
        ids = tuple(self.dropped.popleft() for _ in range(count))
        self._free.extend(ids)
        return ids

    @property
    def live(self) -> int:
        """How many ids are held by DRefs."""
        return self._next - 1 - len(self._free) - len(self.dropped)

    def validate(self) -> None:
        """Assert that no id is free twice, and none that was never given out."""
        idle = [*self._free, *self.dropped]
        assert len(idle) == len(set(idle)), f"an id is free twice: {sorted(idle)}"
        assert all(0 < i < self._next for i in idle), f"never given out: {sorted(idle)}"
