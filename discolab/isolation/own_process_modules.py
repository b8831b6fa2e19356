"""Modules of a script in a process that its worker has for itself: executed anew, as in a new one.

There is one worker, so what stands in `sys.modules` is its own. But cells may have imported what
the script imports, from its folder or under the same name, and left state in it; and a second run
must not find what the first has imported. So `begin` takes such modules away and `end` gives the
cells theirs back. Modules in C stay, as the same file can't be loaded twice.

worker_modules.py calls both, and does the same where workers are threads. All state here is of the
process's own worker, and of the one script that it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Self, SupportsIndex

from ..runtime.worker import Worker, has_own_process
from . import table
from .module_places import is_beside
from .programs import follow
from .table import Row, Treatment

_notebooks: list[str] = []  # the notebook's `sys.path`, which this process's has followed
_taken: dict[str, ModuleType] = {}  # what cells have imported
_before: set[str] = set()  # names of modules that stay
_path_before: list[str] = []
_folder_before = ""
_others: frozenset[str] = frozenset()


def path_of_notebook(before: list[str], now: list[str]) -> None:
    """The notebook's `sys.path` has changed."""
    follow(sys.path, before, now)
    follow(_notebooks, before, now)


class _ScriptPath(list[str]):
    """`sys.path` of a script, which may add folders in which there are others of known names."""

    def append(self, entry: str) -> None:
        super().append(entry)
        _take_away([entry])

    def insert(self, index: SupportsIndex, entry: str) -> None:
        super().insert(index, entry)
        _take_away([entry])

    def extend(self, entries: Iterable[str]) -> None:
        self[len(self) :] = entries

    def __iadd__(self, entries: Iterable[str]) -> Self:  # type: ignore[misc,override]
        self.extend(entries)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        before = list(self)
        super().__setitem__(index, value)
        _take_away([entry for entry in self if entry not in before])


def begin(folder: str, others: frozenset[str]) -> None:
    """A script begins.

    Parameters
    ----------
    folder
        The script's.
    others
        Names that are never those of a user's modules.
    """
    global _path_before, _folder_before, _others
    importlib.invalidate_caches()
    _path_before, _folder_before, _others = sys.path, os.getcwd(), others
    _before.update(sys.modules)
    sys.path = _ScriptPath([folder, *sys.path])
    _take_away([folder, *_folders()])


def _take_away(folders: list[str]) -> None:
    """Modules that cells have imported from these folders, or under a name that is found there."""
    tops = {name.partition(".")[0] for name in _before} - _others
    gone = {top for top in tops if _is_anothers(top, folders)}
    for name in [name for name in _before if name.partition(".")[0] in gone]:
        _before.remove(name)
        if name in sys.modules:
            _taken[name] = sys.modules.pop(name)


def end() -> None:
    """The script has ended: what it has imported goes, and cells have their modules again."""
    new, folders = sys.modules.keys() - _before, _folders()
    specs = {top: _spec(top, sys.modules.get(top)) for top in {n.partition(".")[0] for n in new}}
    for name in new:
        spec = specs[name.partition(".")[0]]
        if spec is not None and is_beside(spec, folders):
            sys.modules.pop(name, None)
    sys.modules.update(_taken)
    sys.path = _path_before
    _taken.clear()
    _before.clear()


def _folders() -> list[str]:
    """Where a user's own modules may be, other than beside the script."""
    added = [entry for entry in sys.path if entry not in _notebooks]
    return [os.getcwd(), *added, *(os.path.join(_folder_before, entry) for entry in added)]


def _is_anothers(top: str, folders: list[str]) -> bool:
    """Whether a module of this name is a user's, or would be if it were imported now."""
    module = sys.modules.get(top)
    if module is None or table.is_half_made(module):
        return False
    known, found = _spec(top, module), PathFinder.find_spec(top, folders)
    if found is not None:
        found = PathFinder.find_spec(top)  # another folder may come first
    if known is not None and isinstance(known.loader, ExtensionFileLoader):
        return found is not None and is_beside(found, folders) and found.origin != known.origin
    return any(spec is not None and is_beside(spec, folders) for spec in (known, found))


def _spec(name: str, module: Any) -> ModuleSpec | None:
    """How a module was found; one that has put another object in its place is found again."""
    spec = getattr(module, "__spec__", None)
    if isinstance(spec, ModuleSpec) and spec.name == name:
        return spec
    return PathFinder.find_spec(name) if module is not None else None


def _enter(worker: Worker) -> None:
    if has_own_process(worker):
        _notebooks[:] = sys.path


table.add(
    Row(
        state="modules of a script in a worker process",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that has a process for itself executes anew for each script what is "
        "beside it, in folders that are added to `sys.path`, and in the working folder, also where "
        "cells have imported it before. At the script's end cells have theirs again.",
        test="",  # tests/isolation/test_worker_modules.py; a row is not left out of other processes
        enter=_enter,
        in_own_process=True,
        library="Python",
    )
)
