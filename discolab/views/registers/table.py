"""The live registers of a session as rows: what they hold, since when, who made and who holds them.

`RegisterTable` keeps what it has found and asks for no more than what may be new: the session's
book tells which DRefs live, probes what their values are (facts.py), and `holders`, which a
notebook gives, who holds them. One thread at a time may call `look`; reading needs none. How rows
are sorted, filtered and grouped is pure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ...runtime.dref import DRef
from ...runtime.errors import DiscoError
from ...runtime.failures import fold_ranks
from ...runtime.registers import OWN, Entry
from ...runtime.restart import LOST
from ...runtime.session import Session
from ...runtime.sources import is_cell, is_installed, place
from ..formats import format_bytes, printable
from .facts import Fact, look_at_registers

_MOST_LOOKED_AT = 250  # registers, in one look
_AGAIN = 48  # registers that are looked at once more in one look, while workers compute
_BACK_OFF = 1.0  # seconds for which a worker that has not answered is left alone
_NOWHERE = "not found"


class Held(NamedTuple):
    """Who holds a DRef: places in words, and whether a name of the notebook's leads to it."""

    places: tuple[str, ...]
    named: bool


class Holding(Protocol):
    """Knows who holds which DRef."""

    def get(self, key: int, default: Held, /) -> Held:
        """Of the DRef with that `id`; `default` if nobody is known."""


Holders = Callable[[], Holding]
CellName = Callable[[str, int], "str | None"]


