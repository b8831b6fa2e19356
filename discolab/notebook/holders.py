"""Who holds a DRef: names of the notebook, containers, plots, its last results, its last error.

Runs beside the notebook's own thread, on the thread that keeps pictures up to date: it reads
built-in containers by their own methods only, a bounded number of items, and calls nothing of the
user's.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType, ModuleType, TracebackType
from typing import Any

from ..runtime.dref import DRef
from ..runtime.session import Session
from ..runtime.sources import is_installed, is_own_file
from ..views.facts.guard import FAILURES
from ..views.formats import cut, printable
from ..views.registers.table import Held
from .widgets.plot import TensorPlot, open_plots

_RESULT = re.compile(r"_\d*|__|___|Out|_oh|_dh|In|_ih|_i\d*|_ii|_iii")
_MOST_ITEMS = 20_000  # looked at in all
_DEEPEST = 4
_MOST_PLACES = 3  # told of one DRef
_PLAIN = (int, float, bool, str, bytes, type(None))


def holders_of(shell: Any) -> Holding:
    """Look for everybody who holds a DRef now.

    A name of the notebook, or what can be reached from one, is told first: if there is one, a
    result (``Out[5]``, ``_``) or an error that holds it too does not matter for leaks.
    """
    found = Holding()
    hidden = getattr(shell, "user_ns_hidden", {})
    for name, value in shell.user_ns.copy().items():
        if not _RESULT.fullmatch(name) and (name not in hidden or hidden[name] is not value):
            found.walk(printable(name), value, True)
    for number, value in shell.user_ns.get("_oh", {}).copy().items():
        found.walk(f"Out[{number}]", value, False)
    for name in ("_", "__", "___"):
        found.walk(name, shell.user_ns.get(name), False)
    for plot in open_plots():
        found.plot(plot)
    for frame in _frames(getattr(sys, "last_traceback", None)):
        code = frame.f_code
        if not is_own_file(code.co_filename) and not is_installed(code.co_filename):
            names = frame.f_locals
            if names is not shell.user_ns:
                for name, value in names.copy().items():
                    found.walk(f"{name} of the last error", value, False)
    return found


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


class Holding:
    """Who holds which DRef; made by going through values.

    For a DRef with one holder it keeps a string and no list: there may be ten thousand, and new
    containers by the thousand wake Python's collector.
    """

    def __init__(self) -> None:
        self._places: dict[int, str | list[str]] = {}
        self._named: set[int] = set()
        self._left = _MOST_ITEMS
        self._seen: set[int] = set()

    def get(self, key: int, default: Held) -> Held:
        """Who holds the DRef of that `id`."""
        places = self._places.get(key)
        if places is None:
            return default
        named = key in self._named
        if isinstance(places, str):
            return Held((places,), named)
        more = len(places) - _MOST_PLACES
        return Held((*places[:_MOST_PLACES], *((f"{more} more",) if more > 0 else ())), named)

    def walk(self, name: str, value: Any, named: bool) -> None:
        """Look at what `name` stands for, and into it."""
        if issubclass(type(value), DRef):
            self._note(value, name, named)
            return
        todo: deque[tuple[Any, str, int]] = deque([(value, name, 0)])
        while todo:
            holder, place, depth = todo.popleft()
            if id(holder) in self._seen:  # it may hold itself, or have two names
                continue
            for key, item in _inside(holder):
                self._left -= 1
                if self._left < 0:
                    return
                kind = type(item)
                if issubclass(kind, DRef):
                    self._note(item, place + key, named)
                elif depth < _DEEPEST and kind not in _PLAIN:
                    todo.append((item, place + key, depth + 1))
            if type(holder) not in _PLAIN:
                self._seen.add(id(holder))

    def plot(self, plot: TensorPlot) -> None:
        """A plot holds what it draws; while one is open that is no leak."""
        ref = plot.ref
        if ref is not None:
            self._note(ref, "a plot", plot.is_open)

    def _note(self, ref: DRef, place: str, named: bool) -> None:
        key = id(ref)
        places = self._places.get(key)
        if places is None:
            self._places[key] = place
        elif isinstance(places, str):
            if places != place:
                self._places[key] = [places, place]
        elif place not in places:
            places.append(place)
        if named:
            self._named.add(key)


def _inside(holder: Any) -> Iterator[tuple[str, Any]]:
    """What is in a value and how it is reached; past what a subclass of a container overrides."""
    kind = type(holder)
    try:
        if issubclass(kind, dict):
            for key in list(dict.__iter__(holder)):
                yield f"[{_key(key)}]", dict.get(holder, key)
        elif issubclass(kind, list | tuple | deque):
            base: Any = list if issubclass(kind, list) else tuple
            base = deque if issubclass(kind, deque) else base
            for number, item in enumerate(list(base.__iter__(holder))):
                yield f"[{number}]", item
        elif issubclass(kind, set | frozenset):
            base = set if issubclass(kind, set) else frozenset
            for item in list(base.__iter__(holder)):
                yield "{…}", item
        elif issubclass(kind, TensorPlot):
            yield ".ref", object.__getattribute__(holder, "_reader").held
        elif _is_of_the_notebook(kind):
            for name, item in object.__getattribute__(holder, "__dict__").copy().items():
                yield f".{name}", item
    except (AttributeError, RuntimeError, *FAILURES):  # it changes at this moment
        return


def _key(key: Any) -> str:
    if type(key) in (str, int, bool, type(None)):
        return cut(printable(repr(key)), 40)
    return "…"


def _is_of_the_notebook(kind: type) -> bool:
    """Whether a class is one of the notebook's own, or of a kind that holds DRefs for a user."""
    if issubclass(kind, type | ModuleType | Session):
        return False
    return kind.__module__ in ("__main__", "discolab.notebook.cell")
