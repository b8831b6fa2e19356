"""The notebook front: magics, output by rank, completion. The only layer that knows IPython.

Each magic is a thin wrapper over a function here of the same name.
"""

from __future__ import annotations

from typing import Any

from . import load_bars
from .cell import CellInterrupted, CellRun
from .lab import Lab, close_lab, open_lab, the_lab

_completer: Any = None


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext discolab``."""
    global _completer
    from .compare_magics import CompareMagics
    from .completion import WorkerCompleter
    from .debug_magics import DebugMagics
    from .looking_back_magics import LookingBackMagics
    from .magics import DiscoMagics
    from .view_magics import ViewMagics

    lab = open_lab(shell)
    load_bars.install()
    if _completer is None:
        for kind in (DiscoMagics, ViewMagics, DebugMagics, LookingBackMagics, CompareMagics):
            shell.register_magics(kind(shell, lab))
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


def disco_session(num_workers: int, **options: Any) -> Any:
    """See `Lab.disco_session`."""
    return the_lab().disco_session(num_workers, **options)


def disco(cell: str, **options: Any) -> Any:
    """See `Lab.disco`."""
    return the_lab().disco(cell, **options)


def disco_load(path: str, **options: Any) -> Any:
    """See `Lab.disco_load`."""
    return the_lab().disco_load(path, **options)


def disco_push(names: list[str], **options: Any) -> None:
    """See `Lab.disco_push`."""
    the_lab().disco_push(names, **options)


def disco_pull(names: list[str], **options: Any) -> None:
    """See `Lab.disco_pull`."""
    the_lab().disco_pull(names, **options)


def disco_mesh(axes: str | None = None, **options: Any) -> Any:
    """See `Lab.disco_mesh`."""
    return the_lab().disco_mesh(axes, **options)


def disco_status(name: str | None = None) -> str:
    """See `Lab.disco_status`."""
    return the_lab().disco_status(name)


def disco_doctor(n: int = 8, **options: Any) -> Any:
    """See `Lab.disco_doctor`."""
    return the_lab().disco_doctor(n, **options)


def disco_devices(**options: Any) -> Any:
    """See `Lab.disco_devices`."""
    return the_lab().disco_devices(**options)


def disco_registers(session: str | None = None, **options: Any) -> Any:
    """See `Lab.disco_registers`."""
    return the_lab().disco_registers(session, **options)


def disco_timeline(**options: Any) -> Any:
    """See `Lab.disco_timeline`."""
    return the_lab().disco_timeline(**options)


def disco_abort(**options: Any) -> list[int]:
    """See `Lab.disco_abort`."""
    return the_lab().disco_abort(**options)


def disco_break(where: str = "", ranks: Any = None, **options: Any) -> list[Any]:
    """See `Lab.disco_break`."""
    return the_lab().disco_break(where, ranks, **options)


def disco_compare(reference: str, inputs: Any = (), cell: str | None = None, **options: Any) -> Any:
    """See `Lab.disco_compare`."""
    return the_lab().disco_compare(reference, inputs, cell, **options)


def disco_continue(n: int = 1, ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_continue`."""
    return the_lab().disco_continue(n, ranks, **options)


def disco_eval(expression: str, ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_eval`."""
    return the_lab().disco_eval(expression, ranks, **options)


def disco_next(ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_next`."""
    return the_lab().disco_next(ranks, **options)


def disco_out(ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_out`."""
    return the_lab().disco_out(ranks, **options)


def disco_pause(**options: Any) -> Any:
    """See `Lab.disco_pause`."""
    return the_lab().disco_pause(**options)


def disco_pm(ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_pm`."""
    return the_lab().disco_pm(ranks, **options)


def disco_set(name: str, expression: str, ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_set`."""
    return the_lab().disco_set(name, expression, ranks, **options)


def disco_step(ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_step`."""
    return the_lab().disco_step(ranks, **options)


def disco_until(line: int | None = None, ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_until`."""
    return the_lab().disco_until(line, ranks, **options)


def disco_where(ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_where`."""
    return the_lab().disco_where(ranks, **options)


def disco_run(path: str, args: list[str] | tuple[str, ...] = (), **options: Any) -> Any:
    """See `Lab.disco_run`."""
    return the_lab().disco_run(path, args, **options)


def disco_back(n: int = 1, **options: Any) -> Any:
    """See `Lab.disco_back`."""
    return the_lab().disco_back(n, **options)


def disco_debugger(**options: Any) -> Any:
    """See `Lab.disco_debugger`."""
    return the_lab().disco_debugger(**options)


def disco_forth(n: int = 1, **options: Any) -> Any:
    """See `Lab.disco_forth`."""
    return the_lab().disco_forth(n, **options)


def disco_history(name: str | None = None, ranks: Any = None, **options: Any) -> Any:
    """See `Lab.disco_history`."""
    return the_lab().disco_history(name, ranks, **options)


def disco_restart(name: str | None = None, **options: Any) -> Any:
    """See `Lab.disco_restart`."""
    return the_lab().disco_restart(name, **options)


def disco_shutdown(name: str | None = None) -> None:
    """See `Lab.disco_shutdown`."""
    the_lab().disco_shutdown(name)


__all__ = [
    "CellInterrupted",
    "CellRun",
    "Lab",
    "disco",
    "disco_abort",
    "disco_back",
    "disco_break",
    "disco_compare",
    "disco_continue",
    "disco_debugger",
    "disco_devices",
    "disco_doctor",
    "disco_eval",
    "disco_forth",
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
    "disco_status",
    "disco_step",
    "disco_timeline",
    "disco_until",
    "disco_where",
    "load_ipython_extension",
    "unload_ipython_extension",
]