class RegisterTable:
    """What is known of a session's live registers.

    Parameters
    ----------
    session
        It keeps a book of its DRefs from now on, if it did not before.
    holders
        Says who holds which; None: nobody can tell.
    cell_name
        Says what the notebook's cell of a file was called when the cell of that number ran: one
        text that was run twice has one file and two names.

    Attributes
    ----------
    version
        Grows with each change of a row.
    """

    def __init__(
        self,
        session: Session,
        holders: Holders | None = None,
        cell_name: CellName | None = None,
    ) -> None:
        self.session = session
        self.version = 0
        self._holders = holders
        self._cell_name = cell_name
        self._book = session.track_registers()
        self._rows: dict[int, Row] = {}
        self._waiting: dict[int, Row] = {}  # without a fact of some worker
        self._again: list[int] = []  # still to be looked at once more
        self._executed = [-1] * session.num_workers
        self._silent: dict[int, float] = {}  # rank -> when to ask it again
        self._seen: Any = None
        self._held: Any = None
        self._swept: Any = None

    @property
    def rows(self) -> list[Row]:
        """All rows that were found, by id."""
        return sorted(self._rows.values(), key=lambda row: row.reg_id)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, reg_id: int) -> Row | None:
        """The row of a register."""
        return self._rows.get(reg_id)

    # -- looking -----------------------------------------------------------------------------

    def look(self, turn: Any = None, timeout: float = 0.05) -> bool:
        """Find out what is new; false once all that can be known now is known.

        Parameters
        ----------
        turn
            Who holds what, and what it is called, is asked again when this changes.
        timeout
            Seconds that workers in other processes are given.
        """
        session = self.session
        if session.closed:
            if self._rows:
                self._rows.clear()
                self._waiting.clear()
                self.version += 1
            return False
        sent, live = session.commands_sent, session._registers.live
        if (sent, live, turn) != self._seen:
            self._seen = sent, live, turn
            self._take_stock()
        if self._holders is not None and (sent, live, turn) != self._held:
            self._held = sent, live, turn
            self._ask_holders(self._holders())
        return self._ask_workers(timeout)

    def look_well(self, seconds: float = 1.0) -> None:
        """Look at all anew until all is known that can be, for `seconds` at most."""
        ends = time.monotonic() + seconds
        self._seen = self._held = None
        self._silent.clear()  # a worker that was late once gets another chance
        while self.look(timeout=seconds / 10) and time.monotonic() < ends:
            pass

    def _take_stock(self) -> None:
        """Which DRefs live?"""
        before, found = self._rows, {}
        for reg_id, ref, entry in self._book.alive():
            row = before.get(reg_id)
            if row is None or row.entry is not entry:
                if ref.name is OWN:
                    continue
                row = self._make(reg_id, ref, entry)
                self._waiting[reg_id] = row
                self.version += 1
            elif ref.name is not row.own_name or ref.placements is not row.placements:
                self._describe(row, ref)
            found[reg_id] = row
        if len(found) != len(before) or found.keys() != before.keys():
            self.version += 1
        self._rows = found
        for reg_id in [r for r, row in self._waiting.items() if found.get(r) is not row]:
            del self._waiting[reg_id]

    def _make(self, reg_id: int, ref: DRef, entry: Entry) -> Row:
        _, site, made, cell, _ = entry
        words, group = _site(site, cell, self._cell_name)
        kind = "DRef" if type(ref) is DRef else type(ref).__name__
        row = Row(reg_id, entry, kind, made=made, made_by=words, cell=cell, group=group)
        row.facts = [None] * self.session.num_workers
        row.nbytes = (None,) * self.session.num_workers
        row.held_by = (_NOWHERE,) if self._holders else ()
        row.named = self._holders is None
        self._describe(row, ref)
        return row

    def _describe(self, row: Row, ref: DRef) -> None:
        """What the DRef itself says."""
        row.own_name, row.placements = ref.name, ref.placements
        row.layout = _layout_words(ref.placements)
        self._settle(row)

    def _settle(self, row: Row) -> None:
        """Work out what follows from the rest."""
        nowhere = row.held_by[:1] == (_NOWHERE,)
        row.name = row.own_name or ("" if nowhere or not row.held_by else row.held_by[0])
        row._words = None
        self.version += 1

    def _ask_holders(self, held: Holding) -> None:
        nobody = Held((_NOWHERE,), False)
        for row in self._rows.values():
            found = held.get(id(row.entry[0]()), nobody)
            if found.places != row.held_by or found.named != row.named:
                row.held_by, row.named = found
                self._settle(row)

    # -- what workers say --------------------------------------------------------------------

    def _ask_workers(self, timeout: float) -> bool:
        """One look at what is not known yet, or may have changed."""
        now = time.monotonic()
        ranks = [r for r in range(len(self._executed)) if self._silent.get(r, 0.0) <= now]
        calls = self.session.calls_sent
        busy = any(self._executed[r] < calls for r in ranks)
        self._begin_sweep()
        if not self._waiting and not self._again and not busy:
            return False
        ids = self._ready(ranks)
        if not ids:
            ids = self._again[-_AGAIN:]
            del self._again[len(self._again) - len(ids) :]
        try:
            found = self.session.look(look_at_registers, ids, ranks=ranks, timeout=timeout)
        except DiscoError:  # it ends at this moment
            return False
        for rank in ranks:
            if rank not in found:
                self._silent[rank] = time.monotonic() + _BACK_OFF
        self._take(ids, found)
        self._begin_sweep()
        return bool(self._again or self._ready(ranks))

    def _begin_sweep(self) -> None:
        """Calls may have changed what they were given: all is looked at once more, bit by bit."""
        restarts = self.session.restarts_made
        swept = self._book.values_set, restarts, tuple(self._executed)
        if swept != self._swept:
            if restarts and (self._swept is None or restarts != self._swept[1]):
                for row in self._rows.values():  # some are restored: no fact of theirs has changed
                    self._join(row)
            self._swept = swept
            left = self._again  # of the last sweep: these come first
            known = set(left)
            self._again = [r for r in self._rows if r not in known and r not in self._waiting]
            self._again += left

    def _ready(self, ranks: Sequence[int]) -> list[int]:
        """Registers of which some worker has not told yet what it could tell."""
        executed = self._executed
        if min((executed[r] for r in ranks), default=-1) < 0:
            return list(self._waiting)[:_MOST_LOOKED_AT]
        found = []
        for reg_id, row in self._waiting.items():
            calls, facts = row.entry[4], row.facts
            assert facts is not None
            if any(facts[r] is None and executed[r] >= calls for r in ranks):
                found.append(reg_id)
                if len(found) == _MOST_LOOKED_AT:
                    break
        return found

    def _take(self, ids: Sequence[int], found: Mapping[int, tuple[int, list[Fact | None]]]) -> None:
        changed: set[int] = set()
        for rank, (executed, facts) in found.items():
            self._executed[rank] = executed
            for reg_id, fact in zip(ids, facts, strict=False):
                row = self._rows.get(reg_id)
                if row is None or fact is None or executed < row.entry[4]:
                    continue
                known = row.facts
                assert known is not None
                if known[rank] != fact:
                    known[rank] = tuple(fact)  # type: ignore[assignment]  # lists came by a line
                    changed.add(reg_id)
        for reg_id in changed:
            self._join(self._rows[reg_id])
        for reg_id, row in self._waiting.copy().items():
            assert row.facts is not None
            if None not in row.facts:
                del self._waiting[reg_id]
            elif row.state == "pending" and self._is_there(row):
                row.state = READING
                self._settle(row)

    def _is_there(self, row: Row) -> bool:
        """Whether all workers have computed it, as far as is known."""
        return min(self._executed) >= row.entry[4]

    def _join(self, row: Row) -> None:
        """Put together what workers have told of one register."""
        facts = row.facts
        assert facts is not None
        told = [fact for fact in facts if fact is not None]
        row.type = " | ".join(dict.fromkeys(words for words, _, problem in told if not problem))
        row.nbytes = tuple(None if fact is None else fact[1] for fact in facts)
        row.total = sum(nbytes for _, nbytes, _ in told)
        problem = next((problem for _, _, problem in told if problem), "")
        row.problem = problem.removeprefix(f"{LOST}: ")
        ref = row.entry[0]()
        restored = {} if ref is None else self.session.how_restored(ref)
        row.state = self._state(facts, restored)
        self._settle(row)

    def _state(self, facts: Sequence[Fact | None], restored: Iterable[int]) -> str:
        lost = [rank for rank, fact in enumerate(facts) if fact and fact[2].startswith(LOST)]
        poisoned = [r for r, fact in enumerate(facts) if fact and fact[2] and r not in lost]
        lacking = [rank for rank, fact in enumerate(facts) if fact is None]
        for word, ranks in (("poisoned", poisoned), ("lost", lost), ("pending", lacking)):
            if ranks:
                whole = len(ranks) == len(facts)
                return word if whole else f"{word} on {fold_ranks(ranks)}"
        return f"restored on {fold_ranks(restored)}" if restored else "ok"


