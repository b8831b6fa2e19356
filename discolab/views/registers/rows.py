"""Rows of the table of live registers: what one is, how they are sorted, filtered and grouped.

Pure: `RegisterTable` (register_table.py) finds them and keeps them up to date.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.dref import DRef
from ...runtime.registers import Entry
from ..formats import format_bytes
from .facts import Fact

SORTS = ("bytes", "age", "id", "name", "type", "site")
READING = "reading…"
_GROWING = 3  # cells that made registers by one line, all of which live


@dataclass(slots=True, eq=False)
class Row:
    """One live register.

    Attributes
    ----------
    reg_id
        The register, the same on all workers.
    name
        The DRef's own, or the first place where the notebook holds it; "" if it has none.
    kind
        ``DRef``, ``DPackedFunc`` or ``DModule``.
    type
        What it holds, in words: ``float32[4, 4]``; several where workers differ.
    layout
        Its placements: ``Shard(0)``; "" if unknown.
    nbytes
        Of the tensors in it, for each worker; None of one that has not answered yet. Two registers
        that share memory both count it.
    made
        When, on the clock of `time.monotonic`.
    made_by
        Where: ``Cell In[3], line 4`` or ``train.py:12``.
    cell
        The number of the cell that ran then, 0 outside of cells.
    state
        ``ok``, ``pending`` (not computed yet), ``reading…`` (computed, and not yet asked what it
        is), ``poisoned`` or ``no answer``, with the workers it
        is true of.
    problem
        The headline of its failure.
    held_by
        Who holds it, `not found` if that is not known; empty where nobody can tell.
    named
        Whether a name of the notebook's leads to it.
    """

    reg_id: int
    entry: Entry
    kind: str
    name: str = ""
    type: str = ""
    layout: str = ""
    nbytes: tuple[int | None, ...] = ()
    made: float = 0.0
    made_by: str = ""
    cell: int = 0
    state: str = "pending"
    problem: str = ""
    held_by: tuple[str, ...] = ()
    named: bool = True
    total: int = 0
    group: Any = None  # what made it, for `groups_of`
    own_name: str | None = None
    placements: Any = None
    facts: list[Fact | None] | None = None
    _words: str | None = None  # what a filter looks in

    @property
    def age(self) -> float:
        """Seconds since it was made."""
        return max(time.monotonic() - self.made, 0.0)

    @property
    def words(self) -> str:
        """All that is told of it, in small letters."""
        if self._words is None:
            self._words = " ".join(
                (f"r{self.reg_id}", self.kind, self.name, self.type, self.layout, self.made_by,
                 self.state, self.problem, *self.held_by)
            ).lower()  # fmt: skip
        return self._words

    @property
    def ref(self) -> DRef | None:
        """The DRef, while it lives."""
        return self.entry[0]()


@dataclass(frozen=True, slots=True)
class Group:
    """Registers made by one line.

    Attributes
    ----------
    made_by
        The line.
    count, nbytes
        How many live, and their bytes on all workers.
    unnamed
        How many of them no name of the notebook's leads to.
    by_cell
        ``(cell, how many of them it made)``, the last cells last.
    """

    made_by: str
    count: int
    nbytes: int
    unnamed: int
    by_cell: tuple[tuple[int, int], ...]

    @property
    def grows(self) -> bool:
        """Whether three cells or more made some, and they all live."""
        return len(self.by_cell) >= _GROWING


def chosen(
    rows: Iterable[Row], sort: str = "bytes", text: str = "", *, backwards: bool = False
) -> list[Row]:
    """The rows in which `text` occurs, in order; `backwards` turns the order around.

    Bytes are sorted largest first, ages oldest first, words as in a dictionary.
    """
    words = text.lower().split()
    if words:
        rows = [row for row in rows if all(word in row.words for word in words)]
    return sorted(rows, key=_KEYS[sort], reverse=backwards)


_KEYS: dict[str, Callable[[Row], Any]] = {
    "bytes": lambda row: (-row.total, row.reg_id),
    "age": lambda row: row.made,
    "id": lambda row: row.reg_id,
    "name": lambda row: (not row.name, row.name.lower(), row.reg_id),
    "type": lambda row: (not row.type, row.type, row.reg_id),
    "site": lambda row: (row.made_by, row.made),
}


def groups_of(rows: Iterable[Row]) -> list[Group]:
    """The rows by the line that made them, most bytes first."""
    members: dict[Any, list[Row]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    groups = []
    for found in members.values():
        cells: dict[int, int] = {}
        for row in found:
            cells[row.cell] = cells.get(row.cell, 0) + 1
        unnamed = sum(not row.named for row in found)
        total = sum(row.total for row in found)
        by_cell = tuple(sorted(cells.items()))
        groups.append(Group(found[-1].made_by, len(found), total, unnamed, by_cell))
    return sorted(groups, key=lambda group: (-group.nbytes, -group.count, group.made_by))


def leaks_of(rows: Sequence[Row]) -> list[Row]:
    """The rows that may be leaks.

    A register may be one if no name of the notebook's leads to it, or if the line that made it
    makes more with each cell.
    """
    cells: dict[Any, set[int]] = {}
    for row in rows:
        cells.setdefault(row.group, set()).add(row.cell)
    growing = {group for group, found in cells.items() if len(found) >= _GROWING}
    return [row for row in rows if not row.named or row.group in growing]


def bytes_words(nbytes: Sequence[int | None]) -> str:
    """Bytes on each worker, folded where they are equal.

    Examples
    --------
    >>> bytes_words([1024] * 4), bytes_words([8, 8, 16]), bytes_words([None, 8]), bytes_words([0])
    ('1 KiB each', '8 B, 8 B, 16 B', '?, 8 B', '')
    """
    kinds = set(nbytes)
    if kinds <= {0, None}:
        return ""
    if len(kinds) == 1:
        return format_bytes(nbytes[0]) + (" each" if len(nbytes) > 1 else "")
    if len(nbytes) > 4:
        known = [count for count in nbytes if count is not None]
        return f"{format_bytes(min(known))} to {format_bytes(max(known))}"
    return ", ".join("?" if count is None else format_bytes(count) for count in nbytes)


def age_words(seconds: float) -> str:
    """An age in one unit.

    Examples
    --------
    >>> age_words(0.4), age_words(59.9), age_words(150), age_words(7300), age_words(200000)
    ('0 s', '59 s', '2 min', '2 h', '2 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
