"""``__main__`` as a worker sees it: its own cells or script, as in a process of its own.

pickle finds a class or function of a program by its name in ``sys.modules["__main__"]``, which is
the notebook's. While the row is installed, that module answers a worker's thread from that worker's
program first. Only attributes of the module object are concerned; nobody's global names are.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment


def _install(patches: Patches) -> None:
    """Have ``__main__`` look who asks; left alone where its class can't be changed."""
    module = sys.modules.get("__main__")
    if module is None:
        return
    kind = type(module)
    try:
        module.__class__ = type("ModuleOfWorkers", (_OfWorkers, kind), {})
    except TypeError:
        return

    def put_back() -> None:
        if isinstance(module, _OfWorkers):
            object.__setattr__(module, "__class__", kind)

    patches.at_undo(put_back)


class _OfWorkers(ModuleType):
    """A module whose attributes are, on a worker, the variables of the worker's program.

    While a worker runs a script, ``__file__`` and its like are the script's, as multiprocessing
    and `inspect` want them; cells have none.
    """

    def __getattribute__(self, name: str) -> Any:
        worker = current_worker_or_none()
        if worker is not None:
            program = worker.program
            if program is not None:
                if name == "__dict__":
                    return program
                if name in program:
                    return program[name]
            elif name in worker.namespace and not name.startswith("__"):
                return worker.namespace[name]
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        names = _names_here(name)
        if names is None:
            super().__setattr__(name, value)
        else:
            names[name] = value

    def __delattr__(self, name: str) -> None:
        names = _names_here(name)
        if names is None or name not in names:
            super().__delattr__(name)
        else:
            del names[name]


def _names_here(name: str) -> dict[str, Any] | None:
    """The variables of the calling worker's program, of which `name` is or may be one."""
    worker = current_worker_or_none()
    if worker is None or (worker.program is None and name.startswith("__")):
        return None
    return worker.namespace if worker.program is None else worker.program


table.add(
    Row(
        state="`__main__`",
        treatment=Treatment.PER_WORKER,
        meaning="Attributes of the module `__main__` are the variables of the worker's cells or "
        "script, so that pickle and multiprocessing find its classes and its file.",
        test="tests/isolation/test_programs.py::test_a_script_finds_what_torchrun_gives",
        install=_install,
        in_own_process=True,
        library="Python",
    )
)
