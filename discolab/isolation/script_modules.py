"""Modules beside a script, which each worker executes for itself, as a process would.

A script's helpers keep what is a rank's own in variables: ``RANK = int(os.environ["RANK"])``, a
registry, a model, a seed that they set when they are imported. So while scripts run, what Python
finds for a worker in the script's folder, or in one that the script has added to `sys.path`, is a
`ScriptModule` in `sys.modules`. It answers each worker from a module of its own, which the worker
executes at its first import. A module that the notebook has imported before stays the notebook's.

Modules in C are the process's, and so are those of installed packages: rows of their own say what
becomes of their state. notebook/script.py calls `begin` and `end` under its lock. A worker's RLock
in `_locks` guards the making of its modules, which its other threads wait for.
"""

from __future__ import annotations

import builtins
import copy
import functools
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, resolve_name
from types import ModuleType
from typing import Any

from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import ModuleOfWorkers, Patches
from .table import Row, Treatment

Function = Callable[..., Any]

_HERE = __name__.partition(".")[0]  # a script may stand beside this package's sources
_OF_SHELL = frozenset({"__class__", "__reduce__", "__reduce_ex__"})

_path_before: list[str] | None = None  # `sys.path` before scripts ran; None: none runs
_locks: weakref.WeakKeyDictionary[Worker, Any] = weakref.WeakKeyDictionary()
_notebooks_lock = threading.RLock()
_guard = threading.Lock()  # of `_locks`


class ScriptModule(ModuleOfWorkers):
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
            module = _make(self, worker)
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


def _state(shell: ScriptModule, name: str) -> Any:
    return object.__getattribute__(shell, name)


def _module_of(shell: ScriptModule, worker: Worker | None) -> ModuleType | None:
    """The module of who calls, if it has been made."""
    if worker is None:
        notebooks: ModuleType | None = _state(shell, "_notebooks")
        return notebooks
    module: ModuleType | None = _state(shell, "_own").get(worker)
    return module


def _keep(shell: ScriptModule, worker: Worker | None, module: ModuleType | None) -> None:
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
        return _locks.setdefault(worker, threading.RLock())


def _make(shell: ScriptModule, worker: Worker | None) -> ModuleType:
    """Execute a module for who calls, after the packages that it is in; once."""
    with _lock_of(worker):
        module = _module_of(shell, worker)
        if module is not None:
            return module
        spec: ModuleSpec = _state(shell, "_spec_of_own")
        parent, _, child = spec.name.rpartition(".")
        package = sys.modules.get(parent)
        if isinstance(package, ScriptModule):
            _make(package, worker)
        module = module_from_spec(spec)
        _keep(shell, worker, module)
        try:
            if spec.loader is not None:  # a folder without __init__.py has none
                spec.loader.exec_module(module)
        except BaseException:
            _keep(shell, worker, None)
            raise
        if isinstance(package, ScriptModule):
            setattr(package, child, shell)
        return module


def _make_by_name(name: str) -> None:
    """Execute for who calls what stands in `sys.modules` under a name, and what it is in."""
    shell = sys.modules.get(name)
    if isinstance(shell, ScriptModule):
        _make(shell, current_worker_or_none())


class _Loader:
    """Makes the `ScriptModule`; what is to be executed is executed after Python's import lock."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ScriptModule(self.spec)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, ScriptModule)
        own = _module_of(module, current_worker_or_none())
        if own is not None and self.spec.loader is not None:  # `importlib.reload`
            self.spec.loader.exec_module(own)


class _Finder:
    """Finds what Python would find by `sys.path`, and leaves alone what is not a script's."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        worker = current_worker_or_none()
        if _path_before is None or worker is None or worker.program is None:
            return None
        parent = name.rpartition(".")[0]
        if parent and not isinstance(sys.modules.get(parent), ScriptModule):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not (parent or _is_beside(spec)) or not _is_source(spec):
            return None
        shells = copy.copy(spec)
        shells.loader = _Loader(spec)  # type: ignore[assignment]
        return shells


def _is_source(spec: ModuleSpec) -> bool:
    return spec.loader is None or isinstance(spec.loader, SourceFileLoader)


def _is_beside(spec: ModuleSpec) -> bool:
    """Whether a module is found in a folder that `sys.path` has because of a script."""
    name = spec.name.partition(".")[0]
    if _path_before is None or name == _HERE:
        return False
    folders = [place for place in sys.path if place not in _path_before] + [_folder]
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(
        place in (os.path.join(folder, f"{name}.py"), os.path.join(folder, name))
        or place.startswith(os.path.join(folder, name, ""))
        for place in places
        for folder in folders
    )


_folder = ""  # of the script, which may have been in `sys.path` before


def begin(folder: str) -> None:
    """The first script begins: modules in its folder are each worker's own from here on."""
    global _path_before, _folder
    _path_before, _folder = list(sys.path), folder
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
        ):
            sys.modules[name] = ScriptModule(spec, module)


def end() -> None:
    """The last script has ended: nothing of it is left where Python looks for modules."""
    global _path_before
    assert _path_before is not None
    before, _path_before = _path_before, None
    sys.path[:] = [place for place in sys.path if place in before]
    for name, module in tuple(sys.modules.items()):
        if type(module) is ScriptModule:
            notebooks = _state(module, "_notebooks")
            if notebooks is not None:
                sys.modules[name] = notebooks
            else:
                del sys.modules[name]
    importlib.invalidate_caches()


def _install(patches: Patches) -> None:
    def load_over(load: Function) -> Function:
        @functools.wraps(load)
        def find_load_and_make(name: str, import_: Any) -> Any:
            if _path_before is None:
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
            if _path_before is not None:
                if not level:
                    _make_by_name(name)
                elif globals and (package := globals.get("__package__")):
                    _make_by_name(resolve_name("." * level + name, package))
            return import_(name, globals, locals, fromlist, level)

        return import_and_make

    patches.replace(importlib._bootstrap, "_find_and_load", load_over)
    patches.replace(builtins, "__import__", import_over)
    at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(at, _Finder)
    patches.at_undo(lambda: sys.meta_path.remove(_Finder) if _Finder in sys.meta_path else None)


def _in_child(worker: Worker) -> None:
    """The worker's modules become the process's."""
    global _guard, _notebooks_lock
    _guard, _notebooks_lock = threading.Lock(), threading.RLock()
    for name, shell in tuple(sys.modules.items()):
        if type(shell) is ScriptModule:
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
        "the notebook keeps what it has imported itself.",
        test="tests/isolation/test_script_modules.py::test_each_worker_has_modules_of_its_own",
        install=_install,
        in_child=_in_child,
        library="Python",
    )
)
