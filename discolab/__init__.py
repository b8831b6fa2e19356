"""discolab: write, see and step through sharded torch programs from a notebook.

A `ThreadedSession` starts workers inside this process; each call on it runs on all of them
and returns a `DRef`, one name for the value that each worker holds. In a notebook:
``%load_ext discolab``, ``%disco_session 4``, ``%%disco``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ccl, debugger, loader, rpc, trace, views
from .debugger import Debugger, DebuggerError, Evaluated, Stop, debugger_of
from .debugger.assertions import disco_assert
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
from .views import view

if TYPE_CHECKING:
    from .ccl.doctor import Diagnosis, doctor
    from .debugger.compare import compare, note
    from .notebook.widgets.plot import plot

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What few programs use is imported when it is first used."""
    if name in ("Diagnosis", "doctor"):
        from .ccl import doctor as module
        from .views import doctor_parts as _draws_it  # noqa: F401

        return getattr(module, name)
    if name in ("compare", "note"):
        from .debugger import compare as comparing

        return getattr(comparing, name)
    if name == "plot":
        from .notebook.widgets.plot import plot

        return plot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "trace",
    "view",
    "views",
]
