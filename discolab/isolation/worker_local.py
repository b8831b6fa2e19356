"""Worker-local values: what each worker has for itself, in the place of one of the process.

In a process that a worker forks, what is its own of these becomes the process's.

`_guard` guards the making of values; a value that is there is read without it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

from ..runtime.interrupts import plain_lock
from ..runtime.worker import Worker, current_worker_or_none
from . import import_effects, table
from .imports import worker_unless_importing
from .patches import Patches
from .table import OF_SCRIPT as OF_SCRIPT

T = TypeVar("T")

_AS_COPIED = "__as_discolab_has_copied_them__"  # among a worker's variables of a module

_guard = plain_lock()


def own_value(key: str, make: Callable[[], T]) -> T | None:
    """The calling worker's own value, made at its first use and kept until its script ends.

    None: no worker calls, or a module is being imported, once for all.

    Parameters
    ----------
    key
        What it is in `Worker.process_state`; it begins with `OF_SCRIPT`.
    """
    worker = worker_unless_importing()
    if worker is None:
        return None
    value: T | None = worker.process_state.get(key)
    return worker.process_state.setdefault(key, make()) if value is None else value


class PerWorker(Generic[T]):
    """Each worker's own value, also for the threads that it starts; usable as a class attribute.

    Parameters
    ----------
    controllers
        The value of all who are no worker.
    make
        Makes a worker's.
    imports_share
        Whether what modules do while they are imported concerns the controller's value: a module
        is imported once, for all workers.
    """

    def __init__(
        self, controllers: T, make: Callable[[], T], *, imports_share: bool = False
    ) -> None:
        self.controllers = controllers
        self._make = make
        self._imports_share = imports_share
        self._values: weakref.WeakKeyDictionary[Worker, T] = weakref.WeakKeyDictionary()

    def here(self) -> T:
        """That of who calls."""
        worker = worker_unless_importing() if self._imports_share else current_worker_or_none()
        if worker is None:
            return self.controllers
        value = self._values.get(worker)
        if value is None:
            with _guard:
                value = self._values.setdefault(worker, self._make())
        return value

    def __get__(self, instance: Any, owner: Any = None) -> T:
        return self.here()

    def __set__(self, instance: Any, value: T) -> None:
        self.set(value)

    def set(self, value: T) -> None:
        """Give who calls another one."""
        worker = current_worker_or_none()
        if worker is None:
            self.controllers = value
        else:
            with _guard:
                self._values[worker] = value


class OwnSetting(Generic[T]):
    """A setting that a worker may make for itself, until its script ends; else the notebook's.

    The notebook's value stays where its library keeps it.

    Parameters
    ----------
    name
        What sets it: its key in `Worker.process_state`.
    imports_share
        As for `PerWorker`.
    """

    def __init__(self, name: str, *, imports_share: bool = False) -> None:
        self._key = f"{OF_SCRIPT}{name}"
        self._imports_share = imports_share
        if not imports_share:
            import_effects.of_worker(self._key)

    def get(self, notebooks: Callable[[], T]) -> T:
        """The worker's own value if it has set one, else what `notebooks()` gives."""
        worker = current_worker_or_none()
        if worker is None or self._key not in worker.process_state:
            return notebooks()
        value: T = worker.process_state[self._key]
        return value

    def set(self, value: T) -> bool:
        """Set the worker's own value. False: who calls is no worker, and nothing was set."""
        worker = worker_unless_importing() if self._imports_share else current_worker_or_none()
        if worker is not None:
            worker.process_state[self._key] = value
            if not self._imports_share:
                import_effects.is_set(self._key, value)
        return worker is not None


