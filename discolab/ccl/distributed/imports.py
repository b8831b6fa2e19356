"""Workers import modules one after the other, and what needs a change in a module gets it at once.

Modules of torch.distributed import each other in circles. Python's import locks break such a
circle, where two threads meet in it, by showing one of them a module that is half made. So a
worker that imports something new takes its turn first; it waits as for everything else, and can
be interrupted. Other threads, those that workers have started too, are left alone.

`on_import` names functions to be called with a module that has just been made, before anybody
else sees it. `_guard` guards `_holder`, which says whose turn it is and in which command; a turn
that an interrupt tore out of ends with its command.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.worker import Worker, current_worker_or_none
from .patches import Patches

Turn = tuple[Worker, int]

on_import: dict[str, Callable[[ModuleType, Patches], None]] = {}

_guard = threading.Lock()
_holder: list[Turn] = []
_waiting: set[Worker] = set()


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _guard
    _guard = threading.Lock()
    _holder.clear()
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def install(patches: Patches) -> None:
    """Have imports wait for each other; change the modules that are there already."""
    bootstrap = importlib._bootstrap
    patches.replace(bootstrap, "_find_and_load", lambda load: _over(load, patches))
    for name, change in on_import.items():
        if name in sys.modules:
            change(sys.modules[name], patches)


def _over(load: Callable[..., Any], patches: Patches) -> Callable[..., Any]:
    @functools.wraps(load)
    def find_and_load(name: str, import_: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None or worker.thread_id != threading.get_ident():
            return _changed(name, load(name, import_), patches)
        turn = (worker, worker.executed)
        if turn in _holder:  # a module imports another one
            return _changed(name, load(name, import_), patches)
        try:
            if not _take(turn):
                _waiting.add(worker)
                worker.wait_for(lambda: _take(turn), f"its turn to import {name}")
            return _changed(name, load(name, import_), patches)
        finally:
            _waiting.discard(worker)
            _end(turn)

    return find_and_load


def _changed(name: str, module: Any, patches: Patches) -> Any:
    change = on_import.get(name)
    if change is not None:
        change(module, patches)
    return module


def _take(turn: Turn) -> bool:
    with _guard:
        if _holder:
            worker, ordinal = _holder[0]
            if _holder[0] != turn and worker.executed == ordinal and not worker.ended:
                return False
        _holder[:] = [turn]
        return True


def _end(turn: Turn) -> None:
    with _guard:
        if turn in _holder:
            _holder.clear()
    for worker in tuple(_waiting):
        worker.wake()
