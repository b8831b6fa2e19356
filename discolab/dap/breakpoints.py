"""The breakpoints of a debugger as one client sees them.

There is one set of breakpoints, whoever has set them. A client says of a whole file which it wants:
what it has been told of and leaves out is removed, what others have set meanwhile stays and is told
by an event. When it leaves, those go that it has set.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ..debugger.breaks import Break, lines_with_code
from ..debugger.debugger import Debugger
from ..runtime.errors import ArgumentError, DiscoError
from .arguments import Arguments
from .sources import Sources

_PATIENCE = 5.0  # seconds that workers are given to say where a function is


class Breakpoints:
    """See the module; `_lock` guards what it holds: events are told on another thread."""

    def __init__(self, debugger: Debugger, sources: Sources) -> None:
        self._debugger = debugger
        self._sources = sources
        self._lock = threading.Lock()
        self._known: dict[int, Break] = {}  # of which the client was told
        self._own: set[int] = set()  # which it has set
        self._functions: dict[
            tuple[str, str, str], int
        ] = {}  # those at functions, as it named them

    def in_file(self, file: str, wanted: Sequence[Arguments]) -> list[dict[str, Any]]:
        """Have these breakpoints in a file; what has become of each."""
        with self._lock:
            placed = [self._at_line(file, one) for one in wanted]
            kept = {one["id"] for one in placed if "id" in one} | set(self._functions.values())
            self._remove([n for n, one in self._known.items() if n not in kept and one.is_in(file)])
            return placed

    def at_functions(self, wanted: Sequence[Arguments]) -> list[dict[str, Any]]:
        """Have these breakpoints at functions; what has become of each."""
        with self._lock:
            placed, keys = [], set()
            for one in wanted:
                condition, hits = one.text("condition", ""), one.text("hitCondition", "")
                key = one.text("name"), condition, hits
                keys.add(key)
                known = self._known.get(self._functions.get(key, 0))
                if known is None:
                    text = f"{key[0]} if {condition}" if condition else key[0]
                    placed.append(self._set(text, "", hits, ""))
                    self._functions[key] = placed[-1].get("id", 0)
                else:
                    placed.append(self._told(known))
            gone = [key for key in self._functions if key not in keys]
            self._remove([self._functions.pop(key) for key in gone])
            return placed

    def changes(self) -> list[tuple[str, dict[str, Any]]]:
        """What others have set and removed since: ``new`` or ``removed``, and the breakpoint."""
        with self._lock:
            now = {one.number: one for one in self._debugger.all_breaks()}
            gone = [number for number in self._known if number not in now]
            for number in gone:
                self._own.discard(number)
                del self._known[number]
            new = [one for number, one in now.items() if number not in self._known]
            return [("removed", {"id": number, "verified": False}) for number in gone] + [
                ("new", self._told(one)) for one in new
            ]

    def leave(self) -> None:
        """The client goes: remove what it has set."""
        with self._lock:
            self._remove(list(self._own))

    # -- inside, under the lock ------------------------------------------------------------------

    def _at_line(self, file: str, one: Arguments) -> dict[str, Any]:
        condition, line = one.text("condition", "").strip(), one.number("line")
        hits, log = one.text("hitCondition", "").strip(), one.text("logMessage", "")
        try:
            line = next((n for n in lines_with_code(file) if n >= line), line)
        except ArgumentError as exc:
            return {"verified": False, "message": str(exc)}
        for known in self._debugger.all_breaks():
            same = (known.line, known.condition, known.hits, known.log, known.ranks)
            if known.is_in(file) and same == (line, condition, hits, log, None):
                return self._told(known)
        return self._set(f"{line} if {condition}" if condition else str(line), file, hits, log)

    def _set(self, text: str, file: str, hits: str, log: str) -> dict[str, Any]:
        try:
            found = self._debugger.break_at(text, file, hits=hits, log=log, timeout=_PATIENCE)
        except DiscoError as exc:
            return {"verified": False, "message": str(exc)}
        self._own.add(found.number)
        return self._told(found)

    def _told(self, one: Break) -> dict[str, Any]:
        self._known[one.number] = one
        source = self._sources.source(one.file)
        return {"id": one.number, "verified": True, "line": one.line, "source": source}

    def _remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._known.pop(number, None)
            self._own.discard(number)
            try:
                self._debugger.clear(number)
            except ArgumentError:  # somebody else was faster
                pass
