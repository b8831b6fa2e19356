"""discolab: write, see and step through sharded torch programs from a notebook.

A `ThreadedSession` starts workers inside this process; each call on it runs on all of them
and returns a `DRef`, one name for the value that each worker holds. In a notebook:
``%load_ext discolab``, ``%disco_session 4``, ``%%disco``.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# nothing of what is imported is garbage, but torch leaves so many objects that a collection, which
# the first few of ours would set off, takes longer than the whole import
_collects = gc.isenabled()
gc.disable()
try:
    from . import ccl, loader
    from .engines import ProcessSession, ThreadedSession, make_session
    from .runtime import (
        ArgumentError,
        CollectiveAborted,
        CollectiveError,
        DiscoAction,
        DiscoAssertionError,
        DiscoError,
        DModule,
        DPackedFunc,
        DRef,
        Failure,
        ForeignDRefError,
        Pickled,
        RestartedWorker,
        Session,
        SessionClosedError,
        SessionError,
        SessionStatistics,
        UnknownFunctionError,
        WaitTimeoutError,
        Worker,
        WorkerError,
        WorkerInterrupted,
        WorkerStatus,
        current_worker,
        current_worker_or_none,
        list_funcs,
        register_func,
    )
    from .runtime.display import Drawn
    from .runtime.services import PRELOAD, SERVICES
finally:
    if _collects:
        gc.enable()

if TYPE_CHECKING:
    from . import dap, debugger, rpc, snapshots, trace, views
    from .ccl.doctor import Diagnosis, doctor
    from .comparison import compare, note
    from .debugger import Debugger, DebuggerError, Evaluated, Stop, debugger_of
    from .debugger.assertions import disco_assert
    from .notebook.widgets.plot import plot
    from .views import view

__version__ = "0.1.0"

_LATER = {
    "Debugger": ".debugger",
    "DebuggerError": ".debugger",
    "Diagnosis": ".ccl.doctor",
    "Evaluated": ".debugger",
    "Stop": ".debugger",
    "compare": ".comparison",
    "debugger_of": ".debugger",
    "disco_assert": ".debugger.assertions",
    "doctor": ".ccl.doctor",
    "note": ".comparison",
    "plot": ".notebook.widgets.plot",
    "view": ".views",
}
_LATER_MODULES = ("dap", "debugger", "rpc", "snapshots", "trace", "views")


def __getattr__(name: str) -> Any:
    """What few programs use is imported when it is first used."""
    if name in _LATER_MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name], __name__), name)
    globals()[name] = found  # the import may have left a module of that name there
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module, __name__), name)(*args, **kwargs)

    return call


Session.above["compare"] = _later(".views.difference", "compare")
Session.above["rpc"] = _later(".rpc.api", "rpc_of")
Session.above["explain"] = _later(".debugger.explaining", "explain")
Session.above["snapshot"] = _later(".snapshots.saving", "snapshot")
Session.above["restore"] = _later(".snapshots.restoring", "restore")
# where workers are in other processes, which may use it first, a session imports it as it starts
SERVICES["rpc"] = _later(".rpc.directory", "RpcService")
Drawn.draw_as = staticmethod(_later(".views.pictures", "draw_as"))
# workers answer looks and calls of these beside what they compute, where nothing should be imported
PRELOAD += [f"{__name__}.{name}" for name in ("views", "debugger", "rpc")]


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext discolab``."""
    from .notebook import load_ipython_extension as load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Called by ``%unload_ext discolab``."""
    from .notebook import unload_ipython_extension as unload

    unload(shell)


__all__ = [
    "ArgumentError",
    "CollectiveAborted",
    "CollectiveError",
    "DModule",
    "DPackedFunc",
    "DRef",
    "Debugger",
    "DebuggerError",
    "Diagnosis",
    "DiscoAction",
    "DiscoAssertionError",
    "DiscoError",
    "Evaluated",
    "Failure",
    "ForeignDRefError",
    "Pickled",
    "RestartedWorker",
    "ProcessSession",
    "Session",
    "SessionClosedError",
    "SessionError",
    "SessionStatistics",
    "Stop",
    "ThreadedSession",
    "UnknownFunctionError",
    "WaitTimeoutError",
    "Worker",
    "WorkerError",
    "WorkerInterrupted",
    "WorkerStatus",
    "ccl",
    "compare",
    "current_worker",
    "current_worker_or_none",
    "dap",
    "debugger",
    "debugger_of",
    "disco_assert",
    "doctor",
    "list_funcs",
    "loader",
    "make_session",
    "note",
    "plot",
    "register_func",
    "rpc",
    "snapshots",
    "trace",
    "view",
    "views",
]
