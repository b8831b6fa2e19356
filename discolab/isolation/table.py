"""The table of what a process keeps once, and how workers that are threads live with it.

One `Row` for each piece of state that torch, Python or a library keeps for the process. The rows
say how a worker gets its own, waits for its turn, is refused, or shares it on purpose; each stands
in the file that carries it out and is entered with `add` when that file is imported. The table
drives what is changed while workers live (`install`, `uninstall`), docs/isolation.md, and the
tests: each row names one that fails without it.

`install` and `uninstall` are called under the lock of engines/hooks.py, which guards `_installed`
and `_bound`; `enter` and `leave` run on a worker's own thread.
"""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ..runtime.worker import Worker, current_worker_or_none
from .patches import BoundNames, ModuleOfWorkers, Patches


class Treatment(enum.Enum):
    """What becomes of a piece of state that a process has once."""

    PER_WORKER = "per worker"
    IN_TURNS = "in turns"
    REFUSED = "refused"
    SHARED = "shared"


Change = Callable[[ModuleType, Patches], None]


@dataclass(frozen=True)
class Row:
    """One piece of process-wide state.

    Attributes
    ----------
    state
        What it is, in the words of the library that keeps it: the row's name.
    treatment
        How workers live with it.
    meaning
        What a program sees, in a sentence or two; for `REFUSED` the way out, for `SHARED` why that
        is right, and what to do instead. Markdown.
    test
        A test that fails without the row: ``tests/isolation/test_x.py::test_y``. "" for state that
        is shared and about which nothing is done.
    install
        Changes what is there already; called before the first worker's first command. What it
        replaces it replaces through the `Patches`, which are undone after the last worker.
    on_import
        Changes to modules, by their names: made as soon as a worker or the controller imports one,
        before anybody else sees it, or at once if it is there.
    enter, leave
        Called on each worker's own thread before its first and after its last command.
    in_child
        Called in a process that was forked on a worker's thread, when all is put back there: the
        worker's state becomes that process's, as if it had been forked in a process of the
        worker's own. What worker_local.py keeps does so by itself.
    in_own_process
        Whether a worker that has a process for itself gets this too. Only what the session itself
        needs there; state that such a process keeps is the worker's own anyway.
    library
        The library whose state it is; rows of one library stand together in the docs.
    """

    state: str
    treatment: Treatment
    meaning: str
    test: str = ""
    install: Callable[[Patches], None] | None = None
    on_import: Mapping[str, Change] = field(default_factory=dict)
    enter: Callable[[Worker], None] | None = None
    leave: Callable[[Worker], None] | None = None
    in_child: Callable[[Worker], None] | None = None
    in_own_process: bool = False
    library: str = "torch"


# In `Worker.process_state`: names of what a script's end puts back as it was begin with this.
OF_SCRIPT = "of the script: "

_rows: dict[str, Row] = {}
_installed: dict[str, Patches] = {}
_bound = BoundNames()
at_child: list[Callable[[], None]] = []
"""Called in a process that was forked, after all has been put back there; on any thread."""

_heirs: dict[str, Callable[[Any], None]] = {}  # by keys of `Worker.process_state`
_hooks: dict[str, list[Row]] = {}  # installed rows, by the module that they change
_changed: dict[tuple[str, str], ModuleType] = {}  # by row and name: the module that was changed


def add(row: Row) -> None:
    """Enter a row; for as long as the process lives."""
    if row.state in _rows:
        raise ValueError(f"the table of isolation has a row {row.state!r} already")
    _rows[row.state] = row


def rows() -> tuple[Row, ...]:
    """The whole table, in the order of entry."""
    return tuple(_rows.values())


def install(*, own_process: bool, loaded: Mapping[str, ModuleType]) -> None:
    """Carry out the rows that are not in place yet.

    Parameters
    ----------
    own_process
        That the worker has this process for itself: only the rows that it needs even so.
    loaded
        The modules that are there; normally `sys.modules`.
    """
    made: list[Patches] = []
    for row in rows():
        if row.state in _installed or (own_process and not row.in_own_process):
            continue
        patches = _installed[row.state] = Patches()
        made.append(patches)
        if row.install is not None:
            _attempt(row, lambda row=row, patches=patches: row.install(patches))  # type: ignore[misc]
        for name in row.on_import:
            _hooks.setdefault(name, []).append(row)
            module = loaded.get(name)
            if module is not None and not is_half_made(module):
                _change(row, name, module)
    pairs = [pair for patches in made for pair in patches.everywhere]
    _bound.replace(tuple(loaded.values()), pairs)


def uninstall() -> None:
    """Put all back in the opposite order; what others changed since is left alone."""
    pairs = [pair for patches in _installed.values() for pair in patches.everywhere]
    _bound.put_back(sys.modules.copy().values(), pairs)
    _hooks.clear()
    _changed.clear()
    while _installed:
        _, patches = _installed.popitem()
        patches.undo()


def imported(name: str, module: ModuleType, *, anew: bool = False) -> None:
    """A module may have just been made, or made `anew` by a reload: carry out what rows change."""
    if name not in _hooks or is_half_made(module):
        return
    if isinstance(module, ModuleOfWorkers) and not (anew and current_worker_or_none() is None):
        return  # Python asks for a package again with each of its modules; a worker reloads its own
    for row in tuple(_hooks[name]):
        if anew or _changed.get((row.state, name)) is not module:
            _change(row, name, module)


def enter(worker: Worker) -> None:
    """On a worker's own thread, before its first command."""
    for row in rows():
        if row.enter is not None and row.state in _installed:
            row.enter(worker)


def leave(worker: Worker) -> None:
    """On a worker's own thread, after its last command."""
    for row in reversed(rows()):
        if row.leave is not None and row.state in _installed:
            row.leave(worker)


def installed() -> frozenset[str]:
    """The states whose rows are in place."""
    return frozenset(_installed)


def replaced() -> Iterator[tuple[Any, Any]]:
    """What is replaced now by what, both of them whatever it may be."""
    for patches in tuple(_installed.values()):
        yield from patches.replaced()


def inherits(key: str, function: Callable[[Any], None]) -> None:
    """Have a function make what a worker has under a key of its `process_state` the process's.

    It is called in a process that the worker has forked, when all is put back there.
    """
    _heirs[key] = function


def inherit(worker: Worker, states: Container[str]) -> None:
    """In a process that was forked on a worker's thread: make the worker's state the process's.

    Only of those `states` whose rows were in place; the others are the process's already, as they
    are in a worker process that has had no session of threads of its own.
    """
    for row in rows():
        if row.in_child is not None and row.state in states:
            row.in_child(worker)
    for key, value in worker.process_state.copy().items():
        if key in _heirs:
            _heirs[key](value)


def _change(row: Row, name: str, module: ModuleType) -> None:
    patches = _installed.get(row.state)
    if patches is not None:
        _changed[row.state, name] = module
        _attempt(row, lambda: row.on_import[name](module, patches))


def _attempt(row: Row, change: Callable[[], None]) -> None:
    """Make a change; one that this version of a library can't have is told by its name."""
    try:
        change()
    except (AttributeError, KeyError) as exc:
        warnings.warn(
            f"discolab can't make {row.state} safe for worker threads with torch "
            f"{torch.__version__}: {exc}. Do not use it on several workers at once, or start the "
            "session with engine='processes'",
            RuntimeWarning,
            stacklevel=2,
        )


def is_half_made(module: ModuleType | None) -> bool:
    """Whether somebody imports it at this moment."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
