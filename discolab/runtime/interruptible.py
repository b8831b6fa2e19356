"""A thread that runs commands and can be interrupted; all waiting of a worker is here.

The thread itself writes `running`, `waiting_for` and `ended`. Other threads may call
`interrupt`, `retry_interrupt` and `wake`. `_guard` guards the sending of asynchronous
exceptions; `interrupts` changes under it.

How an interrupt ends a command. Two things at once: `interrupts` > 0 makes every wait of
discolab raise, and `PyThreadState_SetAsyncExc` raises in a Python loop. The exception must
not land in the command loop: it is sent only while `running`, and after a command the
worker first clears `running`, then looks at `_async_sent`; the sender writes these two in
the other order. So either the sender sees that the command is over, or the worker sees that
an exception is on its way and waits for it in `_absorb`. In `held_back` no exception is sent: the
worker enters it under `_guard`, so none is on its way there either.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

from .clock import Clock
from .errors import WaitTimeoutError, WorkerInterrupted

TICK = 0.05  # seconds between two looks at interrupts and deadlines while waiting
HOLD_BACK = 10.0  # seconds for which an interrupt is held back at most
FIRST_LOOK = 0.005  # seconds after which `check` is called first; doubled each time, up to a tick

# the threads that wait in discolab now; each adds and removes itself
waiting_threads: set[int] = set()


class Interruptible:
    """What a worker is to those who interrupt it or wait with it.

    Attributes
    ----------
    running
        Whether a call runs, so that an asynchronous exception may be sent.
    interrupts
        How many interrupts are under way; while there are any, waits raise and calls end.
    waiting_for
        What the thread waits for in `wait_for`, None while it does not.
    ended
        Set once the thread takes no more commands.
    thread_id
        As `threading.get_ident` gives it, 0 before the thread runs.
    clock
        By which deadlines of waits run out.
    """

    def __init__(self) -> None:
        self.running = False
        self.interrupts = 0
        self.waiting_for: Any = None
        self.ended = False
        self.thread_id = 0
        self.clock = Clock()
        self._async_sent = False
        self._held_since: list[float] = []  # one for each `held_back` around another
        self._late = False  # an interrupt was held back, and is to raise
        self._guard = threading.Lock()
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    # -- interrupts --------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the running command and cancel the queued ones, up to END_INTERRUPT."""
        self.announce_interrupt()
        self.retry_interrupt()

    def announce_interrupt(self) -> None:
        """Begin an interrupt; `retry_interrupt` follows.

        To interrupt several workers, announce it to all first: what one of them then does
        because another has ended is known to come of the interrupt.
        """
        with self._guard:
            self.interrupts += 1

    def retry_interrupt(self) -> None:
        """Send the exception once more, for code that swallowed it."""
        with self._guard:
            if self.interrupts and not self.ended:
                if self._is_held_back():
                    self._late = True
                else:
                    self._async_sent = True
                    if self.running:
                        raise_in_thread(self.thread_id, WorkerInterrupted)
        self.wake()

    def sheltered(self) -> AbstractContextManager[Any]:
        """Within it no interrupt sends its exception; for starting a thread from this one.

        A thread that has just been made still bears the identifier of its maker: the exception
        would go to it instead.
        """
        return self._guard

    @contextmanager
    def held_back(self, *, in_any_case: bool = False, progress: bool = False) -> Iterator[None]:
        """Within it, on this worker's thread, no interrupt raises but in waits; it does so after.

        For what can't be done again after it was cut short, such as an import of many modules. What
        takes longer than `HOLD_BACK` seconds is interrupted all the same.

        Parameters
        ----------
        in_any_case
            For what cleans up, after an interrupt too: it is done, and only an interrupt that was
            on its way or came meanwhile raises at the end.
        progress
            Whether at its end the seconds of the `held_back` around it begin anew.

        Raises
        ------
        WorkerInterrupted
            At its beginning, unless `in_any_case`, or at its end.
        """
        held = self._held_since
        depth = len(held)
        try:
            while True:
                try:
                    with self._guard:
                        held.append(time.monotonic())
                        if self._async_sent:  # on its way: it would come within
                            self._async_sent = False
                            self._late = True
                            take_back_exception()
                            if self.interrupts:  # else it was for a command before
                                raise WorkerInterrupted("interrupted")
                    break
                except WorkerInterrupted:
                    if not in_any_case:
                        self._late = False
                        raise
            yield
        finally:
            del held[depth:]
            if progress and held:
                held[-1] = time.monotonic()
        if not self._is_held_back():
            late, self._late = self._late, False
            if self.interrupts and (late or not in_any_case):
                raise WorkerInterrupted("interrupted")

    def _is_held_back(self) -> bool:
        since = self._held_since[-1:]
        return bool(since) and time.monotonic() - since[0] < HOLD_BACK

    def _absorb(self) -> None:
        """Wait for an exception that is on its way, so that it can't hit what comes next."""
        while True:
            try:
                self.running = False
                if not self._async_sent:
                    return
                with self._guard:
                    self._async_sent = False
                    take_back_exception()
                return
            except WorkerInterrupted:
                continue

    # -- waiting -----------------------------------------------------------------------------

    def wait_for(
        self,
        ready: Callable[[], bool],
        what: Any,
        timeout: float | None = None,
        check: Callable[[], float | None] | None = None,
    ) -> None:
        """Wait on this worker's thread until `ready()`; can be interrupted, never for ever.

        Parameters
        ----------
        ready
            Cheap predicate. Whoever makes it true calls `wake` on this worker.
        what
            What is waited for; ``str(what)`` is shown in status and errors.
        timeout
            Seconds, None for no deadline.
        check
            Called after 5 ms, then less and less often, down to once a tick (50 ms), however often
            the worker is woken; or after as many seconds as it has returned. May raise to end the
            wait.

        Raises
        ------
        WorkerInterrupted
            If the command is interrupted.
        WaitTimeoutError
            At the deadline.
        """
        if ready():
            return
        now = time.monotonic()
        deadline = None if timeout is None else self.clock.now() + timeout
        look = FIRST_LOOK
        next_check = now + look
        self.waiting_for = what
        thread = threading.get_ident()
        waiting_threads.add(thread)
        try:
            while not ready():
                if self.interrupts:
                    self._raise_in_wait(what)
                pause = TICK
                if deadline is not None:
                    pause = min(TICK, deadline - self.clock.now())
                    if pause <= 0:
                        raise WaitTimeoutError(f"gave up after {timeout:g} s waiting for {what}")
                if check is not None:
                    pause = min(pause, max(0.0, next_check - time.monotonic()))
                self._wakeup.acquire(timeout=pause)
                if check is not None and time.monotonic() >= next_check and not ready():
                    look = min(2 * look, TICK)
                    next_check = time.monotonic() + (check() or look)
        finally:
            waiting_threads.discard(thread)
            self.waiting_for = None

    def _raise_in_wait(self, what: Any) -> NoReturn:
        """Raise, and let what was sent not do so once more in what cleans up."""
        with self._guard:
            if self._async_sent:
                self._async_sent = False
                take_back_exception()
        raise WorkerInterrupted(f"interrupted while waiting for {what}")

    def wake(self) -> None:
        """Have this worker look again at what it waits for. From any thread; never blocks."""
        # release of a free lock is a RuntimeError: then a wake-up is waiting already
        try:
            self._wakeup.release()
        except RuntimeError:
            pass


class _Nothing(BaseException):
    """Takes the place of an exception that is not to come any more."""


def raise_in_thread(thread_id: int, exception: type[BaseException]) -> None:
    """Have a thread raise an exception at the next place in Python code at which it can."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(exception)
    )


def take_back_exception() -> None:
    """Let no asynchronous exception come to the calling thread that was sent to it before.

    Were it set to none, CPython 3.11 would go on looking for one for ever: slower, and a call under
    `sys.settrace` then never begins. So another one takes its place, and is caught here.
    """
    try:
        while True:  # it comes at once, or to a thread that has just begun and bears our identifier
            raise_in_thread(threading.get_ident(), _Nothing)
            for _ in range(1000):
                pass
    except _Nothing:
        pass
