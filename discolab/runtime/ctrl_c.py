"""Ctrl-C on the main thread, held back for a moment; as `Interruptible.held_back` is for workers.

`_Holding` is the main thread's alone: Python calls handlers of signals there.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, ClassVar

HOLD_BACK = 10.0  # seconds after which Ctrl-C is heard all the same

try:  # what `signal` is made of: that spends ten times as long, on enumerations
    _signals: Any = importlib.import_module("_signal")
except ImportError:  # another Python
    _signals = signal
_get, _set = _signals.getsignal, _signals.signal
_SIGINT = int(signal.SIGINT)
_nothing = nullcontext()


def held_back() -> AbstractContextManager[None]:
    """Within it Ctrl-C does nothing; at its end it does what it would have done.

    For what is done in less than a millisecond and never waits, such as to enter a call in a table
    and send it. On other threads, which Ctrl-C does not come to, it is nothing.
    """
    if _Holding.now or threading.get_ident() != threading.main_thread().ident:
        return _nothing
    return _Holding()


class _Holding(AbstractContextManager[None]):
    """See `held_back`.

    Attributes
    ----------
    now
        Whether there is one already, around this.
    """

    __slots__ = ("_before", "_begun", "_came", "_mine")

    now: ClassVar[bool] = False

    def __enter__(self) -> None:
        before = _get(_SIGINT)
        if callable(before):
            self._before, self._mine = before, self._note
            self._came = False
            self._begun = time.monotonic()
            _set(_SIGINT, self._mine)
            _Holding.now = True
        else:  # Ctrl-C does nothing, or is none of Python's
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if time.monotonic() - self._begun > HOLD_BACK:
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        before = self._before
        if before is None:
            return
        self._before = None
        _Holding.now = False
        found = _set(_SIGINT, before)
        if found is not self._mine:  # somebody has set another one within
            _set(_SIGINT, found)
        if self._came:
            before(_SIGINT, sys._getframe(1))
