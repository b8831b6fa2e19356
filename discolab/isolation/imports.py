"""Workers import modules one after the other and whole; the table's changes are made at once.

Modules that import each other in circles, as those of torch.distributed do, and modules that put
another object in their place in `sys.modules`, as transformers does, can't be imported by two
threads at once: Python's import locks show one of them a module that is half made, or one that is
no longer there. So a thread that imports something new takes its turn first; a worker waits for it
as for everything else, and can be interrupted.

While a worker imports an interrupt is held back, for `HOLD_BACK` seconds in which no module begins
or ends. What is cut short all the same, or fails, takes with it the modules that were made by it or
refer to it, so that the next import of the same starts anew, as in a process of its own.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ExtensionFileLoader
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any, cast

import torch

from ..runtime.interrupts import shield, waiter_here, waiting_threads
from ..runtime.worker import Worker, current_worker_or_none
from . import import_effects, table
from .patches import Patches
from .table import Row, Treatment
from .turns import Turn

Function = Callable[..., Any]

import_turn = Turn("import", lets_pass=True)  # a module may trace, and a trace may import


class _Own(threading.local):
    """Of each thread: the modules that it has made since its outermost import began."""

    made: list[str] | None = None


_own = _Own()


def is_importing() -> bool:
    """Whether a module that this thread imports is being executed, on a worker."""
    return _own.made is not None


def worker_unless_importing() -> Worker | None:
    """The worker that calls, if what it does is for itself.

    A module is imported once, for all workers: what it sets while it is imported is for all.
    """
    worker = current_worker_or_none()
    return None if worker is None or _own.made is not None else worker


def whole_name(name: str, globals: Any, level: int) -> str:
    """What `sys.modules` calls the module that is given to `__import__`; "" if nothing tells it."""
    if not level:
        return name
    package = (globals or {}).get("__package__")
    return resolve_name("." * level + name, package) if package else ""


class _Replaced(BaseException):
    """The module that was waited for has put another object in its place."""


def _install(patches: Patches) -> None:
    def load_over(load: Function) -> Function:
        @functools.wraps(load)
        def find_and_load(name: str, import_: Any) -> Any:
            module = sys.modules.get(name)
            if module is not None and not table.is_half_made(module):
                table.imported(name, module)
                import_effects.take_effect(name)
                return module
            with import_turn.taken(name, by_all=True), _shielded():
                if _is_half_made_by_one_that_waits(name):
                    return sys.modules[name]
                with _cleaned_up(name), import_effects.noted(name):
                    module = load(name, import_)
                module = sys.modules.get(name) or module
                table.imported(name, module)
                import_effects.take_effect(name)  # another thread may have made it meanwhile
                return module

        return find_and_load

    def wait_over(wait: Function) -> Function:
        @functools.wraps(wait)
        def lock_unlock_module(name: str) -> Any:  # the module is being made by another thread
            before = sys.modules.get(name)
            with import_turn.taken(name, by_all=True):
                if not _is_half_made_by_one_that_waits(name):
                    wait(name)
            after = sys.modules.get(name)
            if after is not before and sys._getframe(1).f_code in _again:
                raise _Replaced  # Python would go on with the one before

        return lock_unlock_module

    def reload_over(reload: Function) -> Function:
        @functools.wraps(reload)
        def reload_in_turn(module: ModuleType) -> ModuleType:
            name = getattr(module, "__name__", "")
            with import_turn.taken(name, by_all=True), _shielded():
                module = reload(module)
                table.imported(name, module, anew=True)
                return module

        return reload_in_turn

    bootstrap = importlib._bootstrap
    patches.replace(bootstrap, "_find_and_load", load_over)
    # Python makes a module of the class that `sys` has, which looks who asks for argv and stdout
    patches.replace(bootstrap, "_new_module", lambda _: ModuleType)
    patches.replace(bootstrap, "_lock_unlock_module", wait_over)
    patches.replace(importlib, "reload", reload_over)


_again: set[Any] = set()  # the code of `import_again`


def _install_again(patches: Patches) -> None:
    def import_over(import_: Function) -> Function:
        def import_again(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            while True:
                try:
                    module = import_(name, globals, locals, fromlist, level)
                except _Replaced:
                    continue
                if import_effects.are_there():
                    import_effects.take_effect(whole_name(name, globals, level), fromlist)
                return module

        _again.add(import_again.__code__)
        return functools.wraps(import_)(import_again)

    patches.replace(builtins, "__import__", import_over)


def _look_up_storage(patches: Patches) -> None:
    """Have torch's C++ code look up the class of storages now, as it does when it first gets one.

    It imports `torch.storage` then, in the initializer of a static variable, with Python's lock.
    A thread that lets go of Python's lock meanwhile, as it may in an import that runs Python code,
    never gets it again if another one comes to the same place: that one keeps Python's lock while
    it waits for the initializer.
    """
    torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(0))


def _shielded() -> AbstractContextManager[None]:
    """Within it a worker's thread is not interrupted, as long as modules come."""
    return nullcontext() if waiter_here() is None else shield(progress=True)


