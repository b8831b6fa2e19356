"""Tells of a module of the user's that keeps in a variable what may be a rank's own.

Worker threads have one module for all, but for those beside a script and in folders that they have
added to `sys.path`. One with a function such as ``def init(rank): global RANK; RANK = rank`` gives
every worker the rank of the last one, and nothing fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ..isolation.own_globals import written_names
from ..isolation.worker_modules import WorkerModule
from ..runtime.user_code import is_library_file
from .sessions import Sessions

_MOST = 4  # variables that are named


class SharedVariables:
    """Looks at what cells have brought into the workers' namespaces; tells once of each module."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._told: set[str] = set()
        self._looked_at: dict[str, Any] = {}  # the specs of modules, which a reload makes anew
        self._seen: tuple[int, ...] = ()

    def tell(self) -> None:
        """At the end of a notebook's cell, on its thread."""
        workers = [
            worker
            for session in self._sessions.by_name.values()
            if not session.closed and len(session.workers_here()) > 1
            for worker in session.workers_here().values()
        ]
        seen = (len(sys.modules), *(len(worker.namespace) for worker in workers))
        if not workers or seen == self._seen:
            return
        self._seen = seen
        for module in _users_modules(worker.namespace for worker in workers):
            name, spec = module.__name__, module.__spec__
            if name in self._told or (spec is not None and self._looked_at.get(name) is spec):
                continue
            self._looked_at[name] = spec
            if names := sorted(written_names(module)):
                self._told.add(name)
                print(_words(module, names), file=sys.stderr)


def _users_modules(namespaces: Iterable[Mapping[str, Any]]) -> list[ModuleType]:
    """The modules of no library that these lead to, and that are one for all workers."""
    found: dict[str, ModuleType] = {}
    waiting = [module for names in namespaces for module in _named(names)]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if module.__name__ in found or not file or is_library_file(os.path.abspath(file)):
            continue
        found[module.__name__] = module
        waiting += _named(vars(module))
    return list(found.values())


def _named(names: Mapping[str, Any]) -> Iterator[ModuleType]:
    """The modules that variables are, or come from."""
    for value in dict(names).values():
        if isinstance(value, ModuleType):
            module: Any = value
        else:
            name = getattr(value, "__module__", None) if callable(value) else None
            module = sys.modules.get(name) if isinstance(name, str) else None
        own = isinstance(module, WorkerModule) or getattr(module, "__name__", "") == "__main__"
        if isinstance(module, ModuleType) and not own:
            yield module


def _words(module: ModuleType, names: list[str]) -> str:
    folder = _folder(module)
    own = "%disco_session --engine processes"
    if folder not in sys.path:  # what is there already is not a worker's own
        path = f"sys.path.insert(0, {folder!r})"
        own = f"%disco_restart, then {path} in a %%disco cell before the import; or {own}"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (
        f"{module.__name__}: its functions set {', '.join(names[:_MOST])}{more}, which workers "
        f"share that are threads. To give each its own: {own}"
    )


def _folder(module: ModuleType) -> str:
    """The folder from which Python imports it."""
    folder = os.path.dirname(os.path.abspath(str(module.__file__)))
    inner = module.__name__.count(".") + (os.path.basename(str(module.__file__)) == "__init__.py")
    for _ in range(inner):
        folder = os.path.dirname(folder)
    return folder
