"""The live registers of a session as a live table: sorted, filtered, opened, freed.

Rows that are not on the screen are not sent: the front end says which it shows. `_lock` guards what
it has asked for, which buttons change on their own thread; `_look` is held by who asks the table
for what is new.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError, DiscoError
from ...runtime.session import Session
from ...views import Part, render_html
from ...views.dref.view import draw_dref
from ...views.parts import Text
from ...views.registers.registers_view import (
    cells_of,
    format_growth,
    format_leak_reason,
    format_totals,
    registers_parts,
)
from ...views.registers.table import (
    SORTS,
    CellName,
    Holders,
    RegisterTable,
    Row,
    chosen,
    groups_of,
    leaks_of,
)
from .base import LiveWidget, source
from .pump import pump

_MOST_SENT = 200  # rows in one window
_MOST_WINDOWS = 4  # views of one widget that have a window each
_MOST_GROUPS = 8
_LOOK = 0.3  # seconds that a look may take in which all is to be found
_SHARE = 0.05  # of the time may be spent with looks
_JUST_NOW = 0.05  # seconds


class RegistersWidget(LiveWidget):
    """What `disco_registers` gives: the rows, and the table that shows them.

    Parameters
    ----------
    find
        Gives the session whose registers these are: another one after a restart.
    holders
        Says who holds which DRef.
    turn
        Changes when that may have changed: with each cell.
    cell_name
        Says what the cell of a file was called when another ran.
    """

    _esm = source("registers.js")
    _css = source("registers.css")

    def __init__(
        self,
        find: Callable[[], Session],
        holders: Holders | None,
        turn: Callable[[], Any],
        cell_name: CellName | None = None,
        *,
        sort: str = "bytes",
        text: str = "",
        leaks: bool = False,
    ) -> None:
        if sort not in SORTS:
            raise ArgumentError(f"sort is one of {', '.join(SORTS)}; got {sort!r}")
        if not isinstance(text, str):
            raise ArgumentError(f"filter is text, words that a row is to have; got {text!r:.60}")
        super().__init__()
        self._find = find
        self._holders = holders
        self._turn = turn
        self._cell_name = cell_name
        self._table = RegisterTable(find(), holders, cell_name)
        self._lock = threading.Lock()
        self._look = threading.Lock()
        self._sort, self._text, self._leaks = sort, text, leaks
        self._backwards = False
        self._windows: dict[str, tuple[int, int]] = {}
        self._drawing = threading.Lock()
        self._wanted = 0  # the number of the last drawing that was asked for
        self._asked: Any = None
        self._last: dict[str, Any] = {}
        self._next_look = self._looked = 0.0
        self._drawn: tuple[Any, Part] | None = None  # the static picture, and of what

    # -- what there is -----------------------------------------------------------------------

    @property
    def _session(self) -> Session:
        """The session that there is now."""
        session = self._find()
        if session is not self._table.session:
            self._table = RegisterTable(session, self._holders, self._cell_name)
        return session

    @property
    def rows(self) -> list[Row]:
        """The rows that match, in order, as they are now."""
        with self._look:
            self._well()
            return self._choose()[0]

    def _well(self) -> None:
        """Find out all that can be known; under `_look`."""
        if not self._session.closed:
            self._table.look_well(_LOOK)

    def _choose(self) -> tuple[list[Row], Any]:
        every = self._table.rows
        rows = leaks_of(every) if self._leaks else every
        found = chosen(rows, self._sort, self._text, backwards=self._backwards)
        return found, groups_of(found) if self._leaks else None

    def static(self) -> Part:
        with self._look:
            session = self._session
            if time.monotonic() - self._looked > _JUST_NOW:
                self._well()
            if session.closed:
                return Text(f"{self._title()}: shut down")
            shown = self._state()
            if self._drawn is None or self._drawn[0] != shown:  # or its ages would be new, no more
                rows, groups = self._choose()
                part = registers_parts(self._title(), rows, self._table.rows, groups)
                self._drawn = shown, part
            return self._drawn[1]

    def _state(self) -> tuple[Any, ...]:
        """What the picture follows from."""
        table = self._table
        asked = self._sort, self._backwards, self._text, self._leaks
        return (table.session, table.version, table.session.closed, *asked)

    def _title(self) -> str:
        return f"registers of {self._session.name or 'the session'}"

    # -- live --------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """See `LiveWidget`; the same object as before if nothing has changed."""
        with self._look:
            now, _ = time.monotonic(), self._session
            turn = self._turn()
            if now >= self._next_look or self._asked is None or self._asked[0] != turn:
                more = self._table.look(turn)
                ended = self._asked is not None and self._asked[0] != turn
                while more and ended and time.monotonic() - now < _JUST_NOW / 2:
                    more = self._table.look(turn)  # what stays to be seen when a cell has ended
                self._looked = time.monotonic()
                self._next_look = now + (self._looked - now) / _SHARE
            with self._lock:
                asked = (turn, *self._state(), tuple(self._windows.items()))
            before, self._asked = self._asked, asked
            if before is None or asked[1:] != before[1:]:
                self._last = self._frame(asked[-1])
            return self._last

    def _frame(self, windows: tuple[tuple[str, tuple[int, int]], ...]) -> dict[str, Any]:
        every = self._table.rows
        rows, groups = self._choose()
        return {
            "at": time.time(),
            "title": self._title(),
            "totals": "shut down" if self._session.closed else format_totals(every),
            "count": len(rows),
            "all": len(every),
            "workers": self._session.num_workers,
            "sort": self._sort,
            "backwards": self._backwards,
            "text": self._text,
            "leaks": self._leaks,
            "groups": [
                [group.made_by, group.count, format_growth(group), format_leak_reason(group)]
                for group in (groups or ())[:_MOST_GROUPS]
            ],
            "windows": {
                view: [start, [_line(row) for row in rows[start : start + count]]]
                for view, (start, count) in (windows or (("", (0, 40)),))
            },
        }

    def essence(self) -> Any:
        """See `LiveWidget`: not what part of it is seen."""
        return self._state()

    # -- buttons -----------------------------------------------------------------------------

    def command(self, name: str, content: dict[str, Any]) -> None:
        """See `LiveWidget`: window, sort, filter, leaks, find, open, close, free."""
        match name:
            case "window":
                self._set_window(content)
            case "sort":
                self._set_sort(str(content.get("by")), bool(content.get("backwards")))
            case "filter":
                with self._lock:
                    self._text = str(content.get("text", ""))[:200]
            case "leaks":
                with self._lock:
                    self._leaks = bool(content.get("on"))
            case "open":
                self._open(*self._ref(content))
            case "free":
                self._free(*self._ref(content))
            case _:
                super().command(name, content)

    def _set_window(self, content: dict[str, Any]) -> None:
        view = str(content.get("view"))[:40]
        start, count = (max(0, _number(content.get(key))) for key in ("start", "count"))
        with self._lock:
            self._windows.pop(view, None)
            self._windows[view] = start, min(count, _MOST_SENT)
            while len(self._windows) > _MOST_WINDOWS:
                del self._windows[next(iter(self._windows))]

    def _set_sort(self, by: str, backwards: bool) -> None:
        if by not in SORTS:
            raise ArgumentError(f"a table is sorted by one of {', '.join(SORTS)}; got {by!r}")
        with self._lock:
            self._sort, self._backwards = by, backwards

    def _ref(self, content: dict[str, Any]) -> tuple[int, DRef]:
        """The DRef that a button means: the one of that line, not a later one of the same id."""
        reg_id = _number(content.get("id"))
        row = self._table.get(reg_id)
        ref = row.ref if row is not None else None
        if row is None or ref is None or content.get("made") != _when(row):
            raise DiscoError(f"r{reg_id} is gone: nothing holds it any more")
        return reg_id, ref

    def _open(self, reg_id: int, ref: DRef) -> None:
        """Draw a DRef on a thread of its own: its workers may be busy."""

        self._wanted = number = self._wanted + 1

        def draw() -> None:
            with self._drawing:
                if number != self._wanted:
                    return  # another one was asked for since
                try:
                    html = render_html(draw_dref(ref))
                except DiscoError as exc:
                    html = render_html(Text(str(exc), "error"))
                self.send({"type": "opened", "id": reg_id, "html": html})

        threading.Thread(target=draw, name="discolab-draw", daemon=True).start()

    def _free(self, reg_id: int, ref: DRef) -> None:
        self._session.free(ref)
        self.send({"type": "freed", "id": reg_id})
        pump.soon()


def _line(row: Row) -> list[Any]:
    """A row as the front end gets it: id, moment, cells, problem, whether it is named, name."""
    return [row.reg_id, _when(row), cells_of(row), row.problem, row.named, row.kind]


def _when(row: Row) -> float:
    """When it was made, on the clock of the wall; tells registers of one id apart."""
    return round(row.made + _OFFSET, 3)


_OFFSET = time.time() - time.monotonic()


def _number(value: Any) -> int:
    return value if type(value) is int else 0
