"""The pump: one thread that keeps all open widgets of this kernel up to date, ten times a second.

It runs while a widget is open in some front end, and only then. `_open` is changed under `_lock`;
what a widget shows is asked of it on the pump's thread (`refresh`), so nothing there may wait for
long. Commands of the front end run on a second thread, one after the other: what takes its time
there holds up no picture.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

PERIOD = 0.1  # seconds between two pictures


class Pumped(Protocol):
    """What the pump keeps up to date."""

    def refresh(self) -> bool:
        """Send what is new; false once nobody looks any more."""

    def keep(self) -> None:
        """Have what a saved notebook shows be what there is now."""


class Pump:
    """Calls `refresh` of all that are open; see the module."""

    def __init__(self) -> None:
        self._open: list[Pumped] = []
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # whose holder refreshes: the pump's thread, or `flush`
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._rests = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._buttons: threading.Thread | None = None

    def add(self, widget: Pumped) -> None:
        """Keep a widget up to date from now on."""
        with self._lock:
            if widget not in self._open:
                self._open.append(widget)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="discolab-pump", daemon=True)
                self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Refresh all now: a cell has ended, and its last word must be seen, and saved."""
        if self._open:
            self._refresh(keep=True)

    def soon(self) -> None:
        """Refresh without waiting for the next turn: somebody has pressed a button."""
        self._wake.set()

    def rest(self) -> None:
        """Show nothing new: the kernel ends, and what its workers do now is no news."""
        held = self._turn.acquire(timeout=1)
        self._rests = True
        if held:
            self._turn.release()

    def later(self, command: Callable[[], None]) -> None:
        """Run a command of the front end on the thread for that."""
        with self._lock:
            if self._buttons is None:
                self._buttons = threading.Thread(
                    target=self._obey, name="discolab-buttons", daemon=True
                )
                self._buttons.start()
        self._commands.put(command)

    @property
    def running(self) -> bool:
        """Whether anything is open."""
        return self._thread is not None

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            self._refresh()
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
            self._wake.wait(max(0.01, PERIOD - (time.monotonic() - began)))
            self._wake.clear()

    def _refresh(self, keep: bool = False) -> None:
        with self._turn:
            with self._lock:
                widgets = () if self._rests else tuple(self._open)
            for widget in widgets:
                try:
                    goes_on = widget.refresh()
                    if goes_on and keep:
                        widget.keep()
                except Exception:
                    traceback.print_exc()  # a fault of ours: the other widgets go on
                    goes_on = False
                if not goes_on:
                    with self._lock:
                        self._open.remove(widget)

    def _obey(self) -> None:
        while True:
            command = self._commands.get()
            try:
                command()
            except Exception:
                traceback.print_exc()
            del command


pump = Pump()
