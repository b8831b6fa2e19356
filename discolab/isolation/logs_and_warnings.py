"""The settings of `logging` and `warnings`: each worker has its own.

A logger's level, handlers, filters and switches are attributes that every module sets: descriptors
on `logging.Logger` and its manager give each worker its own, which begin as the process's. A
handler of the process's that several workers use writes each record as its own worker's.
`logging.config` and `logging.shutdown` close all handlers there are: on a worker those it made.

`warnings.catch_warnings` saves attributes of the module and puts them back, so that of four threads
at once one may put back what another has set. A worker therefore sees a copy of that module, with
filters of its own. What a module does to either while it is imported concerns all: it is imported
once.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch._logging import _internal as torch_logs

from ..runtime.interrupts import reentrant_lock, run_steps
from ..runtime.worker import Worker, has_own_process
from . import table
from .imports import worker_unless_importing
from .patches import ModuleOfWorkers, Patches
from .table import Row, Treatment
from .worker_local import OF_SCRIPT, DictOfWorkers

LOGGING = "logging"  # in `Worker.process_state`: by object and name
# in it too, by these names
_FACTORY, _SHOWN, _TORCH = "makes records", "shows warnings", "torch._logging.set_logs"
_HANDLERS = f"{OF_SCRIPT}logging.handlers"
_WARNINGS = "warnings"
_MARK = "discolab"  # in what a logger remembers, beside levels
_NOTHING: dict[Any, Any] = {}
_MODULES = ("warnings", "_py_warnings")  # 3.14 has the functions in the second
_OF_MODULE = frozenset({"__class__", "__reduce__", "__reduce_ex__"})
_SHOW = warnings._showwarnmsg_impl  # type: ignore[attr-defined] # before anybody catches warnings


class _OfWorkers:
    """An attribute of which each worker has its own; `copy` makes its first one."""

    def __init__(self, name: str, copy: Callable[[Any], Any] | None = None) -> None:
        self._name, self._copy = name, copy

    def __get__(self, owner: Any, kind: type[Any]) -> Any:
        if owner is None:
            return self
        worker, shared = worker_unless_importing(), owner.__dict__[self._name]
        if worker is None:
            return shared
        own, key = worker.process_state.get(LOGGING, _NOTHING), (id(owner), self._name)
        if key in own:
            return own[key][1]
        if self._copy is None:
            return shared
        own = worker.process_state.setdefault(LOGGING, {})
        return own.setdefault(key, (owner, self._copy(shared)))[1]

    def __set__(self, owner: Any, value: Any) -> None:
        worker = worker_unless_importing()
        if worker is None or self._name not in vars(owner):  # made for all
            vars(owner)[self._name] = value
            return
        own = worker.process_state.setdefault(LOGGING, {})
        own[id(owner), self._name] = (owner, value)


class _Cache(_OfWorkers):
    """What a logger remembers of levels: a worker's logger has a memory of its own.

    `logging` empties all loggers' when a level is set. What a worker remembers bears the mark that
    the process's had then: a level that the notebook sets is a worker's too, who has set none.
    """

    def __get__(self, owner: Any, kind: type[Any]) -> Any:
        worker = None if owner is None else worker_unless_importing()
        if worker is None:
            return super().__get__(owner, kind)
        shared = owner.__dict__[self._name]
        mark = shared.get(_MARK) or shared.setdefault(_MARK, object())
        own, key = worker.process_state.setdefault(LOGGING, {}), (id(owner), self._name)
        entry = own.get(key)
        if entry is None or entry[1].get(_MARK) is not mark:
            entry = own[key] = owner, {_MARK: mark}
        return entry[1]

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value


def _install_logging(patches: Patches) -> None:
    for name in ("level", "disabled", "propagate"):
        patches.add(logging.Logger, name, _OfWorkers(name))
    for name in ("handlers", "filters"):
        patches.add(logging.Logger, name, _OfWorkers(name, list))
    patches.add(logging.Logger, "_cache", _Cache("_cache"))
    patches.at_undo(logging.root.manager._clear_cache)  # type: ignore[attr-defined]  # of marks
    for name in ("_disable", "loggerClass"):
        patches.add(logging.Manager, name, _OfWorkers(name))
    patches.replace(logging, "setLoggerClass", _set_class_over, everywhere=True)
    patches.replace(logging, "getLoggerClass", _get_class_over, everywhere=True)
    for name in ("_levelToName", "_nameToLevel"):
        patches.replace(logging, name, functools.partial(DictOfWorkers, f"logging.{name}"))
    patches.replace(logging, "captureWarnings", _capture_over, everywhere=True)
    _install_factory(patches)
    _install_handlers(patches)


def _settings() -> dict[Any, Any] | None:
    """What the calling worker has set of `logging`; None where that is the process's."""
    worker = worker_unless_importing()
    if worker is None:
        return None
    settings: dict[Any, Any] = worker.process_state.setdefault(LOGGING, {})
    return settings


