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
    from .completion import WorkerCompleter
    from .magics import DiscoMagics
    from .view_magics import ViewMagics

    lab = open_lab(shell)
    load_bars.install()
    if _completer is None:
        shell.register_magics(DiscoMagics(shell, lab), ViewMagics(shell, lab))
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
    "disco_devices",
    "disco_doctor",
    "disco_load",
    "disco_mesh",
    "disco_pull",
    "disco_push",
    "disco_registers",
    "disco_restart",
    "disco_session",
    "disco_shutdown",
    "disco_status",
    "disco_timeline",
    "load_ipython_extension",
    "unload_ipython_extension",
]
