"""Outcome: a value or an error that comes later, and how a thread waits for it.

An outcome is settled once, under `_settling`, as two may come at once, such as an answer and a
deadline; `settled` is set last, so that a thread that sees it sees the rest too.
A thread that goes to sleep enters itself in `_sleepers` and checks once more after that, so either
it sees the outcome or it is woken. The lists are only appended to and read as a whole, which needs
no lock.

Waking a sleeping thread takes longer than most calls, so a waiting thread spins for a moment first
(`SPIN`), and yields its core between two checks.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from ..runtime.errors import DiscoError, SessionClosedError, WorkerError
from ..runtime.failures import safe_str
from ..runtime.interrupts import Interruptible, plain_lock, waiter_here
from .errors import WorkerLostError

SPIN = 150e-6  # seconds
_rest = getattr(os, "sched_yield", lambda: time.sleep(0))
_clock = time.perf_counter
_of_thread = threading.local()
_settling: Any = plain_lock()
_log = logging.getLogger("discolab.rpc")
if hasattr(os, "register_at_fork"):  # another thread may be in the middle of it
    os.register_at_fork(after_in_child=_settling._at_fork_reinit)
_TOLD_ELSEWHERE = (SessionClosedError, WorkerLostError)


def waiter() -> Interruptible:
    """The object through which the calling thread waits: a worker, a server thread, or its own."""
    me = waiter_here()
    if me is None:
        me = getattr(_of_thread, "waiter", None)
        if me is None:
            me = _of_thread.waiter = Interruptible()
    return me


def spin(ready: Callable[[], bool]) -> bool:
    """Spin until `ready`, for a moment; whether it became so."""
    until = _clock() + SPIN
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
    heard
        Whether somebody was given the error, or has said that he will take it.
    """

    __slots__ = ("_followers", "_sleepers", "error", "heard", "settled", "value")

    def __init__(self) -> None:
        self.settled = self.heard = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._sleepers: list[Interruptible] = []
        self._followers: list[Callable[[Any], None]] = []

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Set the value or the error; the second time has no effect."""
        with _settling:  # without the interpreter lock to look and then to set are two steps
            if self.settled:
                return
            self.value, self.error = value, error
            self.settled = True
        self.wake_sleepers()
        self._call_followers()

    def follow(self, func: Callable[[Any], None]) -> None:
        """Call `func` with this outcome once it is settled, now if it is. It must be quick."""
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

    def unfollow(self, func: Callable[[Any], None] | None = None) -> None:
        """Call that one no more; None: nobody.

        A follower would keep alive, in a cycle, what will never be settled.
        """
        if func is None:
            self._followers.clear()
            return
        try:
            self._followers.remove(func)
        except ValueError:  # it was called
            pass

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
        if not spin(self.is_settled):
            self.sleep_until(self.is_settled, what, timeout)

    def sleep_until(self, ready: Callable[[], bool], what: Any, timeout: float | None) -> None:
        """As `wait`, for a condition that becomes true before this is settled, or with it."""
        me = waiter()
        self._sleepers.append(me)
        try:
            me.wait_for(ready, what, timeout)
        finally:
            self._sleepers.remove(me)

    def wake_sleepers(self) -> None:
        """Wake the sleeping threads, so that they check again."""
        for sleeper in tuple(self._sleepers):
            sleeper.wake()

    def result(self) -> Any:
        """The value, once it is settled; raises a copy of the error.

        A raised error gets a traceback, whose frames keep much alive: the kept error must not.
        """
        if self.error is not None:
            self.heard = True
            raise copy_of(self.error)
        return self.value

    def log_unheard(self) -> None:
        """Log the error, if there is one, that nobody has asked for and nobody can any more."""
        error = self.error
        if error is None or self.heard or isinstance(error, _TOLD_ELSEWHERE):
            return
        self.heard = True
        if isinstance(error, WorkerError) and all(f.interrupted for f in error.failures):
            return  # somebody has ended it
        notes = getattr(error, "__notes__", [])
        _log.warning("nobody has asked for this failure: %s", "\n".join([safe_str(error), *notes]))


def copy_of(error: BaseException) -> BaseException:
    """A copy of an error, to be raised or given away."""
    try:
        made: BaseException = copy.copy(error)
    except Exception:  # of a class that can't be copied
        made = DiscoError(f"{type(error).__name__}: {safe_str(error)}")
    return made.with_traceback(None)


class Value(Outcome):
    """A value that others may refer to, as soon as it is computed.

    Attributes
    ----------
    owner
        The rank that owns it.
    """

    __slots__ = ("_freed", "owner")
    parks: ClassVar[bool] = True  # a thread waits here for no call of its own; see pool.py

    def __init__(self, owner: int) -> None:
        super().__init__()
        self.owner = owner
        self._freed = False

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """See `Outcome`; nobody may refer to it any more."""
        super().settle(value, error)
        if self._freed:
            self.log_unheard()

    def free(self) -> None:
        """Nobody refers to it any more."""
        self._freed = True
        if self.settled:
            self.log_unheard()

    def __str__(self) -> str:
        return "the value of a reference, which is still being computed"