class DictOfWorkers(MutableMapping[Any, Any]):
    """A dictionary to which each worker adds entries of its own; a script's end takes them away.

    What modules enter while they are imported is for all.

    Parameters
    ----------
    name
        What it is: its key in `Worker.process_state`.
    shared
        The process's, which the notebook has.
    make
        Makes a worker's; by default one in which the worker sees the shared entries too.
    """

    def __init__(self, name: str, shared: Any, make: Callable[[], Any] | None = None) -> None:
        self.shared = shared
        self._key = f"{OF_SCRIPT}{name}"
        self._make = make or (lambda: ChainMap({}, shared))
        if make is None:
            table.inherits(self._key, lambda own: shared.update(own.maps[0]))

    def here(self) -> Any:
        """The dictionary of who calls."""
        own = own_value(self._key, self._make)
        return self.shared if own is None else own

    def __getitem__(self, key: Any) -> Any:
        return self.here()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.here()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.here()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.here())

    def __len__(self) -> int:
        return len(self.here())

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As the dictionary of who calls does it."""
        return self.here().setdefault(key, default)

    def copy(self) -> dict[Any, Any]:
        """All entries that who calls sees."""
        return dict(self.here())

    def clear(self) -> None:
        """Take away those of who calls."""
        self.here().clear()


class ClassVariable(Generic[T]):
    """In a class: a variable that a worker may set for itself, until its script ends.

    Parameters
    ----------
    name
        What sets it: its key in `Worker.process_state`.
    notebooks
        The value of the notebook, which a worker has that has set none.
    """

    def __init__(self, name: str, notebooks: T) -> None:
        self.notebooks = notebooks
        self.key = f"{OF_SCRIPT}{name}"
        self._own: OwnSetting[T] = OwnSetting(name, imports_share=True)

    def __get__(self, instance: Any, owner: Any = None) -> T:
        return self._own.get(lambda: self.notebooks)

    def set(self, value: T) -> None:
        """Set it for who calls."""
        if not self._own.set(value):
            self.notebooks = value


class _Recorder:
    """Stands for a class to a method that sets variables of it."""

    def __init__(self, owner: type) -> None:
        vars(self)["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_owner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        variable = vars(vars(self)["_owner"]).get(name)
        assert isinstance(variable, ClassVariable)
        variable.set(value)


def own_class_variables(owner: type, patches: Patches, setter: str, *names: str) -> None:
    """Have variables of a class, which its class method `setter` sets, be the calling worker's.

    Variables that it inherits become its own, as they do when `setter` first sets them.
    """
    method = getattr(owner, setter).__func__
    calls_another = "__class__" in method.__code__.co_freevars  # that of a class before it

    def set_own(cls: type, *args: Any, **kwargs: Any) -> None:
        known = isinstance(vars(cls).get(names[0]), ClassVariable)
        method(_Recorder(cls) if known else cls, *args, **kwargs)

    def over(name: str) -> None:
        had, before = name in vars(owner), getattr(owner, name)
        variable = ClassVariable(f"{owner.__module__}.{owner.__qualname__}.{name}", before)
        setattr(owner, name, variable)
        table.inherits(variable.key, functools.partial(setattr, owner, name))

        def put_back() -> None:
            if had or variable.notebooks is not before:
                setattr(owner, name, variable.notebooks)
            else:
                delattr(owner, name)

        patches.at_undo(put_back)

    for name in names:
        over(name)
    if setter in vars(owner) and not calls_another:
        plain = vars(owner)[setter]
        setattr(owner, setter, classmethod(set_own))
        patches.at_undo(functools.partial(setattr, owner, setter, plain))


def own_variables(module: ModuleType, patches: Patches, *names: str) -> None:
    """Have functions, and the methods of classes, find variables of the worker's own.

    They run with a copy of the module's variables, which a worker makes when it first calls one of
    them, and keeps until its script ends. Others must not look at the variables themselves.

    Parameters
    ----------
    names
        All functions and classes of the module that read or write such a variable. No generators:
        these would go on when a script has ended.
    """
    key = f"{OF_SCRIPT}variables of {module.__name__}"
    table.inherits(key, functools.partial(_inherit_variables, module))

    def over(function: Any) -> Any:
        @functools.wraps(function)
        def with_own_variables(*args: Any, **kwargs: Any) -> Any:
            own = own_value(key, functools.partial(_copy_of_variables, module))
            if own is None:
                return function(*args, **kwargs)
            name, cells = function.__name__, function.__closure__
            copied = FunctionType(function.__code__, own, name, function.__defaults__, cells)
            copied.__kwdefaults__ = function.__kwdefaults__
            return copied(*args, **kwargs)

        return with_own_variables

    for name in names:
        value = getattr(module, name)
        if not isinstance(value, type):
            patches.replace(module, name, over, everywhere=True)
            continue
        for method, function in vars(value).copy().items():
            if isinstance(function, FunctionType):
                patches.replace(value, method, over)
            elif isinstance(function, classmethod):
                plain = over(function.__func__)
                setattr(value, method, classmethod(plain))
                patches.at_undo(functools.partial(setattr, value, method, function))


def owning_variables(*names: str) -> Callable[[ModuleType, Patches], None]:
    """For `Row.on_import`: `own_variables` of the module for these functions and classes."""
    return lambda module, patches: own_variables(module, patches, *names)


def owning_dicts(*names: str) -> Callable[[ModuleType, Patches], None]:
    """For `Row.on_import`: a `DictOfWorkers` in place of each of these, wherever it is bound."""

    def change(module: ModuleType, patches: Patches) -> None:
        for name in names:
            own = functools.partial(DictOfWorkers, f"{module.__name__}.{name}")
            patches.replace(module, name, own, everywhere=True)

    return change


def _copy_of_variables(module: ModuleType) -> dict[str, Any]:
    own = vars(module).copy()
    own[_AS_COPIED] = own.copy()
    return own


def _inherit_variables(module: ModuleType, own: dict[str, Any]) -> None:
    """All but functions and classes that the worker has not changed: these may be patched ones."""
    kinds = (BuiltinFunctionType, FunctionType, ModuleType, type)
    before = own[_AS_COPIED]
    for name, value in own.items():
        if name != _AS_COPIED and not (isinstance(value, kinds) and before.get(name) is value):
            setattr(module, name, value)
    for name in before.keys() - own.keys():
        delattr(module, name)


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _guard
    _guard = plain_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
