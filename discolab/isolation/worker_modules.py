"""Modules beside a script, which each worker executes for itself, as a process would.

A script's helpers keep what is a rank's own in variables: ``RANK = int(os.environ["RANK"])``, a
registry, a model, a seed that they set when they are imported. So while scripts run, what Python
finds in the script's folder, or in one that the script has added to `sys.path`, is a `WorkerModule`
in `sys.modules`. It answers each worker from a module of its own, which the worker executes at its
first import, from where its own `sys.path` has it; a script begins without any. A module that the
notebook imports, or has imported before, is the notebook's alone. The same holds for a folder from
which a worker loads with `torch.hub`, which adds it to `sys.path` meanwhile.

Modules in C, those of installed packages, and those that put another object in their place are the
process's: rows of their own say what becomes of their state. notebook/script.py calls `begin` and
`end` under its lock, and enters `fresh_imports` on each worker. A worker's RLock in `_locks` guards
the making of its modules, which its other threads wait for; `_guard` guards `_locks`, and that one
`WorkerModule` alone takes the place of a module that was imported before.
"""

from __future__ import annotations

import builtins
import copy
import functools
import importlib
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, cast

from torch import hub

from ..runtime.errors import SessionError
from ..runtime.interrupts import plain_lock, reentrant_lock
from ..runtime.user_code import is_library_file
from ..runtime.worker import Worker, current_worker_or_none, has_own_process
from . import table
from .imports import whole_name
from .patches import ModuleOfWorkers, Patches
from .programs import own_path, use_path
from .table import Row, Treatment

Function = Callable[..., Any]

_HERE = __name__.partition(".")[0]  # a script may stand beside this package's sources
_OF_SHELL = frozenset({"__class__", "__reduce__", "__reduce_ex__"})

_REPLACES_ITSELF = re.compile(r"sys\.modules\[__name__\]\s*(=|\.__class__)|modules\[__name__\]\s*=")

_path_before: list[str] | None = None  # `sys.path` before scripts ran; None: none runs
_in_use = False  # whether there may be any `WorkerModule`
# what a worker's own `sys.path` had before its script or hub folder
_own_before: weakref.WeakKeyDictionary[Worker, list[str]] = weakref.WeakKeyDictionary()
# while a worker runs a script: a `sys.path` that it had, and the names that it has looked for there
_looked_for: weakref.WeakKeyDictionary[Worker, tuple[list[str], set[str]]]
_looked_for = weakref.WeakKeyDictionary()
_locks: weakref.WeakKeyDictionary[Worker, Any] = weakref.WeakKeyDictionary()
_notebooks_lock = reentrant_lock()
_guard = plain_lock()
# under the worker's lock: by module and worker, the thread that makes it
_makers: dict[Any, int] = {}
_of_process: set[str] = set()  # modules beside scripts that are one for all workers


class WorkerModule(ModuleOfWorkers):
    """In `sys.modules`, for all workers: each finds a module of its own in it."""

    __slots__ = ("_notebooks", "_own", "_spec_of_own")

    def __init__(self, spec: ModuleSpec, notebooks: ModuleType | None = None) -> None:
        super().__init__(spec.name)
        set_state = functools.partial(object.__setattr__, self)
        set_state("_spec_of_own", spec)
        set_state("_notebooks", notebooks)
        set_state("_own", weakref.WeakKeyDictionary())

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_SHELL:
            return super().__getattribute__(name)
        worker = current_worker_or_none()
        module = _module_of(self, worker)
        if module is None:
            if name.startswith("__") and name.endswith("__"):
                # who looks through sys.modules, as inspect does, must not execute what is there
                notebooks = _module_of(self, None)
                return (
                    super().__getattribute__(name)
                    if notebooks is None
                    else getattr(notebooks, name)
                )
            try:
                module = _make(self, worker)
            except ModuleNotFoundError as exc:
                if exc.name != _state(self, "_spec_of_own").name:
                    raise
                raise AttributeError(f"{exc} on this worker, so no {name!r} in it") from None
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = _module_of(self, current_worker_or_none())
        if module is None:
            super().__setattr__(name, value)  # Python, when it makes the module
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        worker = current_worker_or_none()
        delattr(_module_of(self, worker) or _make(self, worker), name)


