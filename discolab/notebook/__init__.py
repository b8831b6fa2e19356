"""The notebook front: magics, output by rank, completion. The only layer that knows IPython.

Each magic calls a method of a part of the `Lab`, and stands here as a function of the same name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from . import load_bars
from .cell import CellInterrupted, CellRun
from .comparing import Comparing
from .debugging import Debugging
from .lab import close_lab, open_lab, the_lab
from .loading import Loading
from .panels import Panels
from .programs import Programs
from .sessions import Sessions
from .snapshotting import Snapshotting
from .variables import Variables

R = TypeVar("R")

_completer: Any = None


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext discolab``."""
    global _completer
    from . import debug_magics, magics  # noqa: F401 - which enter themselves in the table
    from .completion import WorkerCompleter
    from .magic import register

    lab = open_lab(shell)
    load_bars.install()
    if _completer is None:
        register(shell, lab)
        _completer = WorkerCompleter(lab)
        _completer.install(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext discolab``: stops all sessions and takes every hook away."""
    global _completer
    if _completer is not None:
        _completer.uninstall(shell)
        _completer = None
    load_bars.uninstall()
    close_lab()


def _function(part: type[Any], method: Callable[..., R]) -> Callable[..., R]:
    """A method of a part of the kernel's `Lab` as a function."""

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> R:
        return method(the_lab().part(part), *args, **kwargs)

    _, *parameters = inspect.signature(method).parameters.values()
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


disco = _function(Programs, Programs.disco)
disco_abort = _function(Debugging, Debugging.disco_abort)
disco_back = _function(Debugging, Debugging.disco_back)
disco_break = _function(Debugging, Debugging.disco_break)
disco_compare = _function(Comparing, Comparing.disco_compare)
disco_continue = _function(Debugging, Debugging.disco_continue)
disco_dap = _function(Debugging, Debugging.disco_dap)
disco_debugger = _function(Panels, Panels.disco_debugger)
disco_devices = _function(Panels, Panels.disco_devices)
disco_doctor = _function(Sessions, Sessions.disco_doctor)
disco_eval = _function(Debugging, Debugging.disco_eval)
disco_explain = _function(Debugging, Debugging.disco_explain)
disco_forth = _function(Debugging, Debugging.disco_forth)
disco_forward = _function(Debugging, Debugging.disco_forward)
disco_history = _function(Debugging, Debugging.disco_history)
disco_load = _function(Loading, Loading.disco_load)
disco_mesh = _function(Sessions, Sessions.disco_mesh)
disco_next = _function(Debugging, Debugging.disco_next)
disco_out = _function(Debugging, Debugging.disco_out)
disco_pause = _function(Debugging, Debugging.disco_pause)
disco_pm = _function(Debugging, Debugging.disco_pm)
disco_pull = _function(Variables, Variables.disco_pull)
disco_push = _function(Variables, Variables.disco_push)
disco_registers = _function(Panels, Panels.disco_registers)
disco_restart = _function(Sessions, Sessions.disco_restart)
disco_run = _function(Programs, Programs.disco_run)
disco_session = _function(Sessions, Sessions.disco_session)
disco_set = _function(Debugging, Debugging.disco_set)
disco_shutdown = _function(Sessions, Sessions.disco_shutdown)
disco_snapshot = _function(Snapshotting, Snapshotting.disco_snapshot)
disco_status = _function(Sessions, Sessions.disco_status)
disco_step = _function(Debugging, Debugging.disco_step)
disco_timeline = _function(Panels, Panels.disco_timeline)
disco_traceback = _function(Debugging, Debugging.disco_traceback)
disco_until = _function(Debugging, Debugging.disco_until)
disco_where = _function(Debugging, Debugging.disco_where)
disco_whos = _function(Variables, Variables.disco_whos)

__all__ = [
    "CellInterrupted",
    "CellRun",
    "disco",
    "disco_abort",
    "disco_back",
    "disco_break",
    "disco_compare",
    "disco_continue",
    "disco_dap",
    "disco_debugger",
    "disco_devices",
    "disco_doctor",
    "disco_eval",
    "disco_explain",
    "disco_forth",
    "disco_forward",
    "disco_history",
    "disco_load",
    "disco_mesh",
    "disco_next",
    "disco_out",
    "disco_pause",
    "disco_pm",
    "disco_pull",
    "disco_push",
    "disco_registers",
    "disco_restart",
    "disco_run",
    "disco_session",
    "disco_set",
    "disco_shutdown",
    "disco_snapshot",
    "disco_status",
    "disco_step",
    "disco_timeline",
    "disco_traceback",
    "disco_until",
    "disco_where",
    "disco_whos",
    "load_ipython_extension",
    "unload_ipython_extension",
]
