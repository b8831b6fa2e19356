"""``__main__`` as a worker sees it: its own cells or script, as in a process of its own.

pickle finds a class or function of a program by its name in ``sys.modules["__main__"]``, which is
the notebook's. While `install`ed, that module answers a worker's thread from that worker's
program first. Only attributes of the module object are concerned; nobody's global names are.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..runtime.worker import current_worker_or_none

_before: list[tuple[ModuleType, type[ModuleType]]] = []


def install() -> None:
    """Have ``__main__`` look who asks; left alone where its class can't be changed."""
    module = sys.modules.get("__main__")
    if module is None or _before:
        return
    kind = type(module)
    try:
        module.__class__ = type("ModuleOfWorkers", (_OfWorkers, kind), {})
    except TypeError:
        return
    _before.append((module, kind))


def uninstall() -> None:
    """Put its class back."""
    while _before:
        module, kind = _before.pop()
        if isinstance(module, _OfWorkers):
            object.__setattr__(module, "__class__", kind)


class _OfWorkers(ModuleType):
    """A module whose attributes are, on a worker, the variables of the worker's program."""

    def __getattribute__(self, name: str) -> Any:
        worker = current_worker_or_none()
        if worker is not None and not name.startswith("__"):
            names = worker.namespace if worker.program is None else worker.program
            if name in names:
                return names[name]
        return super().__getattribute__(name)