def _set_class_over(set_class: Callable[[type], None]) -> Callable[[type], None]:
    @functools.wraps(set_class)
    def set_own_class(klass: type[logging.Logger]) -> None:
        if _settings() is None:
            set_class(klass)
        else:
            logging.root.manager.setLoggerClass(klass)  # an attribute of which each has its own

    return set_own_class


def _get_class_over(get_class: Callable[[], type]) -> Callable[[], type]:
    @functools.wraps(get_class)
    def get_own_class() -> type:
        own = None if _settings() is None else logging.root.manager.loggerClass
        return own or get_class()

    return get_own_class


def _install_factory(patches: Patches) -> None:
    """Have `logging` make records with the factory of who logs."""
    notebooks = logging._logRecordFactory  # type: ignore[attr-defined]

    def get_factory() -> Any:
        return (_settings() or {}).get(_FACTORY) or notebooks

    def set_factory(factory: Any) -> None:
        nonlocal notebooks
        settings = _settings()
        if settings is None:
            notebooks = factory
        else:
            settings[_FACTORY] = factory

    def make_record(*args: Any, **kwargs: Any) -> Any:
        return get_factory()(*args, **kwargs)

    def put_back() -> None:
        logging._logRecordFactory = notebooks  # type: ignore[attr-defined]

    patches.replace(logging, "_logRecordFactory", lambda _: make_record)
    patches.replace(logging, "getLogRecordFactory", lambda _: get_factory, everywhere=True)
    patches.replace(logging, "setLogRecordFactory", lambda _: set_factory, everywhere=True)
    patches.at_undo(put_back)


def _capture_over(capture: Callable[[bool], None]) -> Callable[[bool], None]:
    """`logging` keeps once what to put back in `warnings`, of which each worker has its own."""

    @functools.wraps(capture)
    def capture_own(capture_: bool) -> None:
        settings = _settings()
        if settings is None:
            capture(capture_)
        elif capture_ and _SHOWN not in settings:
            settings[_SHOWN] = warnings.showwarning
            warnings.showwarning = logging._showwarning  # type: ignore[attr-defined]
        elif not capture_ and _SHOWN in settings:
            warnings.showwarning = settings.pop(_SHOWN)

    return capture_own


class _HandlersOfWorkers(list[Any]):
    """The handlers to be closed in the end: on a worker those that it has made."""

    def __init__(self, shared: list[Any]) -> None:
        super().__init__()
        self._shared = shared

    def _here(self) -> list[Any]:
        worker = worker_unless_importing()
        if worker is None:
            return self._shared
        own: list[Any] = worker.process_state.setdefault(_HANDLERS, [])
        return own

    def __getitem__(self, index: Any) -> Any:
        return self._here()[index]

    def __delitem__(self, index: Any) -> None:
        del self._here()[index]

    def __contains__(self, item: object) -> bool:
        return item in self._here()

    def append(self, item: Any) -> None:
        """Enter a handler, by a weak reference."""
        self._here().append(item)

    def remove(self, item: Any) -> None:
        """Forget a handler."""
        self._here().remove(item)


def _install_handlers(patches: Patches) -> None:
    handlers = patches.replace(logging, "_handlerList", _HandlersOfWorkers)
    patches.replace(
        logging,
        "_handlers",
        lambda names: DictOfWorkers("logging._handlers", names, weakref.WeakValueDictionary),
    )
    shutdown: Any = logging.shutdown
    before, shutdown.__defaults__ = shutdown.__defaults__, (handlers,)
    patches.at_undo(lambda: setattr(shutdown, "__defaults__", before))


