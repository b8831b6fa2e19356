"""Workers import modules one after the other, and the table's changes to a module are made at once.

Modules of torch.distributed import each other in circles. Python's import locks break such a
circle, where two threads meet in it, by showing one of them a module that is half made. So a
worker that imports something new takes its turn first; it waits as for everything else, and can
be interrupted. While it imports an interrupt is held back: modules that import each other can't be
imported again after one of them was cut short. Other threads, those that workers have started too,
are left alone.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment
from .turns import Turn

Function = Callable[..., Any]

import_turn = Turn("import")


def _install(patches: Patches) -> None:
    def load_over(load: Function) -> Function:
        @functools.wraps(load)
        def find_and_load(name: str, import_: Any) -> Any:
            with import_turn.taken(name), _whole():
                module = load(name, import_)
                table.imported(name, module)
                return module

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


def _whole() -> AbstractContextManager[None]:
    """Within it a worker is not interrupted on its own thread."""
    worker = current_worker_or_none()
    if worker is None or worker.thread_id != threading.get_ident():
        return nullcontext()
    return worker.held_back()


table.add(
    Row(
        state="modules being imported",
        treatment=Treatment.IN_TURNS,
        meaning="Workers import new modules one after the other, each to its end: Stop waits for "
        "it, ten seconds at most.",
        test="tests/ccl/test_dist_imports.py",
        install=_install,
        in_own_process=True,  # on_import needs it, and Stop must not cut an import there either
        library="Python",
    )
)
