"""The book of a session's DRefs: which are alive, since when, and where they were made.

Kept by a session that was asked to (`Session.track_registers`); written under its lock, where a
DRef is made, and only looked up elsewhere. Nothing is taken out when a DRef dies: its weak
reference tells, and the id's next entry takes the place of the old one. So there are never more
entries than ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref as weakref

if TYPE_CHECKING:
    from .dref import DRef

OWN = "(discolab's own)"
"""The name of a DRef that discolab makes for its own ends: views leave it out."""


Site: TypeAlias = tuple[Any, int] | None
Entry: TypeAlias = "tuple[weakref[DRef], Site, float, int, int]"
"""What is known of one DRef: ``(ref, site, made, cell, calls)``; a plain tuple is made fastest.

`ref` gives the DRef while it lives; `site` is where the user's code called discolab, a code object
and a line; `made` is when, on the clock of `time.monotonic`; `cell` the number of the notebook's
cell that ran then, 0 outside of cells. On a worker that has executed `calls` calls the value is
there.
"""


class DRefBook(dict[int, Entry]):
    """Register id -> its last `Entry`.

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
        """Note a DRef; `Caller.call_packed` does the same, written out for speed."""
        self[ref.reg_id] = weakref(ref), site, monotonic(), self.cell, calls

    def alive(self) -> Iterator[tuple[int, DRef, Entry]]:
        """All DRefs that live now; any thread may ask."""
        for reg_id in list(self):  # ids alone: ten thousand tuples would wake the collector
            entry = self.get(reg_id)
            ref = entry[0]() if entry is not None else None
            if entry is not None and ref is not None:
                yield reg_id, ref, entry
