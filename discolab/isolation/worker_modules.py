"""Modules that a worker executes for itself, as a process would: those of folders of its own.

A script's helpers keep what is a rank's own in variables: ``RANK = int(os.environ["RANK"])``, a
registry, a model, a seed that they set when they are imported. So what Python finds in the folder
of a script that runs, or in one that a worker has added to its `sys.path`, in a script or a cell,
is a `WorkerModule` in `sys.modules`. It answers each worker from a module of its own, which the
worker executes at its first import, from where its own `sys.path` has it. A module that the
notebook imports, or has imported before, is the notebook's alone. `torch.hub` adds the folder from
which a worker loads to `sys.path` meanwhile.

So it is with modules of the notebook's own folder that a worker imports first. What the notebook
has imported from there before is one for all: workers are given objects of its classes, and
would not know them as their own.

A script begins without any; at its end cells have those again that they have imported. In cells
what a worker has imported stays, as in Python: `_IMPORTED` has the names.

Modules in C, those of installed packages, and those that put another object in their place are the
process's: rows of their own say what becomes of their state. Where a worker has a process for
itself own_process_modules.py does what is needed for a script. notebook/script.py calls `begin` and
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
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, NamespaceLoader, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, cast

from ..runtime.errors import SessionError
from ..runtime.interrupts import plain_lock, reentrant_lock
from ..runtime.user_code import is_library_file
from ..runtime.worker import Worker, current_worker, current_worker_or_none, has_own_process
from . import own_process_modules, table
from .imports import whole_name
from .module_places import is_beside, place
from .patches import ModuleOfWorkers, Patches
from .programs import added_folders, script_path
from .table import Row, Treatment

Function = Callable[..., Any]

_HERE = __name__.partition(".")[0]  # a script may stand beside this package's sources
_OF_ALL = sys.stdlib_module_names | {_HERE, "__main__", "torch"}  # whoever has others of that name

# In `Worker.process_state`, of modules the first part of their names:
_IMPORTED = "what its cells have imported"
_LOOKED_FOR = "what its script has looked for"  # with the `sys.path` that it had; None: no script
_OF_SHELL = frozenset({"__class__", "__reduce__", "__reduce_ex__"})

_REPLACES_ITSELF = re.compile(r"sys\.modules\[__name__\]\s*(=|\.__class__)|modules\[__name__\]\s*=")

_folder: str | None = None  # of the scripts that run
_in_use = False  # whether there may be any `WorkerModule`
_importers: weakref.WeakSet[Worker] = weakref.WeakSet()  # those with an entry `_IMPORTED`
_locks: weakref.WeakKeyDictionary[Worker, Any] = weakref.WeakKeyDictionary()
_notebooks_lock = reentrant_lock()
_guard = plain_lock()
# under the worker's lock: by module and worker, the thread that makes it
_makers: dict[Any, int] = {}
_of_process: dict[str, Any] = {}  # such modules that are one for all workers, and where they are


class WorkerModule(ModuleOfWorkers):
    """In `sys.modules`, for all workers: each finds a module of its own in it."""

    __slots__ = ("_cells", "_notebooks", "_own", "_spec_of_own")

    def __init__(self, spec: ModuleSpec, notebooks: ModuleType | None = None) -> None:
        super().__init__(spec.name)
        set_state = functools.partial(object.__setattr__, self)
        set_state("_spec_of_own", spec)
        set_state("_notebooks", notebooks)
        set_state("_own", weakref.WeakKeyDictionary())
        set_state("_cells", weakref.WeakKeyDictionary())  # of them, those that cells have imported

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
        return
    names = ("_own",) if _runs_script(worker) else ("_own", "_cells")
    for modules in (_state(shell, name) for name in names):
        if module is None:
            modules.pop(worker, None)
        else:
            modules[worker] = module


def _runs_script(worker: Worker) -> bool:
    return worker.process_state.get(_LOOKED_FOR) is not None


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
        if worker is not None and _is_shared(spec, package, worker):
            module = _make(shell, None)
            _keep(shell, worker, module)
            return module
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
            setattr(_module_of(package, worker), child, shell)
        if worker is None:
            table.imported(spec.name, module)
        return module


def _is_shared(spec: ModuleSpec, package: ModuleType | None, worker: Worker) -> bool:
    """Whether cells of a worker have a module that the notebook and others find as well."""
    if _runs_script(worker):
        return False
    if isinstance(package, WorkerModule):
        return _module_of(package, worker) is _module_of(package, None)
    return not is_beside(spec, [*_added(), *notebooks_folders()])


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
    if place(found) == place(known):
        return known
    if not _is_source(found):
        raise _another(known.name, place(known), found)
    return found


def _another(name: str, known: Any, found: ModuleSpec) -> SessionError:
    return SessionError(
        f"import {name}: this worker finds it in {place(found)}, another one has imported it from "
        f"{known}, and a module in C, or one that puts another in its place, is one for all "
        "workers: use other names, or engine='processes' (--engine processes)"
    )


def _names_known(worker: Worker) -> set[str]:
    """Modules that Python gives to a worker without looking in its folders again."""
    script = worker.process_state.get(_LOOKED_FOR)
    if script is None:
        names: set[str] | None = worker.process_state.get(_IMPORTED)
        if names is None:
            names = worker.process_state[_IMPORTED] = set()
            _importers.add(worker)
        return names
    if script[0] != sys.path:
        script = worker.process_state[_LOOKED_FOR] = list(sys.path), set()
    return cast("set[str]", script[1])


def _looks_for(name: str) -> str:
    """The first part of a module's name, where a worker's own folders may have it; or ""."""
    global _in_use
    top = name.partition(".")[0]
    if top in _OF_ALL:
        return ""
    worker = current_worker_or_none()
    if worker is None or top in _names_known(worker):
        return ""
    _in_use = _in_use or bool(_added()) or (top not in sys.modules and _is_notebooks(top))
    return top


def _note_imported(top: str) -> None:
    """What cells have imported stays, whatever folders they add."""
    worker = current_worker_or_none()
    if worker is not None and not _runs_script(worker):
        _names_known(worker).add(top)


def _own_in_place_of(top: str, worker: Worker) -> None:
    """Where folders of a worker's own have a module of a name that others have imported.

    Raises
    ------
    SessionError
        If what others have imported can't be theirs alone.
    """
    names, module = _names_known(worker), sys.modules.get(top)
    if top in names or module is None or isinstance(module, WorkerModule):
        return
    folders = _added()
    found = PathFinder.find_spec(top) if folders else None
    if found is not None and is_beside(found, folders):
        if top not in _of_process and _may_be_own(top, module) and _is_source(found):
            _share_out(top, module, found)
        elif place(found) != (known := _place_of(top, module)):
            raise _another(top, known, found)
    names.add(top)


def _may_be_own(name: str, module: Any) -> bool:
    """Whether a module that was imported before is plain Python's, and may stay its importers'."""
    spec = getattr(module, "__spec__", None)
    return (
        type(module) is ModuleType
        and isinstance(spec, ModuleSpec)
        and spec.name == name
        and isinstance(spec.loader, SourceFileLoader | NamespaceLoader)
        and not table.is_half_made(module)
    )


def _place_of(name: str, module: Any) -> Any:
    if name in _of_process:
        return _of_process[name]
    spec = getattr(module, "__spec__", None)
    return place(spec) if isinstance(spec, ModuleSpec) else getattr(module, "__file__", None)


def _share_out(top: str, module: ModuleType, found: ModuleSpec) -> None:
    """A module, and what is in it, stay the notebook's and of the cells that have imported it."""
    with _guard:
        if sys.modules.get(top) is not module:
            return  # another worker has come first
        owners = [w for w in _importers if top in w.process_state.get(_IMPORTED, ())]
        for name, known in sys.modules.copy().items():
            inside = name == top or name.startswith(f"{top}.")
            if inside and _may_be_own(name, known):
                spec = found if name == top else cast("ModuleSpec", known.__spec__)
                shell = sys.modules[name] = WorkerModule(spec, known)
                for worker in owners:
                    _state(shell, "_own")[worker] = _state(shell, "_cells")[worker] = known
                    if _runs_script(worker):
                        del _state(shell, "_own")[worker]


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
    if worker is not None and (top := _looks_for(name)):
        _own_in_place_of(top, worker)
        module = sys.modules.get(name)
    parent, _, child = name.rpartition(".")
    package = sys.modules.get(parent)
    if isinstance(module, WorkerModule):
        _make(module, worker)
    elif isinstance(package, WorkerModule):
        own = _make(package, worker)
        # one of the process, which another worker has imported
        if module is not None and not hasattr(own, child):
            found = PathFinder.find_spec(name, own.__path__)
            if found is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if place(found) != (known := _place_of(name, module)):
                raise _another(name, known, found)
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
        if target is not None and not isinstance(target, WorkerModule):
            return None  # `importlib.reload` of one that was there before its folder was added
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        if not (parent or is_beside(spec, _added())):
            # of the notebook's folder, what workers import first
            of_worker = current_worker_or_none() is not None and _is_source(spec)
            if not (of_worker and is_beside(spec, notebooks_folders())):
                return None
        elif not _is_source(spec):
            _of_process[name] = place(spec)
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


