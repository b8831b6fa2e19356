"""The keeper of a node: a thread that looks a few times a second for what is due.

That is: references and streams that were dropped, deadlines that nobody waits for, calls that wait
for a thread, and calls that were ended and go on. It begins with the first of them; `_lock` guards
that.
"""

from __future__ import annotations

import threading
import time
import traceback
from typing import TYPE_CHECKING

from .outcome import whole
from .pool import LONG

if TYPE_CHECKING:
    from .node import Node

_PERIOD = 0.05  # seconds
_REMIND = 0.25  # seconds


class Keeper:
    """See the module."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._hurry = threading.Event()

    def begin(self) -> None:
        """Look from now on."""
        if self._thread is None:
            with whole(), self._lock:
                if self._thread is None and not self._over.is_set():
                    self._thread = threading.Thread(
                        target=self._keep, name=f"discolab-rpc-keeper-{self._node.id}", daemon=True
                    )
                    self._thread.start()

    def hurry(self) -> None:
        """Calls wait for a thread: look at once, and often."""
        self._hurry.set()

    def end(self) -> None:
        """Look no more; does not wait."""
        self._over.set()
        self._hurry.set()

    def _keep(self) -> None:
        node, period, looked_at, reminded_at = self._node, _PERIOD, 0.0, 0.0
        while not self._over.is_set():
            self._hurry.wait(period)
            self._hurry.clear()
            if period == LONG and self._over.wait(LONG):  # also if it is told to hurry again
                return
            try:
                period = LONG if node.relieve() else _PERIOD
                if time.monotonic() - looked_at >= _PERIOD:
                    looked_at = time.monotonic()
                    node.holdings.drain()
                    node.look_at_deadlines()
                if time.monotonic() - reminded_at >= _REMIND:
                    reminded_at = time.monotonic()
                    node.remind()
            except Exception:
                if not node.closed:
                    traceback.print_exc()  # a fault of ours; the node goes on
