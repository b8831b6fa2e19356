"""How a thread is interrupted, how it waits, and how it finishes what must not be cut in two.

Three kinds of thread can be interrupted at any place in Python code: a worker's thread and a thread
that serves RPC calls, each an `Interruptible`, by an exception that another thread sends
(`PyThreadState_SetAsyncExc`); and the main thread, by Ctrl-C or an alarm. `shield` delays either.

**An interrupt of an `Interruptible`** does two things at once: `interrupts` > 0 makes every wait of
discolab raise, and the exception ends a Python loop. The exception must not land in the command
loop, nor in a shield:

- The sender holds `_guard`. It sends only while `running`, not just after a wait has raised, and
  while no shield is in force; under a shield it sets `_late`, and the shield raises at its end.
- The thread itself changes its own state first (clears `running`, enters a shield, or notes that
  a wait raises), then waits until no sender holds the guard (`_let_senders_end`). After that, a
  sender that has not seen the change has set `_async_sent`, and what it sent is taken back; any
  later one sees the change.

**Why this holds wherever an exception lands.** CPython raises it, or calls the handler of a signal,
only where it looks for them: as a Python function begins, as a loop goes back, and after a call of
something written in C. A store, and one call of C code that calls several things (`run_steps`), are
not cut. The thread itself never runs Python code while it holds its guard, so the guard is not left
locked; any other thread that takes it is in a shield of its own. `with lock:` alone is not safe on
a thread that can be interrupted: CPython 3.14 looks after the call of ``lock.__enter__``, so that
an exception leaves the lock taken for ever. `reentrant_lock` and `plain_lock` make such that are.
For the locks of others there is landings.py.

Without the interpreter lock all of this holds too: an exception still comes between bytecodes of
its thread only, and interpreter_lock.py says why *change the state first, then look* is enough.

Ownership: a thread itself writes `running`, `waiting_for`, `ended` and `_shields`, and `_raised_at`
once an interrupt has begun. `_guard` guards `interrupts`, `_async_sent` and `_late`. Other threads
may call `interrupt`, `announce_interrupt`, `retry_interrupt` and `wake`. Handlers of signals are
the main thread's alone.
"""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from types import FrameType
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from .errors import WaitTimeoutError, WorkerInterrupted
from .interpreter_lock import is_on
from .landings import give_back_locks, raise_in_thread, raise_where_harmless

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="EndsWork")

TICK = 0.05  # seconds between two looks at interrupts and deadlines while waiting
HOLD_BACK = 10.0  # seconds for which a shield delays an interrupt at most
CHOOSY = 0.5  # seconds for which an interrupt waits for a place where it leaves no lock taken
CLEANS_UP = 0.5  # seconds in which nothing is sent after a wait has raised: for what cleans up
_RAISES = 0.1  # seconds in which a wait raises, if it is still one
_LOOK_AGAIN = 0.0002  # seconds after which one try looks again; doubled each time
_LOOKS = 0.002  # up to this
FIRST_LOOK = 0.005  # seconds after which `check` is called first; doubled each time, up to a tick

# the threads that wait in discolab now; each adds and removes itself
waiting_threads: set[int] = set()

_local = threading.local()
_NO_SHIELD: AbstractContextManager[None] = nullcontext()

at_interrupt: list[Callable[[Interruptible], None]] = []
"""What layers above do as a thread is interrupted, and at each new try; on the sender's thread."""

# without the interpreter lock `extend` has a lock of its deque: there each call gets one of its own
run_steps: Callable[[Iterable[Any]], object] = (
    deque[Any](maxlen=0).extend if is_on() else partial(deque, maxlen=0)
)
"""Exhausts an iterator, and keeps nothing: ``run_steps(map(operator.call, functions))`` calls each
function, and if all are written in C no interrupt lands between two."""


def waiter_here() -> Interruptible | None:
    """What the calling thread waits as; None on the controller and on threads of the user's."""
    return getattr(_local, "waiter", None)


def bind_waiter(waiter: Interruptible | None) -> None:
    """Say as what the calling thread waits, and so what an interrupt of its work goes to."""
    _local.waiter = waiter


def ignore_ctrl_c() -> None:
    """Have this process ignore SIGINT: the session interrupts, not the terminal.

    By a handler that does nothing, for programs that the process starts inherit SIG_IGN.
    """
    signal.signal(signal.SIGINT, _nothing)
    signal.siginterrupt(signal.SIGINT, False)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


# -- shields --------------------------------------------------------------------------------------