def _state(shell: WorkerModule, name: str) -> Any:
    return object.__getattribute__(shell, name)


def _module_of(shell: WorkerModule, worker: Worker | None) -> ModuleType | None:
    """The module of who calls, if it has been made."""
    if worker is None:
        notebooks: ModuleType | None = _state(shell, "_notebooks")
        return notebooks
    module: ModuleType | None = _state(shell, "_own").get(worker)
    return module


def _keep(shell: WorkerModule, worker: Worker | None, module: ModuleType | None) -> None:
    if worker is None:
        object.__setattr__(shell, "_notebooks", module)
    elif module is None:
        _state(shell, "_own").pop(worker, None)
    else:
        _state(shell, "_own")[worker] = module


def _lock_of(worker: Worker | None) -> Any:
    if worker is None:
        return _notebooks_lock
    with _guard:
        return _locks.setdefault(worker, reentrant_lock())


def _make(shell: WorkerModule, worker: Worker | None) -> ModuleType:
    """Execute a module for who calls, after the packages that it is in; once."""
    key = (shell, worker)
    module = _module_of(shell, worker)
    if module is not None and _makers.get(key, threading.get_ident()) == threading.get_ident():
        return module  # made, or this thread makes it, as where modules import each other
    with _lock_of(worker):
        spec: ModuleSpec = _state(shell, "_spec_of_own")
        parent, _, child = spec.name.rpartition(".")
        package = sys.modules.get(parent)
        if isinstance(package, WorkerModule):
            _make(package, worker)  # which may import this one
        module = _module_of(shell, worker)
        if module is not None:
            return module
        spec = _spec_here(spec, package)
        module = module_from_spec(spec)
        _makers[key] = threading.get_ident()
        _keep(shell, worker, module)
        try:
            if spec.loader is not None:  # a folder without __init__.py has none
                spec.loader.exec_module(module)
        except BaseException:
            _keep(shell, worker, None)
            raise
        finally:
            del _makers[key]
        if isinstance(package, WorkerModule):
            setattr(package, child, shell)
        return module


def _spec_here(known: ModuleSpec, package: ModuleType | None) -> ModuleSpec:
    """Where who calls finds a module that somebody has found before.

    Raises
    ------
    ModuleNotFoundError
        If it is in no folder of this worker's.
    SessionError
        If this worker finds something that can't be its own.
    """
    path = list(package.__path__) if isinstance(package, WorkerModule) else None
    found = PathFinder.find_spec(known.name, path)
    if found is None:
        raise ModuleNotFoundError(f"No module named {known.name!r}", name=known.name)
    if _place(found) == _place(known):
        return known
    if not _is_source(found):
        raise _another(known.name, _place(known), found)
    return found


def _place(spec: ModuleSpec) -> Any:
    return spec.origin or list(spec.submodule_search_locations or ())


def _another(name: str, known: Any, found: ModuleSpec) -> SessionError:
    return SessionError(
        f"import {name}: this worker finds it in {_place(found)}, another one has imported it from "
        f"{known}, and a module in C, or one that puts another in its place, is one for all "
        "workers: use other names, or engine='processes' (--engine processes)"
    )


def _own_in_place_of(name: str, module: ModuleType, worker: Worker) -> None:
    """Where a script has added a folder that has a module of a name that was imported before.

    In cells what was imported before stays, as in Python.
    """
    path, names = _looked_for.get(worker, (None, set()))
    if path is None:
        return
    if path != sys.path:
        path, names = _looked_for[worker] = list(sys.path), set()
    if name in names:
        return
    spec = module.__spec__
    if spec and spec.name == name and not is_library_file(spec.origin or ""):
        found = PathFinder.find_spec(name)
        if found is not None and _is_beside(found):
            own = name not in _of_process and isinstance(spec.loader, SourceFileLoader)
            if own and _is_source(found):
                with _guard:
                    if sys.modules.get(name) is module:  # else another worker has come first
                        sys.modules[name] = WorkerModule(found, module)
            elif _place(found) != _place(spec):
                raise _another(name, _place(spec), found)
    names.add(name)


