"""Workers import modules one after the other, and what needs a change in a module gets it at once.

Modules of torch.distributed import each other in circles. Python's import locks break such a
circle, where two threads meet in it, by showing one of them a module that is half made. So a
worker that imports something new takes its turn first; it waits as for everything else, and can
be interrupted. While it imports an interrupt is held back: modules that import each other can't be
imported again after one of them was cut short. Other threads, those that workers have started too,
are left alone.

`on_import` names functions to be called with a module that has just been made, before anybody
else sees it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from ...runtime.worker import current_worker_or_none
from .patches import Patches
from .turns import Turn

Function = Callable[..., Any]

Change = Callable[[ModuleType, Patches], None]

on_import: dict[str, Change] = {}

import_turn = Turn("import")


def install(patches: Patches) -> None:
    """Have imports wait for each other; change the modules that are there already."""
    todo = dict(on_import)

    def load_over(load: Function) -> Function:
        @functools.wraps(load)
        def find_and_load(name: str, import_: Any) -> Any:
            with import_turn.taken(name), _whole():
                return _changed(name, load(name, import_), todo, patches)

        return find_and_load

    def wait_over(wait: Function) -> Function:
        @functools.wraps(wait)
        def lock_unlock_module(name: str) -> Any:  # the module is being made by another thread
            with import_turn.taken(name):
                return wait(name)

        return lock_unlock_module

    bootstrap = importlib._bootstrap
    patches.replace(bootstrap, "_find_and_load", load_over)
    patches.replace(bootstrap, "_lock_unlock_module", wait_over)
    for name in on_import:
        if name in sys.modules:
            _changed(name, sys.modules[name], todo, patches)


def _whole() -> AbstractContextManager[None]:
    """Within it a worker is not interrupted on its own thread."""
    worker = current_worker_or_none()
    if worker is None or worker.thread_id != threading.get_ident():
        return nullcontext()
    return worker.held_back()


def _changed(name: str, module: Any, todo: dict[str, Change], patches: Patches) -> Any:
    if name not in todo or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return module  # Python asks for a package again with each of its modules
    change = todo.pop(name, None)
    if change is not None:
        try:
            change(module, patches)
        except AttributeError as exc:  # another torch than those that this was made for
            warnings.warn(
                f"discolab can't make {name} of torch {torch.__version__} safe for worker threads: "
                f"{exc}. Do not use it on several workers at once",
                RuntimeWarning,
                stacklevel=2,
            )
    return module