def _site(site: Any, cell: int, cell_name: CellName | None) -> tuple[str, Any]:
    """Where a DRef was made, in words and as a key that its sisters share."""
    try:
        code, line = site
        file = code.co_filename
    except (TypeError, ValueError, AttributeError):
        file, line = "", 0
    name = cell_name(file, cell) if cell_name is not None and cell and file else None
    if name is not None:
        return f"{name}, line {line}", (file, line)
    if file and (is_cell(file) or not is_installed(file)):
        return place(file, line), (file, line)
    # by a magic: between the cell and us there is IPython only
    words = f"Cell In[{cell}]" if cell else place(file, line) if file else "?"
    return words, ("", words)


def _layout_words(placements: Any) -> str:
    """Placements in torch's words; whatever else stands there as nothing."""
    if placements is None:
        return ""
    places = placements if isinstance(placements, list | tuple) else (placements,)
    words = []
    for one in places[:8]:
        try:
            detail = getattr(one, "dim", getattr(one, "reduce_op", ""))
            words.append(f"{type(one).__name__}({detail if isinstance(detail, int | str) else ''})")
        except Exception:  # it is the user's object
            words.append("?")
    return printable(", ".join(words))


# -- rows: sorted, filtered and grouped ------------------------------------------------------------

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
        is), ``poisoned``, ``lost`` (with a worker that was restarted), ``restored`` there, or
        ``no answer``, with the workers it
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


def format_bytes_each(nbytes: Sequence[int | None]) -> str:
    """Bytes on each worker, folded where they are equal.

    Examples
    --------
    >>> format_bytes_each([1024] * 4), format_bytes_each([8, 8, 16])
    ('1 KiB each', '8 B, 8 B, 16 B')
    >>> format_bytes_each([None, 8]), format_bytes_each([0])
    ('?, 8 B', '')
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


def format_age(seconds: float) -> str:
    """An age in one unit.

    Examples
    --------
    >>> format_age(0.4), format_age(59.9), format_age(150), format_age(7300), format_age(200000)
    ('0 s', '59 s', '2 min', '2 h', '2 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