class _TorchLogs:
    """What `torch._logging` was told to log, ``_internal.log_state``: that of who asks."""

    def __init__(self, notebooks: Any) -> None:
        self._notebooks = notebooks

    def here(self) -> Any:
        """A worker's own begins as the notebook's, as the levels of its loggers do."""
        settings = _settings()
        if settings is None:
            return self._notebooks
        if _TORCH not in settings:
            settings[_TORCH] = copy.deepcopy(self._notebooks)
        return settings[_TORCH]

    def set(self, state: Any) -> None:
        """Have another one."""
        settings = _settings()
        if settings is None:
            self._notebooks = state
        else:
            settings[_TORCH] = state

    def set_from_environment(self) -> None:
        """As torch does when it sets up its loggers."""
        wanted = os.environ.get(torch_logs.LOG_ENV_VAR)
        if wanted is not None:
            self.set(torch_logs._parse_log_settings(wanted))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here(), name)


def _install_torch_logs(patches: Patches) -> None:
    logs = patches.replace(torch_logs, "log_state", _TorchLogs)
    patches.replace(torch_logs, "_get_log_state", lambda _: logs.here)
    patches.replace(torch_logs, "_set_log_state", lambda _: logs.set)
    patches.replace(torch_logs, "_update_log_state_from_env", lambda _: logs.set_from_environment)
    patches.at_undo(lambda: setattr(torch_logs, "log_state", logs._notebooks))


def _torch_logs_in_child(worker: Worker) -> None:
    settings = worker.process_state.get(LOGGING, {})
    torch_logs.log_state = settings.get(_TORCH, torch_logs.log_state)


def _leave(worker: Worker) -> None:
    """The handlers of a worker's cells end with the worker."""
    logging.shutdown(worker.process_state.get(_HANDLERS, []))


@contextmanager
def fresh_logging(worker: Worker) -> Iterator[None]:
    """Within it a worker has the root logger of a new process, and its settings end with it."""
    root, manager = logging.root, logging.root.manager
    if has_own_process(worker):
        before = list(root.handlers), list(root.filters), root.level, manager.disable
        makes = logging.getLogRecordFactory(), logging.getLoggerClass()
        root.handlers[:], root.filters[:], root.level = [], [], logging.WARNING
        try:
            yield
        finally:
            root.handlers[:], root.filters[:], root.level, manager.disable = before
            logging.setLogRecordFactory(makes[0])
            logging.setLoggerClass(makes[1])
            manager._clear_cache()  # type: ignore[attr-defined]
        return
    state = worker.process_state
    settings, handlers = state.get(LOGGING, {}), state.pop(_HANDLERS, [])
    state[LOGGING] = {
        (id(root), "handlers"): (root, []),
        (id(root), "filters"): (root, []),
        (id(root), "level"): (root, logging.WARNING),
    }
    try:
        yield
    finally:
        logging.shutdown(state.get(_HANDLERS, []))
        state[LOGGING], state[_HANDLERS] = settings, handlers


def _in_child(worker: Worker) -> None:
    settings = worker.process_state.get(LOGGING, {})
    for key, setting in settings.items():
        if isinstance(key, tuple):
            owner, value = setting
            vars(owner)[key[1]] = value
    logging.setLogRecordFactory(settings.get(_FACTORY) or logging.getLogRecordFactory())
    copy = worker.process_state.get(_WARNINGS)
    if copy is not None:
        warnings.filters[:] = copy.filters  # type: ignore[index]


def _install_warnings(patches: Patches) -> None:
    # before the module's class: a worker that starts a session would set these in its own copy
    for name in ("simplefilter", "filterwarnings", "resetwarnings"):
        patches.replace(warnings, name, _of_own_copy, everywhere=True)
    patches.change_class(warnings, _Warnings)


