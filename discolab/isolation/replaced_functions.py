"""Functions that a worker puts in place of a module's are the worker's own.

A program counts its collectives, silences `print` on all ranks but one, or tries a kernel of its
own, by putting a function in place of a module's. Worker threads would each wrap what the one
before has put there, and each call would be counted as often as there are workers.

In the module's dict, where its own functions look, stands one that calls the caller's function; who
reads ``module.name`` is given that itself. This is for functions alone: classes, and what is set in
classes, are one for all, and so is what a module puts elsewhere while it is imported.

`_lock` guards what is replaced; calls read it without.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..runtime.interrupts import plain_lock, shield
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .imports import worker_unless_importing
from .patches import ModuleWithProperties, Patches
from .table import OF_SCRIPT, Row, Treatment

_HERE = f"{__name__.partition('.')[0]}."
_lock = plain_lock()
_modules: list[_Functions] = []  # those of which workers may replace functions


class _Replaced:
    """A function of which workers have put others in place."""

    def __init__(self, names: dict[str, Any], name: str, key: str) -> None:
        self.key = key
        self.shared = names[name]  # of the notebook, and of workers that have not replaced it
        self.workers: weakref.WeakSet[Worker] = weakref.WeakSet()  # that have
        by_its_name = names is vars(builtins)
        self.dispatcher = _dispatcher(self, by_its_name)
        table.inherits(key, functools.partial(names.__setitem__, name))

    def here(self) -> Any:
        """That of the worker that calls."""
        worker = current_worker_or_none()
        return self.shared if worker is None else worker.process_state.get(self.key, self.shared)


def _dispatcher(replaced: _Replaced, by_its_name: bool) -> Callable[..., Any]:
    """What calls the caller's function.

    Who asks for a function `by_its_name` alone, as for ``print``, may have got this one and wrapped
    it: what a worker's own function calls is not the worker's own once more.
    """
    within = threading.local()

    @functools.wraps(replaced.shared)
    def call_own(*args: Any, **kwargs: Any) -> Any:
        function = replaced.here()
        if not by_its_name or function is replaced.shared:
            return function(*args, **kwargs)
        if getattr(within, "own", False):
            return replaced.shared(*args, **kwargs)
        try:
            within.own = True
            return function(*args, **kwargs)
        finally:
            within.own = False

    return call_own


class _Functions:
    """The functions of a module, of which each worker may replace some for itself."""

    def __init__(self, module: ModuleType, patches: Patches) -> None:
        self._module, self._names = module, vars(module)
        self._replaced: dict[str, _Replaced] = {}
        about = {
            "__setattr__": lambda _, name, value: self._set(name, value, sys._getframe(1)),
            "__delattr__": lambda _, name: self._delete(name),
        }
        self._kind = type("ModuleOfFunctions", (ModuleWithProperties, type(module)), about)
        patches.change_class(module, self._kind)
        _modules.append(self)
        patches.at_undo(self._end)

    def _set(self, name: str, value: Any, caller: Any) -> None:
        worker = worker_unless_importing()
        if str(caller.f_globals.get("__name__")).startswith(_HERE):
            worker = None
        with shield(), _lock:
            replaced = self._replaced.get(name)
            if replaced is None:
                if worker is None or not _is_function(self._names.get(name)):
                    ModuleType.__setattr__(self._module, name, value)
                    return
                replaced = self._replace(name)
            if value is replaced.dispatcher:  # as what looks into the dict has found it
                value = replaced.shared
            if worker is None:
                replaced.shared = value
            elif value is replaced.shared:
                worker.process_state.pop(replaced.key, None)
            else:
                worker.process_state[replaced.key] = value
                replaced.workers.add(worker)

    def _replace(self, name: str) -> _Replaced:
        key = f"{OF_SCRIPT}in place of {self._module.__name__}.{name}"
        replaced = self._replaced[name] = _Replaced(self._names, name, key)
        setattr(self._kind, name, property(lambda _: replaced.here()))
        self._names[name] = replaced.dispatcher
        return replaced

    def _delete(self, name: str) -> None:
        with shield(), _lock:
            if name in self._replaced:
                self._put_back(name)
            ModuleType.__delattr__(self._module, name)

    def _put_back(self, name: str) -> None:
        replaced = self._replaced.pop(name)
        delattr(self._kind, name)
        self._names[name] = replaced.shared

    def leave(self, worker: Worker) -> None:
        """A worker ends: what no other has replaced is in the module as it was."""
        with shield(), _lock:
            for name, replaced in tuple(self._replaced.items()):
                replaced.workers.discard(worker)
                if not any(replaced.key in other.process_state for other in replaced.workers):
                    self._put_back(name)

    def _end(self) -> None:
        with shield(), _lock:
            _modules.remove(self)
            for name in tuple(self._replaced):
                self._put_back(name)


def _is_function(value: Any) -> bool:
    return callable(value) and not issubclass(type(value), type)


def _leave(worker: Worker) -> None:
    for functions in tuple(_modules):
        functions.leave(worker)


def _change(module: ModuleType, patches: Patches) -> None:
    _Functions(module, patches)


MODULES = (
    "builtins",
    "torch.autograd",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.distributed.distributed_c10d",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.utils",
    "torch.utils.checkpoint",
)
"""Those of which programs replace functions; not `torch`, which is asked most often."""

table.add(
    Row(
        state="functions that are put in place of others: in "
        + ", ".join(f"`{name}`" for name in MODULES),
        treatment=Treatment.PER_WORKER,
        meaning="As `dist.all_reduce = counted`, `F.gelu = mine` or `builtins.print = of_rank_0`: "
        "the worker that sets it has it, the module's own functions call it for that worker, and "
        "its script's end takes it away. What is put into other modules, or into classes, is for "
        "all.",
        test="tests/isolation/test_replaced_functions.py::test_each_worker_counts_its_own_calls",
        on_import=dict.fromkeys(MODULES, _change),
        leave=_leave,
    )
)
