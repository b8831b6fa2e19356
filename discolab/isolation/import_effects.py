"""What a module sets while it is imported, each worker has that imports it.

An installed module is executed once, on the thread that imports it first. In processes of their own
all workers would execute it: a module that calls ``torch.set_default_dtype(torch.float64)`` does so
for each. So what the settings of a worker were before and after each module is noted, and those
that a module has changed are set where another worker imports it later, or the notebook; once, as
Python executes a module once, and again in each script.

Random states are left out: what they are before and after does not tell whether a module has seeded
or drawn, so a seed reaches only the worker that imports the module first. Of switches that all
workers have together (switches.py) nothing is noted: a module sets those for all.

Whoever imports has the turn to import (imports.py), which guards `_effects`; it is read without.
"""

from __future__ import annotations

import decimal
import functools
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..runtime.interrupts import shield
from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
from .table import OF_SCRIPT, Row, Treatment

_DONE = f"{OF_SCRIPT}modules whose settings the worker has"
_DENORMAL, _ONE = 5e-324, 1.0


class _ImportedHere(threading.local):
    """Of each thread: the modules that it executes at this moment, the outermost first."""

    def __init__(self) -> None:
        self.notes: list[_Note] = []


@dataclass(eq=False)
class _Note:
    """What one module changes: `steps` are settings with their values, or modules within it.

    `again` has the settings that were set since the last look, and whether only to what they were
    already: another worker may have had something else.
    """

    last: dict[str, Any]
    steps: list[Any] = field(default_factory=list)
    again: dict[str, bool] = field(default_factory=dict)

    def look(self) -> dict[str, Any]:
        """Note what has changed since the last look; gives what it is now."""
        now = _settings_here()
        for name, value in now.items():
            before = self.last.get(name)
            if self.again.get(name) or (before is not value and before != value):
                self.steps.append((name, before, value))
        self.last = now
        self.again.clear()
        return now


_imported = _ImportedHere()
_SET_NOTHING = sys.stdlib_module_names | {"torch"}
_effects: dict[str, tuple[Any, ...]] = {}  # by the module's name: its note's steps
_notebooks: set[str] = set()  # the modules whose settings the notebook has
_active = False


# -- settings that a worker has for itself ---------------------------------------------------------


def _decimal_context() -> Any:
    here = decimal.getcontext()
    return here.prec, here.rounding, here.Emin, here.Emax


def _set_decimal_context(value: Any) -> None:
    here = decimal.getcontext()
    here.prec, here.rounding, here.Emin, here.Emax = value


def _change_start_method(before: str | None, after: str | None) -> None:
    """A module that makes a lock decides for the default one, where none is set yet."""
    if before is not None or multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method(after, force=True)