def _of_own_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """What sets filters, for who has bound it by name, as the class `catch_warnings` has."""

    @functools.wraps(function)
    def set_filters(*args: Any, **kwargs: Any) -> None:
        worker = worker_unless_importing()
        own = None if worker is None else _copy_of(worker)
        (function if own is None else getattr(own, function.__name__))(*args, **kwargs)

    return set_filters


class _Warnings(ModuleOfWorkers):
    """The module `warnings`, which is a worker's own copy for a worker."""

    def __getattribute__(self, name: str) -> Any:
        worker = worker_unless_importing()
        if worker is None or name in _OF_MODULE:
            return super().__getattribute__(name)
        return getattr(_copy_of(worker), name)

    def __setattr__(self, name: str, value: Any) -> None:
        worker = worker_unless_importing()
        if worker is None or name in _OF_MODULE:
            super().__setattr__(name, value)
        else:
            setattr(_copy_of(worker), name, value)


def _copy_of(worker: Worker) -> ModuleType:
    copy: ModuleType | None = worker.process_state.get(_WARNINGS)
    if copy is None:
        copy = _make_copy()
        copy = worker.process_state.setdefault(_WARNINGS, copy)
    return copy


def _make_copy() -> ModuleType:
    """A module of the same functions, with filters of its own; classes are the same."""
    names = ModuleType.__getattribute__(warnings, "__dict__")
    copy = ModuleType("warnings")
    own = vars(copy)
    own.update(names)
    for name, value in {**names, "_showwarnmsg_impl": _SHOW}.items():
        value = getattr(value, "__wrapped__", value)
        if type(value) is FunctionType and value.__module__ in _MODULES:
            # those of 3.14 ask the module for all they need, which is this one for the worker
            globals_ = own if value.__globals__ is names else value.__globals__
            code, defaults = value.__code__, value.__defaults__
            mine = FunctionType(code, globals_, name, defaults, value.__closure__)
            mine.__kwdefaults__ = value.__kwdefaults__
            own[name] = mine
    own["showwarning"] = own["_showwarning_orig"]
    own["filters"] = list(names["filters"])
    if "_warnings_context" in names:  # 3.14
        held = names["_warnings_context"].get(None)
        if held is not None and "_filters" in vars(held):  # of the block in which the thread began
            mine = held.copy()  # what is recorded there stays one list
            own["filters"] = mine._filters
            names["_warnings_context"].set(mine)
    if "_acquire_lock" in names:  # 3.14: an interrupt could leave the process's lock taken for ever
        changed = names["_filters_mutated_lock_held"]
        steps = [names["_acquire_lock"], changed, names["_release_lock"]]
        own["_lock"] = reentrant_lock()
        own["_filters_mutated_lock_held"] = lambda: run_steps(map(operator.call, steps))
    return copy


table.add(
    Row(
        state="levels, handlers, filters and switches of `logging`",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets on a logger is its own, and begins as the process's, and so "
        "are names of levels, the class of loggers and what makes records; a script begins with a "
        "root logger that nobody has configured. `logging.config` and `shutdown` close the "
        "worker's own handlers. A handler that the process had before is one object: its own level "
        "and stream are shared; and a logger's object is that of whoever asked for it first.",
        test="tests/isolation/test_process_state.py::test_each_worker_configures_logging",
        install=_install_logging,
        leave=_leave,
        in_child=_in_child,
        library="Python",
    )
)
table.add(
    Row(
        state="filters of `warnings`",
        treatment=Treatment.PER_WORKER,
        meaning="`warnings.simplefilter`, `catch_warnings` and their like concern the worker that "
        "calls them. Which warnings were given once already is the process's: of several workers "
        "one may show it.",
        test="tests/isolation/test_process_state.py::test_each_worker_catches_its_own_warnings",
        install=_install_warnings,
        library="Python",
    )
)
table.add(
    Row(
        state="`torch._logging.set_logs`",
        treatment=Treatment.PER_WORKER,
        meaning="What torch logs for a worker is what that worker has asked for; a worker that "
        "asks for nothing has the notebook's. A script's end forgets it.",
        test="tests/isolation/test_process_state.py::test_each_worker_sets_logs_of_torch",
        install=_install_torch_logs,
        in_child=_torch_logs_in_child,
    )
)