def _added() -> list[str]:
    """The folders in which the caller looks because it has added them, or runs a script."""
    worker = current_worker_or_none()
    if _folder is None or (worker is not None and not _runs_script(worker)):
        return added_folders()
    return [_folder, *added_folders()]


def notebooks_folders() -> list[str]:
    """Where the notebook, or the program that has started the session, has modules of its own."""
    folders, program = [os.getcwd()], vars(sys.modules["__main__"]).get("__file__")
    if program and not is_library_file(program := os.path.abspath(program)):
        folders.append(os.path.dirname(program))
    path = {os.path.abspath(place) for place in vars(sys)["path"]}
    return [folder for folder in folders if folder in path]


def _is_notebooks(top: str) -> bool:
    places = [os.path.join(folder, top) for folder in notebooks_folders()]
    return any(os.path.isdir(place) or os.path.isfile(f"{place}.py") for place in places)


def begin(folder: str) -> None:
    """The first script begins: modules in its folder are each worker's own from here on."""
    global _folder, _in_use
    _folder, _in_use = folder, True
    if has_own_process(current_worker()):
        own_process_modules.begin(folder, _OF_ALL)
    if _Finder not in sys.meta_path:
        return
    for name, module in sys.modules.copy().items():
        if not _may_be_own(name, module):
            continue
        spec = cast("ModuleSpec", module.__spec__)
        if is_beside(spec, [folder]) and _is_source(spec):
            sys.modules[name] = WorkerModule(spec, module)


