"""Housekeeping: a thread of a node that does what is due, a few times a second.

It begins with the first thing that it has to see to; `_lock` guards that.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from ..runtime.interrupts import shield
from .pool import LONG

PERIOD = 0.05  # seconds


class Housekeeping:
    """See the module.

    Parameters
    ----------
    name
        For the name of the thread.
    urgent
        Called in each period; after `notify` at once, and then every `LONG` seconds for as long as
        it returns True.
    chores
        What else is done: each with the seconds between two times.
    """

    def __init__(
        self, name: str, urgent: Callable[[], bool], *chores: tuple[float, Callable[[], None]]
    ) -> None:
        self._name, self._urgent, self._chores = name, urgent, chores
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._notified = threading.Event()

    def begin(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            with shield(), self._lock:
                if self._thread is None and not self._over.is_set():
                    self._thread = threading.Thread(
                        target=self._run,
                        name=f"discolab-rpc-housekeeping-{self._name}",
                        daemon=True,
                    )
                    self._thread.start()

    def notify(self) -> None:
        """Have `urgent` called now, and often."""
        self._notified.set()

    def end(self) -> None:
        """End the thread; does not wait for it."""
        self._over.set()
        self._notified.set()

    def _run(self) -> None:
        period = PERIOD
        due = [0.0] * len(self._chores)
        while not self._over.is_set():
            self._notified.wait(period)
            self._notified.clear()
            if period == LONG and self._over.wait(LONG):  # also if it is notified again
                return
            try:
                period = LONG if self._urgent() else PERIOD
                for number, (every, chore) in enumerate(self._chores):
                    if time.monotonic() >= due[number]:
                        due[number] = time.monotonic() + every
                        chore()
            except Exception:
                if not self._over.is_set():
                    traceback.print_exc()  # a fault of ours; the node goes on
