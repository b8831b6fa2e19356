"""Threads that a worker's code starts belong to it, and its sleeps can be interrupted."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from ..runtime.errors import WaitTimeoutError
from ..runtime.waiter import waiter_here
from ..runtime.worker import bind_thread, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment

# New functions each time: who wrapped ours, and left the wrapper there when we went, ends up
# below the next ones and still calls what was there before ours.


def _start_over(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_for_worker(self: threading.Thread) -> None:
        worker = current_worker_or_none()
        if worker is not None:
            run = self.run

            def run_for_worker() -> None:
                bind_thread(worker)
                run()

            self.run = run_for_worker  # type: ignore[method-assign]
            with worker.sheltered():
                start(self)
        else:
            start(self)

    return start_for_worker


def _sleep_over(sleep: Callable[[float], None]) -> Callable[[float], None]:
    @functools.wraps(sleep)
    def sleep_or_end(seconds: float, /) -> None:
        waiter = waiter_here()
        if waiter is None or not seconds > 0:
            sleep(seconds)
            return
        until = time.monotonic() + seconds  # the worker's own clock may stand
        try:
            waiter.wait_for(lambda: time.monotonic() >= until, f"time.sleep({seconds:g})", seconds)
        except WaitTimeoutError:
            pass

    return sleep_or_end


def _install(patches: Patches) -> None:
    patches.replace(threading.Thread, "start", _start_over)
    patches.replace(time, "sleep", _sleep_over)


table.add(
    Row(
        state="whose a thread is",
        treatment=Treatment.PER_WORKER,
        meaning="A thread that a worker's code starts with `threading` is that worker's; "
        "`time.sleep` on a worker ends at an interrupt.",
        test="tests/engines/test_hooks.py",
        install=_install,
        in_own_process=True,
        library="Python",
    )
)
