"""The notebook front: magics, output by rank, completion. The only layer that knows IPython.

Each magic calls a method of a part of the `Lab`, and stands here as a function of the same name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

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


_PARTS = (
    Sessions, Programs, Variables, Loading, Snapshotting, Debugging, Comparing, Panels
)  # fmt: skip


def __getattr__(name: str) -> Callable[..., Any]:
    """A method of a part of the kernel's `Lab` as a function: ``disco_step``."""
    part = next((each for each in _PARTS if name in __all__ and hasattr(each, name)), None)
    if part is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = getattr(part, name)

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(the_lab().part(part), *args, **kwargs)

    _, *parameters = inspect.signature(method).parameters.values()
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