def shield(*, progress: bool = False) -> AbstractContextManager[None]:
    """Delay an interrupt of the calling thread until the block ends.

    For what must be done as a whole or not at all: to count a reference and send it, to import many
    modules. Also for starting a thread: until a new thread runs it bears the identifier of its
    maker, and would get the maker's exception. Waits within raise at once on a worker or an RPC
    thread, but not for Ctrl-C, so do not wait in a short block. A block that takes longer than
    `HOLD_BACK` seconds is interrupted all the same.

    Does nothing where no exception can come: on other threads, and between two commands.

    Parameters
    ----------
    progress
        Whether the end of this block restarts those seconds for the block around it.

    Raises
    ------
    WorkerInterrupted, KeyboardInterrupt
        At the end of the outermost block, also if the block itself has raised.
    """
    me = getattr(_local, "waiter", None)  # `waiter_here`, which is called for each command here
    if me is not None:
        return _Shield(me, progress) if me.running else _NO_SHIELD
    return _SignalShield() if threading.get_ident() == _main_ident else _NO_SHIELD


_main_ident = threading.main_thread().ident  # kept, as each call of a session asks for it


def _main_in_child() -> None:
    global _main_ident
    _main_ident = threading.get_ident()


if hasattr(os, "register_at_fork"):  # the thread that forks is the child's main thread
    os.register_at_fork(after_in_child=_main_in_child)


class _Shield(AbstractContextManager[None]):
    """The shield of an `Interruptible`, on its own thread."""

    __slots__ = ("_depth", "_me", "_progress")

    def __init__(self, me: Interruptible, progress: bool) -> None:
        self._me = me
        self._progress = progress

    def __enter__(self) -> None:
        me = self._me
        shields = me._shields
        depth = self._depth = len(shields)
        if not (shields and me.is_shielded()):
            me._late = False  # another exception has come in its place
        while True:
            try:
                if len(shields) == depth:
                    shields.append(time.monotonic())
                me._let_senders_end()
                if me._async_sent:
                    me._late = True
                    me._take_back()
                return
            except WorkerInterrupted:  # it was on its way
                me._late = True
            except BaseException:
                del shields[depth:]
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        me = self._me
        shields = me._shields
        del shields[self._depth :]
        if self._progress and shields:
            shields[-1] = time.monotonic()
        if shields and me.is_shielded():
            return
        me._let_senders_end()
        if me._late:
            me._late = False
            if me.interrupts and not (kind and issubclass(kind, WorkerInterrupted)):
                raise WorkerInterrupted("interrupted")


try:  # what `signal` is made of: that spends ten times as long, on enumerations
    _signals: Any = importlib.import_module("_signal")
except ImportError:  # another Python
    _signals = signal
