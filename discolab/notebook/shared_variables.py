"""Tells of a module of the user's that is one for all workers and should not be, or the reverse.

Worker threads have one module for all where the notebook has imported it, or where it is in another
folder than the notebook's, a script's, or one that they have added to `sys.path`. One with a
function such as ``def init(rank): global RANK; RANK = rank`` gives every worker the rank of the
last one, one with ``RANK = int(os.environ.get("RANK", 0))`` that of whoever has imported it, and
nothing fails. Where each has its own, the notebook may give workers objects of its own classes.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeGuard

from ..isolation.own_globals import written_names
from ..isolation.worker_modules import (
    WorkerModule,
    is_notebooks_class,
    names_imported,
    notebooks_folders,
)
from ..runtime.user_code import is_library_file
from ..runtime.worker import Worker
from .sessions import Sessions

_MOST = 4  # variables that are named
_IN_ENVIRONMENT = {"RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"}
_IN_TORCH = {"get_rank", "get_node_local_rank", "get_local_rank", "current_device"}


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
        seen = (len(sys.modules), *(_how_many_names(worker) for worker in workers))
        if not workers or seen == self._seen:
            return
        self._seen = seen
        for module in _users_modules(workers):
            name, spec = module.__name__, module.__spec__
            if name in self._told or (spec is not None and self._looked_at.get(name) is spec):
                continue
            self._looked_at[name] = spec
            written, read = sorted(written_names(module)), _read_of_a_rank(module)
            if written or read:
                self._told.add(name)
                print(_words(module, written, read), file=sys.stderr)
        for worker in workers:
            for name, value in worker.namespace.copy().items():
                kind = type(value)
                if is_notebooks_class(kind, worker) and kind.__module__ not in self._told:
                    self._told.add(kind.__module__)
                    print(_words_of_object(name, kind), file=sys.stderr)


def _how_many_names(worker: Worker) -> int:
    return len(worker.namespace) + len(names_imported(worker))


def _users_modules(workers: Sequence[Worker]) -> list[ModuleType]:
    """The modules of no library that they have imported, or have names of; one for all of them."""
    found: dict[str, ModuleType] = {}
    names: dict[str, Any] = {}
    for worker in workers:
        names |= {name: sys.modules.get(name) for name in names_imported(worker)}
    waiting = [module for w in workers for module in _named(w.namespace)] + list(_named(names))
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


def _read_of_a_rank(module: ModuleType) -> list[str]:
    """The variables that it has made of a rank as it was imported, and of those."""
    try:
        with open(str(module.__file__), "rb") as file:
            waiting: list[ast.AST] = [ast.parse(file.read())]
    except (OSError, ValueError, SyntaxError):
        return []
    found: list[str] = []
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if any(_is_a_rank(part, found) for part in ast.walk(node.value)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [t.id for target in targets for t in ast.walk(target) if _is_new(t, found)]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting[:0] = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
    return found


def _is_new(target: ast.AST, found: list[str]) -> TypeGuard[ast.Name]:
    return isinstance(target, ast.Name) and target.id not in found


def _is_a_rank(part: ast.AST, made_of_it: list[str]) -> bool:
    match part:
        case ast.Constant(value=str(name)):
            return name in _IN_ENVIRONMENT
        case ast.Name(id=name):
            return name in made_of_it or name in _IN_TORCH
        case ast.Attribute(attr=name):
            return name in _IN_TORCH
    return False


def _words(module: ModuleType, written: list[str], read: list[str]) -> str:
    folder = _folder(module)
    own = "%disco_session --engine processes"
    if folder in notebooks_folders():
        own = f"restart the kernel and import it in %%disco cells alone; or {own}"
    elif folder not in sys.path:  # what is there already is not a worker's own
        path = f"sys.path.insert(0, {folder!r})"
        own = f"%disco_restart, then {path} in a %%disco cell before the import; or {own}"
    said = []
    if written:
        said.append(f"its functions set {_listed(written)}")
    if read := [name for name in read if name not in written]:
        said.append(f"a rank was read for {_listed(read)} as it was imported")
    return (
        f"{module.__name__}: {', and '.join(said)}, which workers share that are threads. "
        f"To give each its own: {own}"
    )


def _words_of_object(name: str, kind: type) -> str:
    return (
        f"{name} is of the notebook's class {kind.__name__}: workers have executed "
        f"{kind.__module__} for themselves before the notebook did, so theirs is another class. "
        "To have one for all: %disco_restart, now that the notebook has imported it"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"


def _folder(module: ModuleType) -> str:
    """The folder from which Python imports it."""
    folder = os.path.dirname(os.path.abspath(str(module.__file__)))
    inner = module.__name__.count(".") + (os.path.basename(str(module.__file__)) == "__init__.py")
    for _ in range(inner):
        folder = os.path.dirname(folder)
    return folder
