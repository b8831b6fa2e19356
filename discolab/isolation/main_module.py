"""``__main__`` as a worker sees it: its own cells or script, as in a process of its own.

pickle, dataclasses, `typing.get_type_hints`, inspect and multiprocessing look for the names of a
program in ``sys.modules["__main__"]``, which is the notebook's. While the row is installed, that
module answers a worker's thread from that worker's program. Only attributes of the module object
are concerned; nobody's global names are.

A worker that has a process for itself has a module of its own there, whose variables those of its
cells are; a script brings another one for as long as it runs (`program`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from ..runtime.worker import Worker, current_worker_or_none, has_own_process
from . import table
from .patches import ModuleOfWorkers, Patches
from .table import Row, Treatment

_OF_MODULE = frozenset({"__class__", "__reduce__", "__reduce_ex__"})


def _install(patches: Patches) -> None:
    """Have ``__main__`` look who asks; left alone where its class can't be changed."""
    module = sys.modules.get("__main__")
    if module is None:
        return
    with suppress(TypeError):
        patches.change_class(module, type("ModuleOfWorkers", (_OfWorkers, type(module)), {}))


class _OfWorkers(ModuleOfWorkers):
    """A module whose attributes are, on a worker, the variables of the worker's program."""

    def __getattribute__(self, name: str) -> Any:
        worker = current_worker_or_none()
        if worker is None or name in _OF_MODULE:
            return super().__getattribute__(name)
        names = worker.namespace if worker.program is None else worker.program
        if name == "__dict__":
            return names
        if name in names:
            return names[name]
        if worker.program is not None and not hasattr(ModuleType, name):
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return super().__getattribute__(name)  # a cell can name what the notebook has defined

    def __setattr__(self, name: str, value: Any) -> None:
        worker = current_worker_or_none()
        if worker is None or name in _OF_MODULE:
            super().__setattr__(name, value)
        else:
            (worker.namespace if worker.program is None else worker.program)[name] = value

    def __delattr__(self, name: str) -> None:
        worker = current_worker_or_none()
        if worker is None:
            super().__delattr__(name)
            return
        names = worker.namespace if worker.program is None else worker.program
        if name not in names:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        del names[name]


@contextmanager
def running(worker: Worker, module: ModuleType) -> Iterator[dict[str, Any]]:
    """Have a module be ``__main__`` of a worker; gives its variables."""
    before = sys.modules.get("__main__")
    worker.program = vars(module)
    if has_own_process(worker):
        sys.modules["__main__"] = module
    try:
        yield worker.program
    finally:
        worker.program = None
        if has_own_process(worker) and before is not None:
            sys.modules["__main__"] = before


def _in_child(worker: Worker) -> None:
    """pickle looks for the program's functions there, those of a pool of processes too."""
    module = ModuleType("__main__")
    if worker.program is None:  # a cell can name what the notebook has defined
        vars(module).update(vars(sys.modules["__main__"]), **worker.namespace)
    else:
        vars(module).update(worker.program)
    sys.modules["__main__"] = module


def _enter(worker: Worker) -> None:
    if has_own_process(worker):
        module = ModuleType("__main__")
        vars(module).update(worker.namespace)
        worker.namespace = vars(module)
        sys.modules["__main__"] = module


table.add(
    Row(
        state="`__main__`",
        treatment=Treatment.PER_WORKER,
        meaning="The module `__main__` has the variables of the worker's cells or script, so that "
        "pickle, dataclasses and `typing.get_type_hints` find its classes, and its `__file__`.",
        test="tests/isolation/test_programs.py::test_a_script_finds_what_torchrun_gives",
        install=_install,
        in_child=_in_child,
        library="Python",
    )
)
table.add(
    Row(
        state="`__main__` of a worker process",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that has a process for itself has a real module `__main__`.",
        test="",  # tests/isolation/test_own_process.py; a row can't be left out of other processes
        enter=_enter,
        in_own_process=True,
        library="Python",
    )
)
