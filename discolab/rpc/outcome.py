"""Outcome: a value or an error that comes later, and how a thread waits for it.

Whoever settles an outcome does it once; `settled` is set last, so that who sees it sees the rest.
Threads that sleep enter themselves in `_sleepers` first and look again then: one of the two sides
sees the other. Lists are appended to and read as a whole, which needs no lock.

To wake a sleeping thread takes longer than most calls, so who waits looks for a moment first
(`LOOK_FOR`), and gives its core away between two looks.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..runtime import ctrl_c
from ..runtime.errors import DiscoError
from ..runtime.interruptible import Interruptible
from ..runtime.waiter import waiter_here

LOOK_FOR = 150e-6  # seconds
_rest = getattr(os, "sched_yield", lambda: time.sleep(0))
_clock = time.perf_counter
_of_thread = threading.local()


def waiter() -> Interruptible:
    """As what the calling thread waits: a worker, a callee, or, on the controller, its own."""
    found = waiter_here()
    if found is None:
        found = getattr(_of_thread, "waiter", None)
        if found is None:
            found = _of_thread.waiter = Interruptible()
    return found


def whole() -> AbstractContextManager[None]:
    """What is within is done whole: an interrupt of the calling thread, or Ctrl-C, raises after it.

    In waits it raises at once, but for Ctrl-C: so there should be none.
    """
    me = waiter_here()
    if me is not None:
        return me.held_back(in_any_case=True) if me.running else nullcontext()
    return ctrl_c.held_back()


def look_for(ready: Callable[[], bool]) -> bool:
    """Look for a moment whether it is so."""
    until = _clock() + LOOK_FOR
    while not ready():
        if _clock() > until:
            return False
        _rest()
    return True


class Outcome:
    """See the module.

    Attributes
    ----------
    settled
        Whether it is known.
    value
        What came.
    error
        What went wrong, None if nothing.
    """

    __slots__ = ("_followers", "_sleepers", "error", "settled", "value")

    def __init__(self) -> None:
        self.settled = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._sleepers: list[Interruptible] = []
        self._followers: list[Callable[[Any], None]] = []

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Say what came of it; what comes second is ignored."""
        if self.settled:
            return
        self.value, self.error = value, error
        self.settled = True
        self.wake_sleepers()
        self._call_followers()

    def follow(self, func: Callable[[Any], None]) -> None:
        """Have `func` called with this outcome once it is settled; at once if it is. Be quick."""
        self._followers.append(func)
        if self.settled:
            self._call_followers()

    def _call_followers(self) -> None:
        while self._followers:
            try:
                func = self._followers.pop(0)
            except IndexError:  # another thread was faster
                return
            func(self)

    def unfollow(self) -> None:
        """Have nothing called: it would keep alive, in a circle, what waits in vain."""
        self._followers.clear()

    def is_settled(self) -> bool:
        """Whether it is known."""
        return self.settled

    def wait(self, what: Any, timeout: float | None) -> None:
        """Wait until it is settled; interrupted as every wait of the calling thread.

        Raises
        ------
        WaitTimeoutError
            At the deadline.
        WorkerInterrupted, KeyboardInterrupt
        """
        if not look_for(self.is_settled):
            self.sleep_until(self.is_settled, what, timeout)

    def sleep_until(self, ready: Callable[[], bool], what: Any, timeout: float | None) -> None:
        """As `wait`, for something else that becomes so before it is settled, or with it."""
        me = waiter()
        self._sleepers.append(me)
        try:
            me.wait_for(ready, what, timeout)
        finally:
            self._sleepers.remove(me)

    def wake_sleepers(self) -> None:
        """Have those who sleep look again."""
        for sleeper in tuple(self._sleepers):
            sleeper.wake()

    def result(self) -> Any:
        """The value, once it is settled; raises a copy of the error.

        What is raised gets a traceback, whose frames hold much: the error that is kept must not.
        """
        if self.error is not None:
            raise copy_of(self.error)
        return self.value


def copy_of(error: BaseException) -> BaseException:
    """A copy of an error, to be raised or given away."""
    try:
        made: BaseException = copy.copy(error)
    except Exception:  # of a class that can't be copied
        made = DiscoError(f"{type(error).__name__}: {error}")
    return made.with_traceback(None)
