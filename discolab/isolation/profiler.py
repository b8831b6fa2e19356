"""torch's profiler, of which a process has one."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..runtime.errors import SessionError
from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment

_lock = threading.Lock()


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _profiler(module: ModuleType, patches: Patches) -> None:
    """There is one profiler in a process, and a second one that is started brings it down."""
    running: list[int] = []  # the thread that profiles

    def enable_over(enable: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(enable)
        def enable_alone(*args: Any, **kwargs: Any) -> Any:
            with _lock:
                if (
                    running
                    and running[0] != threading.get_ident()
                    and current_worker_or_none() is not None
                ):
                    raise SessionError(
                        "torch's profiler is running on another thread; a process has only one, "
                        "which sees what its own thread does. Start it on one worker: "
                        "with profile() if rank == 0 else contextlib.nullcontext()"
                    )
                running[:] = [threading.get_ident()]
            return enable(*args, **kwargs)

        return enable_alone

    def disable_over(disable: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(disable)
        def disable_and_forget(*args: Any, **kwargs: Any) -> Any:
            if running == [threading.get_ident()]:
                running.clear()
            return disable(*args, **kwargs)

        return disable_and_forget

    patches.replace(module, "_prepare_profiler", enable_over)
    patches.replace(module, "_enable_profiler", enable_over)
    patches.replace(module, "_disable_profiler", disable_over)


table.add(
    Row(
        state="`torch.profiler`",
        treatment=Treatment.REFUSED,
        meaning="An error on all but one worker: `with profile() if rank == 0 else nullcontext()`.",
        test="tests/ccl/test_dist_limits.py::test_one_worker_may_profile",
        on_import={"torch.autograd.profiler": _profiler},
    )
)
