"""Names of other modules that are replaced while worker threads live, and put back after.

A `Patches` belongs to whoever made it and is used under that one's lock.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..runtime.errors import SessionError
from ..runtime.session import open_sessions
from ..runtime.user_code import is_library_file
from ..runtime.worker import Worker, current_worker_or_none


class ModuleOfWorkers(ModuleType):
    """A module that looks who asks; pickled by its name, as functions that name it need."""

    def __reduce__(self) -> Any:
        return importlib.import_module, (object.__getattribute__(self, "__name__"),)


class ModuleWithProperties(ModuleOfWorkers):
    """A module of which some attributes are properties of its class.

    CPython 3.14 reads what a module has by that name itself, once code has asked two times
    (python/cpython#156399), but for classes that have a `__getattr__`.
    """

    if sys.version_info >= (3, 14):

        def __getattr__(self, name: str) -> Any:
            return ModuleType.__getattribute__(self, name)  # fails again, with its own words


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

    def change_class(self, thing: Any, kind: type) -> None:
        """Give an object another class, until all is put back or somebody gives it one."""
        before = type(thing)
        thing.__class__ = kind

        def put_back() -> None:
            if isinstance(thing, kind):
                object.__setattr__(thing, "__class__", before)

        self.at_undo(put_back)

    def replaced(self) -> list[tuple[Any, Any]]:
        """What was replaced, each with what is there now."""
        return [(original, new) for _, _, original, new, _ in self._undo if original is not new]

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


def shares_process(worker: Worker) -> bool:
    """Whether other workers are threads of a worker's process: of its session, or of another."""
    return len(worker.peers) > 1 or len(open_sessions()) > 1


def refused(what: str, why: str) -> Callable[[Any], Any]:
    """For `Patches.replace`: an error on a worker that shares its process with others."""

    def over(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            worker = current_worker_or_none()
            if worker is not None and shares_process(worker):
                raise SessionError(
                    f"{what} {why}, and workers are threads of it: start the session with "
                    "engine='processes' (%disco_session --engine processes)"
                )
            return original(*args, **kwargs)

        return refuse

    return over


class BoundNames:
    """Which names of loaded modules are bound to what is replaced, by ``from owner import name``.

    Each session of threads asks for it twice, of all modules there are, which have 50,000 names
    and more. What libraries have bound is looked for once: a module that is installed is looked
    through again when it has more names, or fewer. The user's own modules are always looked
    through.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, Any] = {}  # what is looked for, by its id
        # of each module that was looked through: how many names it had, and those that are bound
        self._known: dict[int, tuple[weakref.ref[ModuleType], int, tuple[str, ...]]] = {}

    def replace(self, modules: Iterable[ModuleType], pairs: Collection[tuple[Any, Any]]) -> None:
        """Have every name of `modules` that is bound to the first of a pair mean the second.

        Not those of this package, which knows what was there before.
        """
        news = {id(old): new for old, new in pairs}
        if not news:
            return
        if not news.keys() <= self._wanted.keys():
            self._known.clear()  # something was never looked for
        self._wanted.update((id(value), value) for pair in pairs for value in pair)
        for names, bound in self._look(modules):
            for name in bound:
                value = names.get(name)
                if id(value) in news:
                    names[name] = news[id(value)]

    def put_back(self, modules: Iterable[ModuleType], pairs: Collection[tuple[Any, Any]]) -> None:
        """Have the names mean the first of a pair again; the second will not come back."""
        if pairs:
            self.replace(modules, [(new, old) for old, new in pairs])
            self._wanted = {id(old): old for old, _ in pairs}

    def _look(
        self, modules: Iterable[ModuleType]
    ) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
        """The namespaces that are concerned, each with names that are or were bound."""
        new: list[tuple[ModuleType, dict[str, Any], int]] = []
        for module in modules:
            names = getattr(module, "__dict__", None)
            if type(names) is not dict:
                continue
            ref, size, bound = self._known.get(id(module), _UNKNOWN)
            if size != len(names) or ref() is not module:
                new.append((module, names, len(names)))  # an import may add some meanwhile
            elif bound:
                yield names, bound
        concerned = _mention([names for _, names, _ in new], self._wanted)
        for index, (module, names, size) in enumerate(new):
            bound = ()
            if index in concerned and not str(names.get("__name__")).startswith(_OWN):
                bound = tuple(n for n in list(names) if id(names.get(n)) in self._wanted)
                yield names, bound
            if is_library_file(str(names.get("__file__", ""))):
                self._known[id(module)] = weakref.ref(module), size, bound


_OWN = f"{__package__}."
_UNKNOWN: Any = (lambda: None, -1, ())
_SLOTS = 1 << 18


def _mention(namespaces: Sequence[dict[str, Any]], wanted: Collection[int]) -> set[int]:
    """Which of the namespaces have names that are bound to objects of these ids.

    An id is an object's address, and a tuple is an array of addresses: numpy looks at them where
    they are, and only those that share a slot with one of the wanted become numbers of Python.
    """
    found: list[Any] = []
    ends: list[int] = []  # of each namespace's part of them
    for names in namespaces:
        found += names.values()
        ends.append(len(found))
    if not found:
        return set()
    values = tuple(found)
    array = (ctypes.c_ssize_t * len(values)).from_address(id(values) + tuple.__basicsize__)
    slots = np.frombuffer(memoryview(array), np.intp) >> 4 & _SLOTS - 1
    is_wanted = np.zeros(_SLOTS, np.bool_)
    is_wanted[np.fromiter(wanted, np.intp, len(wanted)) >> 4 & _SLOTS - 1] = True
    places: list[int] = np.flatnonzero(is_wanted[slots]).tolist()
    return {bisect.bisect_right(ends, n) for n in places if id(values[n]) in wanted}
