"""Names of other modules that are replaced while worker threads live, and put back after.

A `Patches` belongs to whoever made it and is used under that one's lock.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import importlib
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from ..runtime.errors import SessionError
from ..runtime.worker import current_worker_or_none


class ModuleOfWorkers(ModuleType):
    """A module that looks who asks; pickled by its name, as functions that name it need."""

    def __reduce__(self) -> Any:
        return importlib.import_module, (object.__getattribute__(self, "__name__"),)


class Patches:
    """What was replaced, so that it can be put back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any, bool]] = []
        self._last: list[Callable[[], None]] = []
        self.everywhere: list[tuple[Any, Any]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Any], Any], *, everywhere: bool = False
    ) -> Any:
        """Put ``make(original)`` where the original was; gives the new one back.

        With `everywhere` the table also replaces it under other names of loaded modules, to which
        ``from owner import name`` has bound it, and puts it back there.
        """
        own = name in vars(owner)
        original = getattr(owner, name)
        new = make(original)
        setattr(owner, name, new)
        if everywhere:
            self.everywhere.append((original, new))
        self._undo.append((owner, name, original, new, own))
        return new

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` an attribute that it does not have."""
        setattr(owner, name, value)
        self._undo.append((owner, name, value, value, False))

    def at_undo(self, function: Callable[[], None]) -> None:
        """Call a function too when all is put back."""
        self._last.append(function)

    def undo(self) -> None:
        """Put all back; what others replaced since is left alone."""
        while self._last:
            self._last.pop()()
        while self._undo:
            owner, name, original, new, own = self._undo.pop()
            if vars(owner).get(name) is not new:
                continue
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def refused(what: str, why: str) -> Callable[[Any], Any]:
    """For `Patches.replace`: an error on a worker that shares its process with others."""

    def over(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            worker = current_worker_or_none()
            if worker is not None and len(worker.peers) > 1:
                raise SessionError(
                    f"{what} {why}, and workers are threads of it: start the session with "
                    "engine='processes' (%disco_session --engine processes)"
                )
            return original(*args, **kwargs)

        return refuse

    return over


def replace_names(modules: Iterable[ModuleType], pairs: Iterable[tuple[Any, Any]]) -> None:
    """Have every name of `modules` that is bound to the first of a pair mean the second.

    Not those of this package, which knows what was there before. Each session of threads asks for
    this twice, of all modules there are, which have 50,000 names and more; so `_mentioned` picks
    the few namespaces that are concerned.
    """
    news = {id(old): new for old, new in pairs}
    if not news:
        return
    found = [getattr(module, "__dict__", None) for module in modules]
    namespaces = [names for names in found if type(names) is dict]
    values: list[Any] = []
    ends: list[int] = []  # of each namespace's part of `values`
    for names in namespaces:
        values += names.values()
        ends.append(len(values))
    places = _mentioned(tuple(values), news)
    for index in sorted({bisect.bisect_right(ends, place) for place in places}):
        names = namespaces[index]
        if str(names.get("__name__")).startswith(f"{__package__}."):
            continue
        for name, value in tuple(names.items()):
            if id(value) in news and names.get(name) is value:  # no other thread has bound it anew
                names[name] = news[id(value)]


_SLOTS = 1 << 18


def _mentioned(values: tuple[Any, ...], wanted: Collection[int]) -> list[int]:
    """The places in `values` where objects of these ids are.

    An id is an object's address, and a tuple is an array of addresses: numpy looks at them where
    they are, and only those that share a slot with one of the wanted become numbers of Python.
    """
    array = (ctypes.c_ssize_t * len(values)).from_address(id(values) + tuple.__basicsize__)
    slots = np.frombuffer(memoryview(array), np.intp) >> 4 & _SLOTS - 1
    is_wanted = np.zeros(_SLOTS, np.bool_)
    is_wanted[np.fromiter(wanted, np.intp, len(wanted)) >> 4 & _SLOTS - 1] = True
    places: list[int] = np.flatnonzero(is_wanted[slots]).tolist()
    return [place for place in places if id(values[place]) in wanted]