_get_handler, _set_handler = _signals.getsignal, _signals.signal
_DELAYED = [int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM") if hasattr(signal, name)]


class _SignalShield(AbstractContextManager[None]):
    """The shield of the main thread: takes the place of handlers of signals for the moment.

    It delays Ctrl-C, and alarms, by which programs limit the time of a call. A handler that is set
    once would not stay: a notebook's kernel sets its own for each cell.

    A signal may come at any line here. Until `_delays` is set and once it is cleared, this handler
    does what the one before it does; so it does no harm where that raises and leaves it in place.
    """

    __slots__ = ("_began", "_came", "_delays", "_handlers")

    def __enter__(self) -> None:
        self._delays = False
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        for number in _DELAYED:
            handler = _get_handler(number)
            if type(handler) is _SignalShield:
                handler = None if handler._delays else handler._handlers[number]
            if callable(handler):  # else it is shielded already, or is none of Python's
                self._handlers[number] = handler
                _set_handler(number, self)
        self._began = time.monotonic()
        self._delays = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self._delays:
            self._handlers[number](number, frame)
            return
        self._came.append(number)
        if time.monotonic() - self._began > HOLD_BACK:
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        self._delays = False
        came, self._came = self._came, []
        try:
            if came:
                run_steps(map(_signals.raise_signal, dict.fromkeys(came)))
        finally:
            for number, handler in self._handlers.items():
                if _get_handler(number) is self:  # not if the block has set another one
                    _set_handler(number, handler)


class EndsWork(Protocol):
    """What waits for workers on the controller's side."""

    def _after_ctrl_c(self, stop: KeyboardInterrupt) -> None: ...


def ends_work(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have Ctrl-C in a method that asks workers and waits for them end what they run.

    For the methods that users call: an exception of Ctrl-C may come as any function begins, so what
    catches it must be the outermost one of ours.
    """

    @functools.wraps(method)
    def asks_and_waits(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt as stop:
            self._after_ctrl_c(stop)
            raise

    return asks_and_waits


# -- locks and counts that interrupts do not break ------------------------------------------------


def reentrant_lock() -> threading.RLock:
    """Make a reentrant lock that an interrupt in ``with lock:`` leaves either taken or free."""
    return _ReentrantLock() if sys.version_info >= (3, 14) else threading.RLock()


def plain_lock() -> threading.Lock:
    """The same for a lock that no thread takes twice; a thread that did would hang before 3.14."""
    return _ReentrantLock() if sys.version_info >= (3, 14) else threading.Lock()


class _ReentrantLock(type(threading.RLock())):  # type: ignore[misc]  # its `__exit__` stays C code
    """Gives the lock back if an interrupt comes as it is taken; see the module about 3.14.

    CPython does not look for interrupts after the return of an `__enter__` written in Python.
    """

    def __enter__(self) -> bool:
        before = self._recursion_count()
        try:
            self.acquire()
        except BaseException:
            if self._recursion_count() > before:
                self.release()
            raise
        return True


class Count:
    """A number that goes up by one in a single call of C code.

    Attributes
    ----------
    add
        Adds one; may be given an argument, which it ignores.
    left
        Gives `sys.maxsize` less `value`: for a reader that asks at each call, and must be quick.
    """

    __slots__ = ("add", "left")

    def __init__(self) -> None:
        left = repeat(None, sys.maxsize)
        self.add: Callable[..., None] = partial(next, left)
        self.left: Callable[[], int] = left.__length_hint__

    @property
    def value(self) -> int:
        """How often `add` was called."""
        return sys.maxsize - self.left()


# -- clocks ---------------------------------------------------------------------------------------


class Clock:
    """A clock that can be stopped: deadlines do not run out while a person looks at a program.

    Seconds as `time.monotonic` counts them, without those in which it was stopped. Any thread may
    read it; `stop` and `go` are called by one thread at a time, and may be repeated.
    """

    def __init__(self) -> None:
        # seconds lost, and since when it stands; one tuple, so that readers see both at one moment
        self._state: tuple[float, float | None] = 0.0, None

    def now(self) -> float:
        """The time."""
        lost, since = self._state
        return (time.monotonic() if since is None else since) - lost

    def stop(self) -> None:
        """Stand still."""
        lost, since = self._state
        if since is None:
            self._state = lost, time.monotonic()

    def go(self) -> None:
        """Go on."""
        lost, since = self._state
        if since is not None:
            self._state = lost + time.monotonic() - since, None


# -- threads that can be interrupted --------------------------------------------------------------


class Interruptible:
    """A thread that runs commands: what others need to interrupt it, and how it waits.

    Attributes
    ----------
    running
        Whether a call runs, so that an exception may be sent.
    interrupts
        How many interrupts are under way; while there are any, waits raise and calls end.
    waiting_for
        What the thread waits for in `wait_for`, None while it does not.
    ended
        Set once the thread takes no more commands.
    thread_id
        As `threading.get_ident` gives it, 0 before the thread runs.
    clock
        Measures deadlines of waits.
    """

    def __init__(self) -> None:
        self.running = False
        self.interrupts = 0
        self.waiting_for: Any = None
        self.ended = False
        self.thread_id = 0
        self.clock = Clock()
        self._interrupted_at = 0.0  # when the first of them began; under `_guard`
        self._raised_at = 0.0  # when a wait first raised for them; own thread, 0 as they begin
        self._async_sent = False  # whether an exception may be on its way
        # with what a call had failed when an interrupt landed before that was kept; own thread only
        self._cut_off: BaseException | None = None
        self._shields: list[float] = []  # when each shield began, the outermost first
        self._late = False  # whether a shield has delayed an interrupt, and is to raise
        self._guard = threading.Lock()
        self._pass_guard: tuple[Callable[[], Any], ...] = (self._guard.acquire, self._guard.release)
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    # -- interrupts --------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End the running command and cancel the queued ones, up to END_INTERRUPT."""
        self.announce_interrupt()
        self.retry_interrupt()

    def announce_interrupt(self) -> None:
        """Begin an interrupt; `retry_interrupt` follows.

        To interrupt several workers, announce it to all first: what one of them then does because
        another has ended is known to come of the interrupt.
        """
        with shield(), self._guard:
            if not self.interrupts:
                self._interrupted_at, self._raised_at = time.monotonic(), 0.0
            self.interrupts += 1

    def retry_interrupt(self) -> None:
        """Send the exception once more, for code that swallowed it."""
        self.wake()
        pause = _LOOK_AGAIN
        while not self._send() and pause < _LOOKS:  # the next try goes on
            time.sleep(pause)
            pause *= 2
        for also in at_interrupt:
            also(self)

    def _send(self) -> bool:
        """Send the exception, if need be; False if it would leave a lock taken, or hit a wait."""
        with shield(), self._guard:
            if not self.interrupts or self.ended:
                return True
            if self.is_shielded():
                self._late = True
                return True
            before, self._async_sent = self._async_sent, True
            if not self.running or time.monotonic() < self._raised_at + CLEANS_UP:
                return True
            if time.monotonic() > self._interrupted_at + CHOOSY:
                raise_in_thread(self.thread_id, WorkerInterrupted)
            elif self._wait_raises() or not raise_where_harmless(self.thread_id, WorkerInterrupted):
                self._async_sent = before
                return False
            return True

    def _wait_raises(self) -> bool:
        """Whether the thread is in a wait, which raises; without the lock what is sent hits it.

        What cleans up would then be sent the next one. With the lock a place is looked for.
        """
        begins = time.monotonic() < self._interrupted_at + _RAISES
        return begins and not is_on() and self.waiting_for is not None

    def work(self) -> object:
        """What the thread does now, None if nothing."""
        return None

    def is_shielded(self) -> bool:
        """Whether a shield is in force that has not lasted too long."""
        began = self._shields[-1:]
        return bool(began) and time.monotonic() - began[0] < HOLD_BACK

    def _let_senders_end(self) -> None:
        """Wait until no sender is between its look at this thread's state and what it does."""
        run_steps(map(operator.call, self._pass_guard))

    def _take_back(self) -> None:
        """Let no exception come that was sent to this thread, the calling one."""
        self._async_sent = False
        take_back_exception()

    def _absorb(self, raised: BaseException | None = None) -> None:
        """Stop running, and take back an exception that would hit what comes next.

        Locks that an interrupt has left taken are free then, if it is what the work has `raised`.
        """
        while True:
            try:
                self.running = False
                if self._async_sent:
                    self._let_senders_end()
                    self._take_back()
                break
            except WorkerInterrupted:
                continue
        if raised is not None and self.interrupts:
            give_back_locks(raised)

    def serve_on(self, serve: Callable[[], None]) -> None:
        """Call `serve` until it returns; an interrupt that lands outside of a command restarts it.

        After `running` is cleared one exception at most can still come, from a sender that has not
        seen that. It may land where the inner loop goes back, and is then caught by this one.
        """
        while True:
            try:
                return self._serve_again(serve)
            except WorkerInterrupted:
                continue

    def _serve_again(self, serve: Callable[[], None]) -> None:
        while True:
            try:
                return serve()
            except WorkerInterrupted as exc:
                self.running = False
                self._cut_off = exc.__context__

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
            Cheap predicate. The thread that makes it true calls `wake` on this worker.
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
        """Raise, and let no exception that is sent come once more in what cleans up.

        The first time: what catches it and waits again would never be sent one.
        """
        self._raised_at = self._raised_at or time.monotonic()
        if self._async_sent:
            self._let_senders_end()
            self._take_back()
        raise WorkerInterrupted(f"interrupted while waiting for {what}")

    def wake(self) -> None:
        """Have this worker look again at what it waits for. From any thread; never blocks."""
        # release of a free lock is a RuntimeError: then a wake-up is waiting already
        try:
            self._wakeup.release()
        except RuntimeError:
            pass


def wait_in_shield(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait for what ends by itself soon, whatever interrupts come; whether it did.

    For cleaning up after an interrupt, on any thread: the waits of an `Interruptible` raise then.
    """
    until, pause = time.monotonic() + seconds, threading.Lock()
    pause.acquire()
    with shield():
        while not (found := ready()) and time.monotonic() < until:
            pause.acquire(timeout=TICK / 50)
    return found


class _Nothing(BaseException):
    """Takes the place of an exception that is not to come any more."""


def take_back_exception() -> None:
    """Let no exception come to the calling thread that was sent to it before.

    Were it set to none, CPython 3.11 would go on looking for one for ever: slower, and a call under
    `sys.settrace` then never begins. So another one takes its place, and is caught here. With the
    garbage collector off: in what that calls Python would drop and report it.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        while True:  # it comes at once, or to a thread that has just begun and bears our identifier
            raise_in_thread(threading.get_ident(), _Nothing)
            for _ in range(1000):
                pass
    except _Nothing:
        pass
    finally:
        if collects:
            gc.enable()