@contextmanager
def fresh_imports(worker: Worker) -> Iterator[None]:
    """Around a script on a worker, as in a new process: nothing is imported yet."""
    assert _folder is not None
    worker.process_state[_LOOKED_FOR] = [], set()
    for shell in _shells().values():
        _keep(shell, worker, None)
    try:
        with script_path(worker, _folder):
            yield
    finally:
        for shell in _shells().values():
            if worker in _state(shell, "_cells"):
                _keep(shell, worker, _state(shell, "_cells")[worker])
        worker.process_state[_LOOKED_FOR] = None


def _shells() -> dict[str, WorkerModule]:
    # a copy is one step; in tuple(items()) the collector may run code, and another thread import
    return {n: m for n, m in sys.modules.copy().items() if type(m) is WorkerModule}


def names_of_own(worker: Worker) -> list[str]:
    """The modules that cells of a worker thread have imported for it alone."""
    return [
        name
        for name, shell in _shells().items()
        if _state(shell, "_cells").get(worker) not in (None, _module_of(shell, None))
    ]


def names_imported(worker: Worker) -> list[str]:
    """The first parts of names that cells of a worker thread have imported, and what these have."""
    return list(worker.process_state.get(_IMPORTED, ()))


def is_notebooks_class(kind: type, worker: Worker) -> bool:
    """Whether a class is the notebook's, where the worker has executed its module for itself."""
    shell = sys.modules.get(kind.__module__)
    if not isinstance(shell, WorkerModule) or kind.__qualname__ != kind.__name__:
        return False
    here, notebooks = _module_of(shell, worker), _module_of(shell, None)
    return here not in (None, notebooks) and vars(notebooks).get(kind.__name__) is kind