def _device() -> Any:
    """As `torch.get_default_device`, which makes a tensor to know a GPU's number."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _flushes_denormals() -> bool:
    return not _DENORMAL * _ONE


Get = Callable[[], Any]
Change = Callable[[Any, Any], Any]
"""Given what a setting was before a module and after it."""

_settings: dict[str, tuple[Get, Change]] = {
    "the default dtype": (
        lambda: torch.get_default_dtype(),
        lambda _, v: torch.set_default_dtype(v),
    ),
    "the default device": (_device, lambda _, v: torch.set_default_device(v)),
    "gradients": (lambda: torch.is_grad_enabled(), lambda _, v: torch.set_grad_enabled(v)),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda _, v: torch.set_autocast_enabled("cpu", v),
    ),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda _, v: torch.set_autocast_dtype("cpu", v),
    ),
    "denormal numbers": (_flushes_denormals, lambda _, v: torch.set_flush_denormal(v)),
    "threads": (lambda: torch.get_num_threads(), lambda _, v: torch.set_num_threads(v)),
    "anomaly mode": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda _, v: torch.set_anomaly_enabled(*v),
    ),
    "numpy's errors": (lambda: np.geterr(), lambda _, v: np.seterr(**v)),
    "decimal": (_decimal_context, lambda _, v: _set_decimal_context(v)),
    "start method": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        _change_start_method,
    ),
}

_keys: set[str] = set()  # of settings that stand in `Worker.process_state`
_UNSET = object()


def of_worker(key: str) -> None:
    """Have what stands under a key of `Worker.process_state` count as a setting."""
    _keys.add(key)


def is_set(name: str, value: Any) -> None:
    """Who calls sets a setting: noted if a module does, whatever it was before."""
    for note in _imported.notes[-1:]:
        note.again[name] = note.again.get(name, True) and note.last.get(name, _UNSET) == value


def also(name: str, get: Get, change: Change) -> None:
    """Have something more count as a setting.

    Parameters
    ----------
    get
        Gets it for who calls.
    change
        Changes it for who calls, given what it was before a module and after it.
    """
    _settings[name] = get, change


def _settings_here() -> dict[str, Any]:
    """All settings of who calls."""
    values = {name: get() for name, (get, _) in _settings.items()}
    worker = current_worker_or_none()
    if worker is not None:
        values |= {key: worker.process_state.get(key, _UNSET) for key in list(_keys)}
    return values


def _change(name: str, before: Any, after: Any) -> None:
    worker = current_worker_or_none()
    if name in _settings:
        _settings[name][1](before, after)
    elif worker is not None and after is not _UNSET:
        worker.process_state[name] = after


# -- modules ---------------------------------------------------------------------------------------


def noted(name: str) -> AbstractContextManager[None]:
    """Around the execution of a module by the thread that calls."""
    plain = name.partition(".")[0] in _SET_NOTHING
    return _noted(name) if _active and not plain else nullcontext()


@contextmanager
def _noted(name: str) -> Iterator[None]:
    notes = _imported.notes
    note = _Note(notes[-1].look() if notes else _settings_here())
    notes.append(note)
    try:
        yield
        note.look()
    finally:
        notes.pop()
    if note.steps:
        _effects[name] = tuple(note.steps)
        _done_here().add(name)
    if notes:
        notes[-1].last = note.last
        if note.steps:
            notes[-1].steps.append(name)


def _done_here() -> set[str]:
    worker = current_worker_or_none()
    if worker is None:
        return _notebooks
    done: set[str] = worker.process_state.setdefault(_DONE, set())
    return done


def are_there() -> bool:
    """Whether any module has set something."""
    return bool(_effects)


def take_effect(name: str, children: Any = ()) -> None:
    """Who calls has imported a module, it may be one that was there already.

    Parameters
    ----------
    name
        Its whole name; the packages that it is in are imported with it.
    children
        What is imported from it, of which some may be modules.
    """
    if not _effects:
        return
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        _take_effect(".".join(parts[:end]))
    for child in children or ():
        _take_effect(f"{name}.{child}")


def _take_effect(name: str) -> None:
    steps, done = _effects.get(name), _done_here()
    if not _active or steps is None or name in done:
        return
    notes = _imported.notes
    with shield():  # what an interrupt cut off would never be set
        done.add(name)
        if notes:
            notes[-1].look()
        for step in steps:
            if isinstance(step, str):
                _take_effect(step)
            else:
                _change(*step)
        if notes:
            notes[-1].last = _settings_here()
            notes[-1].again.clear()
            notes[-1].steps.append(name)


def _switch(on: bool) -> None:
    global _active
    _active = on


def _install(patches: Patches) -> None:
    _switch(True)
    patches.at_undo(functools.partial(_switch, False))


table.add(
    Row(
        state="what a module sets while it is imported",
        treatment=Treatment.PER_WORKER,
        meaning="A module is executed once, by the worker that imports it first. What it sets of a "
        "worker's own (the default dtype and device, gradients, errors of numpy, …) each worker "
        "has that imports it, and the notebook if it does; what it seeds, the first worker alone: "
        "seed in the script or a cell. What a module has set that the notebook has imported before "
        "the session, when nobody noted it, is set in the notebook only, but for the default "
        "dtype, with which workers begin; set it in a cell too.",
        test="tests/isolation/test_imports.py::test_each_worker_has_what_a_module_sets",
        install=_install,
        library="Python",
    )
)