def _make_by_name(name: str) -> bool:
    """Execute for who calls what stands in `sys.modules` under a name, and what it is in.

    Returns
    -------
    bool
        Whether anything stands there. What is half made does not count: another object may take
        its place.
    """
    module, worker = sys.modules.get(name), current_worker_or_none()
    if type(module) is ModuleType and table.is_half_made(module):
        return False
    if worker is not None and type(module) is ModuleType and "." not in name:
        _own_in_place_of(name, module, worker)
        module = sys.modules.get(name)
    parent, _, child = name.rpartition(".")
    package = sys.modules.get(parent)
    if isinstance(module, WorkerModule):
        _make(module, worker)
    elif module is not None and isinstance(package, WorkerModule):
        own = _make(package, worker)
        if not hasattr(own, child):  # one of the process, which another worker has imported
            setattr(own, child, module)
    return module is not None


class _Loader:
    """Makes the `WorkerModule`; what is to be executed is executed after Python's import lock."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return WorkerModule(self.spec)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, WorkerModule)
        own = _module_of(module, current_worker_or_none())
        if own is not None and self.spec.loader is not None:  # `importlib.reload`
            self.spec.loader.exec_module(own)


class _Finder:
    """Finds what Python would find by `sys.path`, and leaves alone what is not a script's."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _in_use:
            return None
        parent = name.rpartition(".")[0]
        if parent and not isinstance(sys.modules.get(parent), WorkerModule):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not (parent or _is_beside(spec)):
            return None
        if not _is_source(spec):
            _of_process.add(name)
            return None
        shells = copy.copy(spec)
        shells.loader = cast("Any", _Loader(spec))
        return shells


def _is_source(spec: ModuleSpec) -> bool:
    """Whether it is made of Python, and stays what stands for it in `sys.modules`."""
    if spec.loader is None:  # a folder without __init__.py
        return True
    if not isinstance(spec.loader, SourceFileLoader):
        return False
    try:
        source = spec.loader.get_source(spec.name) or ""
    except (ImportError, OSError, SyntaxError):
        return True  # whoever executes it is told
    return _REPLACES_ITSELF.search(source) is None


def _is_beside(spec: ModuleSpec) -> bool:
    """Whether a module is found in a folder that `sys.path` has because of a script."""
    name, folders = spec.name.partition(".")[0], _added()
    if name == _HERE:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(
        place in (os.path.join(folder, f"{name}.py"), os.path.join(folder, name))
        or place.startswith(os.path.join(folder, name, ""))
        for place in places
        for folder in folders
    )


def _added() -> list[str]:
    """The folders in `sys.path` that are there because of the caller's script or hub folder."""
    worker, path = current_worker_or_none(), own_path()
    before = None if worker is None or path is None else _own_before.get(worker)
    before = _path_before if before is None else before
    if before is None:
        return []
    added = [place for place in sys.path if place not in before]
    return added if _path_before is None else [*added, _folder]


_folder = ""  # of the script, which may have been in `sys.path` before