def end() -> None:
    """The last script has ended: nothing of it is left where Python looks for modules."""
    global _folder
    if has_own_process(current_worker()):
        own_process_modules.end()
    _folder = None
    _put_back(of_cells=False)
    while _of_process:
        sys.modules.pop(_of_process.popitem()[0], None)
    importlib.invalidate_caches()


def _put_back(*, of_cells: bool) -> None:
    """Python finds the notebook's modules where each worker had its own.

    Parameters
    ----------
    of_cells
        Whether also where cells of a worker that lives have imported one.
    """
    global _in_use
    _in_use = False
    for name, module in _shells().items():
        notebooks = _state(module, "_notebooks")
        if _state(module, "_cells") and not of_cells:
            _in_use = True
        elif notebooks is not None:
            sys.modules[name] = notebooks
        else:
            del sys.modules[name]


def _install(patches: Patches) -> None:
    def load_over(load: Function) -> Function:
        @functools.wraps(load)
        def find_load_and_make(name: str, import_: Any) -> Any:
            top = _looks_for(name)
            if _in_use:
                _make_by_name(name)
                parent = name.rpartition(".")[0]
                if parent and parent not in sys.modules:
                    import_(parent)  # executed before the module's own turn to be imported begins
            module = load(name, import_)
            if _in_use:
                _make_by_name(name)
            if top:
                _note_imported(top)
            return module

        return find_load_and_make

    def import_over(import_: Function) -> Function:
        @functools.wraps(import_)
        def import_and_make(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            top = "" if level else _looks_for(name)
            if not _in_use:
                module = import_(name, globals, locals, fromlist, level)
                if top:
                    _note_imported(top)
                return module
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
            if top:
                _note_imported(top)
            return module

        return import_and_make

    def reload_over(reload: Function) -> Function:
        @functools.wraps(reload)
        def reload_own(module: ModuleType) -> ModuleType:
            # Python reloads what stands in sys.modules; who calls may hold what it stands for
            shell = sys.modules.get(getattr(module, "__name__", ""))
            worker = current_worker_or_none()
            if isinstance(shell, WorkerModule) and _module_of(shell, worker) is module:
                reload(shell)
            else:
                module = reload(module)
            return module

        return reload_own

    patches.replace(importlib._bootstrap, "_find_and_load", load_over)
    patches.replace(builtins, "__import__", import_over)
    patches.replace(importlib, "reload", reload_over)
    process = os.getpid()  # a child has its worker's modules from `_in_child`
    patches.at_undo(lambda: _put_back(of_cells=True) if os.getpid() == process else None)
    at = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(at, _Finder)
    patches.at_undo(lambda: sys.meta_path.remove(_Finder) if _Finder in sys.meta_path else None)


def _leave(worker: Worker) -> None:
    """A worker that has ended keeps no module from the notebook."""
    _importers.discard(worker)
    for shell in _shells().values():
        for name in ("_own", "_cells"):
            _state(shell, name).pop(worker, None)


def _in_child(worker: Worker) -> None:
    """The worker's modules become the process's."""
    global _guard, _notebooks_lock, _in_use
    _in_use = False
    _makers.clear()
    _guard, _notebooks_lock = plain_lock(), reentrant_lock()
    for name, shell in _shells().items():
        module = _module_of(shell, worker)
        _keep(shell, None, module)
        if module is not None:
            sys.modules[name] = module


table.add(
    Row(
        state="modules beside a script, and in folders that a worker adds to `sys.path`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker executes those that a script imports from its folder, and from "
        "folders that it adds to `sys.path`, in a script or a cell: their variables, classes and "
        "caches, and what they set when they are imported, are that worker's; the notebook keeps "
        "what it has imported itself. A script's are forgotten at its end. So it is with a folder "
        "from which a worker loads with `torch.hub`, and with what workers import first from the "
        "notebook's own folder. What the notebook has imported from there before is one for all. "
        "What a worker's cells have imported stays, as in Python.",
        test="tests/isolation/test_worker_modules.py::test_each_worker_has_modules_of_its_own",
        install=_install,
        leave=_leave,
        in_child=_in_child,
        library="Python",
    )
)