def _is_half_made_by_one_that_waits(name: str) -> bool:
    """Whether a module's maker waits in discolab now, it may be for the caller."""
    if not table.is_half_made(sys.modules.get(name)):
        return False
    maker = cast("Any", importlib._bootstrap)._get_module_lock(name).owner
    return maker not in (None, threading.get_ident()) and maker in waiting_threads


@contextmanager
def _cleaned_up(name: str) -> Iterator[None]:
    """Around the making of one module on a worker: what fails leaves nothing half made.

    Modules in C stay: many can't be loaded twice.
    """
    if current_worker_or_none() is None:
        yield
        return
    outer = _own.made
    made = _own.made = []
    try:
        yield
        made.append(name)
    except BaseException:
        _remove(name, made)
        made.clear()
        raise
    finally:
        _own.made = outer
        if outer is not None:
            outer += made


def _remove(name: str, made: list[str]) -> None:
    """Forget a module that failed, with those `made` meanwhile that are below or refer to it."""
    gone = {name}
    modules = {other: sys.modules[other] for other in made if other in sys.modules}
    for other, module in modules.copy().items():
        if isinstance(getattr(module, "__loader__", None), ExtensionFileLoader):
            del modules[other]
    while True:
        more = [
            other
            for other, module in modules.items()
            if other.startswith(f"{name}.") or _refers(module, gone)
        ]
        if not more:
            break
        for other in more:
            module = modules.pop(other)
            parent, _, child = other.rpartition(".")
            if vars(sys.modules.get(parent, module)).get(child) is module:
                delattr(sys.modules[parent], child)
            sys.modules.pop(other, None)
        gone.update(more)


def _refers(module: ModuleType, names: set[str]) -> bool:
    """Whether a global variable is one of these modules, or was made in one of them."""
    for value in list(vars(module).values()):
        owner = value.__name__ if isinstance(value, ModuleType) else None
        if isinstance(value, type | FunctionType):
            owner = value.__module__
        if owner in names:
            return True
    return False


table.add(
    Row(
        state="modules being imported",
        treatment=Treatment.IN_TURNS,
        meaning="New modules are imported one after the other, each to its end: Stop waits for "
        "it, as long as no module takes ten seconds. What is cut short or fails is taken away "
        "again, with what refers to it.",
        test="tests/isolation/test_imports.py::test_an_import_that_was_cut_short_starts_anew",
        install=_install,
        in_own_process=True,  # on_import needs it, and Stop must not cut an import there either
        library="Python",
    )
)
table.add(
    Row(
        state="the class of storages in C++",
        treatment=Treatment.SHARED,
        meaning="torch looks it up when a thread first gives it a storage, and hangs if two do at "
        "once; it is looked up before workers do anything.",
        test="tests/isolation/test_imports.py::test_two_workers_may_need_the_first_storage_at_once",
        install=_look_up_storage,
        in_own_process=True,  # remote calls have threads there
    )
)
table.add(
    Row(
        state="modules that replace themselves",
        treatment=Treatment.IN_TURNS,
        meaning="Who waits for a module that puts another object in its place in `sys.modules` "
        "(transformers does) gets that object, not the one before.",
        test="tests/isolation/test_imports.py::test_a_module_that_replaces_itself_is_one_for_all",
        install=_install_again,
        library="Python",
    )
)