def begin(folder: str) -> None:
    """The first script begins: modules in its folder are each worker's own from here on."""
    global _path_before, _folder, _in_use
    _path_before, _folder, _in_use = list(sys.path), folder, True
    sys.path.insert(0, folder)
    if _Finder not in sys.meta_path:
        return
    for name, module in tuple(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if (
            type(module) is ModuleType
            and isinstance(spec, ModuleSpec)
            and spec.name == name
            and isinstance(spec.loader, SourceFileLoader)
            and _is_beside(spec)
            and _is_source(spec)
        ):
            sys.modules[name] = WorkerModule(spec, module)


@contextmanager
def _with_path(worker: Worker, before: list[str], path: list[str]) -> Iterator[None]:
    """Within it a worker has a `sys.path` of its own, in which `before` is nobody's addition."""
    _own_before[worker] = before
    use_path(worker, path)
    try:
        yield
    finally:
        use_path(worker, None)
        _own_before.pop(worker, None)


@contextmanager
def fresh_imports(worker: Worker) -> Iterator[None]:
    """Around a script on a worker, as in a new process: nothing is imported yet."""
    assert _path_before is not None
    for module in tuple(sys.modules.values()):
        if type(module) is WorkerModule:
            _keep(module, worker, None)
    _looked_for[worker] = [], set()
    try:
        with _with_path(worker, list(_path_before), [_folder, *_path_before]):
            yield
    finally:
        _looked_for.pop(worker, None)


def end() -> None:
    """The last script has ended: nothing of it is left where Python looks for modules."""
    global _path_before
    assert _path_before is not None
    before, _path_before = _path_before, None
    if _folder in sys.path:
        sys.path.remove(_folder)  # once, as it was added
    sys.path[:] = [place for place in sys.path if place in before]
    _put_back()
    while _of_process:
        sys.modules.pop(_of_process.pop(), None)
    importlib.invalidate_caches()


def _put_back() -> None:
    """Python finds the notebook's modules where each worker had its own."""
    global _in_use
    _in_use = False
    for name, module in tuple(sys.modules.items()):
        if type(module) is WorkerModule:
            notebooks = _state(module, "_notebooks")
            if notebooks is not None:
                sys.modules[name] = notebooks
            else:
                del sys.modules[name]


def _hub_over(add: Function) -> Function:
    """torch.hub's context manager: the folder is in the worker's `sys.path` alone."""

    @functools.wraps(add)
    def add_for_worker(path: str) -> AbstractContextManager[None]:
        global _in_use
        worker = current_worker_or_none()
        if worker is None or own_path() is not None or has_own_process(worker):
            own: AbstractContextManager[None] = add(path)
            return own
        _in_use = True
        return _with_path(worker, list(sys.path), [path, *sys.path])

    return add_for_worker


def _install(patches: Patches) -> None:
    def load_over(load: Function) -> Function:
        @functools.wraps(load)
        def find_load_and_make(name: str, import_: Any) -> Any:
            if not _in_use:
                return load(name, import_)
            parent = name.rpartition(".")[0]
            if parent and parent not in sys.modules:
                import_(parent)  # executed before the module's own turn to be imported begins
            module = load(name, import_)
            _make_by_name(name)
            return module

        return find_load_and_make

    def import_over(import_: Function) -> Function:
        @functools.wraps(import_)
        def import_and_make(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            if not _in_use:
                return import_(name, globals, locals, fromlist, level)
            whole = whole_name(name, globals, level)
            is_there = _make_by_name(whole)
            module = import_(name, globals, locals, fromlist, level)
            if not is_there:
                _make_by_name(whole)  # another worker may have found it meanwhile
            if fromlist and isinstance(module, WorkerModule):
                # Python takes a module that is in sys.modules for made
                for child in getattr(module, "__all__", ()) if "*" in fromlist else fromlist:
                    if not hasattr(module, child):
                        _make_by_name(f"{whole}.{child}")
            return module

        return import_and_make

    patches.replace(importlib._bootstrap, "_find_and_load", load_over)
    patches.replace(builtins, "__import__", import_over)
    patches.replace(hub, "_add_to_sys_path", _hub_over)
    process = os.getpid()  # a child has its worker's modules from `_in_child`
    patches.at_undo(lambda: _put_back() if os.getpid() == process else None)
    at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(at, _Finder)
    patches.at_undo(lambda: sys.meta_path.remove(_Finder) if _Finder in sys.meta_path else None)


def _in_child(worker: Worker) -> None:
    """The worker's modules become the process's."""
    global _guard, _notebooks_lock, _in_use
    _in_use = False
    _makers.clear()
    _guard, _notebooks_lock = plain_lock(), reentrant_lock()
    for name, shell in tuple(sys.modules.items()):
        if type(shell) is WorkerModule:
            module = _module_of(shell, worker)
            _keep(shell, None, module)
            if module is not None:
                sys.modules[name] = module


table.add(
    Row(
        state="modules beside a script",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker executes those that a script imports from its folder, and from "
        "folders that it adds to `sys.path`: their variables, classes and caches, and what they "
        "set when they are imported, are that worker's. They are forgotten at the script's end; "
        "the notebook keeps what it has imported itself. So it is with a folder from which a "
        "worker loads with `torch.hub`, until a script begins; in a cell what was imported before "
        "under a name of its modules stays, as in Python.",
        test="tests/isolation/test_worker_modules.py::test_each_worker_has_modules_of_its_own",
        install=_install,
        in_child=_in_child,
        library="Python",
    )
)
