"""Register ids, and the book of the DRefs that hold them: pure state, no thread and no channel.

A session owns a `RegisterFile` and touches it only under its lock, except `dropped`: a deque to
which the death of a DRef, on any thread and in the garbage collector, appends its handle. A weak
reference does that in C: no code of Python runs that Ctrl-C or an interrupt could cut short, and no
exception of theirs is lost in a finalizer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from .interpreter_lock import copied

if TYPE_CHECKING:
    from .dref import DRef


class Handle(weakref.ref[Any]):
    """Stands for a DRef in a `RegisterFile`; when the DRef dies, its `dropped` receives this.

    Attributes
    ----------
    reg_id
        The register that the DRef held.
    """

    __slots__ = ("reg_id",)

    reg_id: int


class RegisterFile:
    """Gives out register ids from 1, those that are free first.

    An id goes round: `take` -> `hold` (a DRef lives) -> `dropped` -> `take`, or `collect` and
    `take`. It changes hands in `hold`, by one store: whatever is in `dropped` or in `_free` counts
    only while `_held` names the same handle. So an exception between any two lines loses no id.

    Attributes
    ----------
    dropped
        Handles of DRefs that are gone.
    drop
        Appends to it.
    """

    def __init__(self) -> None:
        self.dropped: deque[Handle] = deque()
        self.drop: Callable[[Any], None] = self.dropped.append
        self._held: dict[int, Handle | None] = {}  # the last handle of each id; None: kept for ever
        self._free: list[Handle] = []
        self._next = 1

    def take(self) -> int:
        """An id that nothing holds: the caller's, once it calls `hold` or `keep`.

        A dropped one comes first, as the new value replaces the old on the workers.
        """
        held, dropped = self._held, self.dropped
        while dropped:
            handle = dropped[0]
            if held[handle.reg_id] is handle:
                return handle.reg_id
            dropped.popleft()
        free = self._free
        while free:
            handle = free[-1]
            if held[handle.reg_id] is handle:
                return handle.reg_id
            free.pop()
        while self._next in held:
            self._next += 1
        return self._next

    def hold(self, reg_id: int, ref: object) -> None:
        """Tie a register to the life of the DRef that has taken it."""
        handle = Handle(ref, self.drop)
        handle.reg_id = reg_id
        self._held[reg_id] = handle
        dropped = self.dropped
        if dropped and dropped[0].reg_id == reg_id:
            dropped.popleft()

    def keep(self, reg_id: int) -> None:
        """Never give a register out again."""
        self._held[reg_id] = None

    def collect(self, forget: Callable[[tuple[int, ...]], None]) -> None:
        """Take back all dropped ids, after `forget` has had the workers forget what is in them.

        If an exception comes in between, the next call does it once more.
        """
        handles = copied(self.dropped)
        ids = tuple([h.reg_id for h in handles if self._held[h.reg_id] is h])
        if ids:
            forget(ids)
        for handle in handles:
            self._free.append(handle)
            self.dropped.popleft()

    def _idle(self) -> dict[int, Handle]:
        waiting = (*self._free, *copied(self.dropped))
        return {h.reg_id: h for h in waiting if self._held[h.reg_id] is h}

    def in_use(self) -> list[tuple[int, Handle | None]]:
        """The ids that are in use, each with its handle; None: kept for ever."""
        idle = self._idle()
        return [(reg, handle) for reg, handle in self._held.items() if reg not in idle]

    @property
    def live(self) -> int:
        """How many ids are in use."""
        return len(self._held) - len(self._idle())

    def validate(self) -> None:
        """Assert that exactly those ids are idle whose DRef is gone."""
        idle = self._idle()
        dead = {n for n, h in self._held.copy().items() if h is not None and h() is None}
        assert idle.keys() == dead, f"idle: {sorted(idle)}, DRef gone: {sorted(dead)}"
        assert all(0 < reg_id <= self._next for reg_id in self._held)


# -- the book of DRefs -------------------------------------------------------------------------

OWN = "(discolab's own)"
"""The name of a DRef that discolab makes for its own ends: views leave it out."""


Site: TypeAlias = tuple[Any, int] | None
Entry: TypeAlias = "tuple[weakref.ref[DRef], Site, float, int, int]"
"""What is known of one DRef: ``(ref, site, made, cell, calls)``; a plain tuple is made fastest.

`ref` gives the DRef while it lives; `site` is where the user's code called discolab, a code object
and a line; `made` is when, on the clock of `time.monotonic`; `cell` the number of the notebook's
cell that ran then, 0 outside of cells. On a worker that has executed `calls` calls the value is
there.
"""


class DRefBook(dict[int, Entry]):
    """Register id -> its last `Entry`: which DRefs are alive, since when, and where they were made.

    Kept by a session that was asked to (`Session.track_registers`); written under its lock, where a
    DRef is made, and only looked up elsewhere. Nothing is taken out when a DRef dies: its weak
    reference shows it, and the id's next entry replaces the old one. So there are never more
    entries than ids.

    Attributes
    ----------
    cell
        The number of the cell that runs now; a notebook sets it.
    values_set
        How many times `DRef.debug_copy_from` was asked to set a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = 0
        self.values_set = 0

    def enter(self, ref: DRef, site: Site, calls: int) -> None:
        """Note a DRef; `Session.call_packed` does the same, written out for speed."""
        self[ref.reg_id] = weakref.ref(ref), site, monotonic(), self.cell, calls

    def alive(self) -> Iterator[tuple[int, DRef, Entry]]:
        """All DRefs that live now; any thread may ask."""
        for reg_id in list(self):  # ids alone: ten thousand tuples would wake the collector
            entry = self.get(reg_id)
            ref = entry[0]() if entry is not None else None
            if entry is not None and ref is not None:
                yield reg_id, ref, entry
