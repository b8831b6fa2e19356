"""`input()`, `breakpoint()` and `pdb.set_trace()` inside a worker.

Several workers can't share one keyboard: `input()` is a clear error rather than a hang, and the two
others stop the workers for discolab's debugger. Outside of workers all of them are as before.
ipykernel binds `input` anew for each cell, to the kernel's `raw_input`: that is wrapped too.
"""

from __future__ import annotations

import builtins
import pdb
import sys
from collections.abc import Callable
from typing import Any

from ..runtime.errors import DiscoError
from ..runtime.sources import place
from ..runtime.worker import current_worker_or_none

_undo: list[tuple[Any, str, Any]] = []


def install(kernel: Any = None) -> None:
    """Have each of them look first who calls."""
    if _undo:
        return
    _wrap(builtins, "input", _no_input)
    for name in ("raw_input", "getpass"):
        if hasattr(kernel, name):
            _wrap(kernel, name, _no_input)
    _wrap(sys, "breakpointhook", _stop("breakpoint()"))
    _wrap(pdb, "set_trace", _stop("pdb.set_trace()"))


def uninstall() -> None:
    """Put all of them back."""
    while _undo:
        setattr(*_undo.pop())


def _wrap(owner: Any, name: str, for_workers: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def choose(*args: Any, **kwargs: Any) -> Any:
        if current_worker_or_none() is None:
            return original(*args, **kwargs)
        return for_workers()

    _undo.append((owner, name, original))
    setattr(owner, name, choose)


def _no_input() -> None:
    raise DiscoError(
        "input() can't be used on a worker: ask in an ordinary cell and send the answer "
        "with %disco_push"
    )


def _stop(what: str) -> Callable[[], None]:
    def stop() -> None:
        from ..debugger.tracer import stop_here  # which few cells need

        frame = sys._getframe(2)
        if not stop_here("breakpoint()", "" if what == "breakpoint()" else what, frame=frame):
            where = place(frame.f_code.co_filename, frame.f_lineno)
            print(f"{what} at {where} skipped: no debugger is attached to this session")

    return stop
