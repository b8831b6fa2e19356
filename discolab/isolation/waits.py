"""Python's own waits can be interrupted on a worker: they wait in slices.

CPython raises an exception that another thread has sent once the thread runs Python code again. A
wait in C never does, so waits that come back every tick let it in: those on conditions (an `Event`,
a `Queue`, a `Future`, a `Semaphore` or a `Barrier` waits on one), for threads, for processes, and
an event loop's for what comes next. A `Lock` that is acquired directly, a `SimpleQueue` and other
code in C stay as they are: nothing of them can be replaced.

Only a thread that runs a worker's call, or serves one, waits so, and only outside of a shield.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.pool
import multiprocessing.process
import multiprocessing.util
import os
import selectors
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..runtime.errors import WorkerInterrupted
from ..runtime.interrupts import (
    TICK,
    Interruptible,
    at_interrupt,
    plain_lock,
    shield,
    wait_in_shield,
    waiter_here,
    waiting_threads,
)
from . import table
from .patches import Patches
from .table import Row, Treatment

_new_lock = threading.Lock
_lock = plain_lock()  # guards `_programs`
_programs: weakref.WeakKeyDictionary[
    Interruptible, weakref.WeakKeyDictionary[subprocess.Popen[Any], object]
] = weakref.WeakKeyDictionary()  # what each worker has started, and in which call
_forks = threading.RLock()  # one at a time, or `filelock`, which torch imports, may raise
_FORK_WITHIN = 5.0  # seconds that one waits for another
_forked = 0  # how many have ended, written by who has `_forks`
_FAR = 1e6  # seconds; a deadline that is none
_STOP_WITHIN = 0.1  # seconds for a program to stop; one that waits for a disk takes longer
_END_WITHIN = 1.0  # seconds that a process which was killed may take to end


def _waiter() -> Interruptible | None:
    """The calling thread, if an interrupt may end what it does now."""
    me = waiter_here()
    return me if me is not None and me.running and not me.is_shielded() else None


def _in_slices(
    me: Interruptible, wait: Callable[[float], Any], what: str, timeout: float | None
) -> Any:
    """Call `wait` with a tick at a time until it gives something true, or the time is over."""
    deadline = None if timeout is None else time.monotonic() + timeout
    thread = threading.get_ident()
    waiting_threads.add(thread)
    try:
        while True:
            left = TICK if deadline is None else min(TICK, max(0.0, deadline - time.monotonic()))
            found = wait(left)
            if found or left < TICK:
                return found
            if me.interrupts:
                me._raise_in_wait(what)
    finally:
        waiting_threads.discard(thread)


def _condition_over(wait: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(wait)
    def wait_in_slices(self: Any, timeout: float | None = None) -> bool:
        me = _waiter()
        if me is None or (timeout is not None and timeout <= TICK) or not self._is_owned():
            return wait(self, timeout)
        # as CPython's, whose own slices could lose a notification between two of them
        lock, released, saved = _new_lock(), False, None
        notified = False
        lock.acquire()
        try:
            with shield():  # or an interrupt leaves it released, and nobody knows
                self._waiters.append(lock)
                saved, released = self._release_save(), True
            notified = bool(
                _in_slices(me, lambda left: lock.acquire(True, left), "a notification", timeout)
            )
        finally:
            with shield():
                if released:
                    self._acquire_restore(saved)
                if not notified:
                    if lock in self._waiters:
                        self._waiters.remove(lock)
                    else:  # it came as an interrupt did: it is for another one who waits
                        self.notify()
        return notified

    return wait_in_slices


def _join_over(join: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(join)
    def join_in_slices(self: threading.Thread, timeout: float | None = None) -> None:
        me = _waiter()
        if me is None or not self.is_alive() or self is threading.current_thread():
            join(self, timeout)
            return

        def joined(left: float) -> bool:
            join(self, left)
            return not self.is_alive()

        _in_slices(me, joined, f"thread {self.name}", None if timeout is None else max(0, timeout))

    return join_in_slices


def _select_over(select: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(select)
    def select_in_slices(self: Any, timeout: float | None = None) -> Any:
        me = _waiter()
        if me is None or (timeout is not None and timeout <= TICK):
            return select(self, timeout)
        return _in_slices(me, lambda left: select(self, left), "what comes next", timeout)

    return select_in_slices


def _process_over(wait: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(wait)
    def wait_for_process(self: Any, timeout: float | None = None) -> int:
        me = _waiter()
        if me is None or timeout is not None:
            return wait(self, timeout=timeout)
        with _passing_on(me):
            # with a deadline it looks again and again, and sleeps between (threading_time.py)
            return wait(self, timeout=_FAR)

    return wait_for_process


def _start_over(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def start_whole(self: Any, *args: Any, **named: Any) -> None:
        try:
            with shield():  # or it would run, and nobody know its number
                start(self, *args, **named)
                _note_program(self)
        except WorkerInterrupted:  # nobody gets it
            if getattr(self, "_child_created", False):
                self.__exit__(WorkerInterrupted, None, None)
            raise

    return start_whole


def _note_program(program: subprocess.Popen[Any]) -> None:
    me = waiter_here()
    if me is not None:
        with _lock:
            _programs.setdefault(me, weakref.WeakKeyDictionary())[program] = me.work()


@contextlib.contextmanager
def _passing_on(me: Interruptible | None) -> Iterator[None]:
    """An interrupt of a wait for a program reaches that before it is killed, and its own ones.

    The program may have ended by it before the wait has looked: that is no failure of the program.
    """
    try:
        yield
        if me is not None and me.interrupts:
            me._raise_in_wait("a program")
    except WorkerInterrupted:
        if me is not None:
            with shield():
                _interrupt_programs(me)
        raise


def _interrupt_programs(me: Interruptible) -> None:
    """Interrupt the programs that a call has started, and theirs, as Ctrl-C does at a terminal.

    A worker that reads from the pipe of one, which nothing else ends, then goes on. Those of
    earlier calls go on too.
    """
    with _lock:
        if me not in _programs:
            return
        work = me.work()
        pids = [p.pid for p, by in _programs[me].items() if by is work and p.returncode is None]
    for pid in pids:
        processes: list[Any] = []
        with shield():
            try:
                _stop_all_of(pid, processes)
            finally:  # none must stay stopped
                for process in reversed(processes):
                    _send(process, _interrupt_of(process.pid))
                for process in reversed(processes):
                    _send(process, signal.SIGCONT)


def _stop_all_of(pid: int, found: list[Any]) -> None:
    """Stop a program and all that it has started, and enter them in `found`.

    Else it may start another one after the look for them and before the interrupt ends it. Nobody
    finds that one then, and it may hold the pipe that the worker reads from.
    """
    import psutil  # few programs need it

    with contextlib.suppress(psutil.Error, OSError):  # it has ended, or too many files are open
        new = [psutil.Process(pid)]
        while new:
            found += new
            for process in new:
                _send(process, signal.SIGSTOP)
            wait_in_shield(functools.partial(_have_stopped, new), _STOP_WITHIN)
            new = [p for p in found[0].children(recursive=True) if p not in found]


def _send(process: Any, number: int) -> None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(number)


def _interrupt_of(pid: int) -> int:
    """The signal that ends a program as Ctrl-C does: SIGTERM where it would not get SIGINT.

    Ray blocks SIGINT in its actors, so whatever they start begins with that blocked.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            blocked = next(line for line in status if line.startswith("SigBlk:")).split()[1]
    except (OSError, StopIteration):  # it has ended, or this is no Linux
        return signal.SIGINT
    is_blocked = int(blocked, 16) & (1 << (signal.SIGINT - 1))
    return signal.SIGTERM if is_blocked else signal.SIGINT


def _have_stopped(processes: list[Any]) -> bool:
    """Whether none of them runs; one that has ended does not."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                return False
    return True


at_interrupt.append(_interrupt_programs)


def _kill_over(kill: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(kill)
    def interrupt_and_kill(self: Any) -> None:
        # as `subprocess.run` does when it is interrupted: what the program has started lives on
        me = waiter_here()
        if me is not None and me.interrupts and self.poll() is None:
            _interrupt_programs(me)
        kill(self)

    return interrupt_and_kill


def _exit_over(leave: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(leave)
    def kill_and_leave(self: Any, kind: Any, *rest: Any) -> None:
        if kind is None or not issubclass(kind, WorkerInterrupted):
            try:
                return leave(self, kind, *rest)
            except WorkerInterrupted:
                kill_and_leave(self, WorkerInterrupted, *rest)
                raise
        with shield():
            self.kill()  # `subprocess.run` did, but for an interrupt that came again
            wait_in_shield(lambda: self.poll() is not None, _END_WITHIN)
            leave(self, kind, *rest)

    return kill_and_leave


def _communicate_over(communicate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(communicate)
    def communicate_in_slices(self: Any, input: Any = None, timeout: float | None = None) -> Any:
        # without a deadline it may read from the only pipe, which nothing ends
        me = _waiter()
        if timeout is None and me is not None:
            timeout = _FAR
        with _passing_on(me):
            return communicate(self, input, timeout)

    return communicate_in_slices


_SELECTORS = ("SelectSelector", "_PollLikeSelector", "EpollSelector", "KqueueSelector")


def _await_forks() -> bool:
    """Wait until no other thread forks, or one does so for too long; whether `_forks` is taken.

    What runs before another's fork may wait for what this thread holds: not for ever.
    """
    alone, seen = False, -1
    while not alone and seen != _forked:
        seen = _forked
        alone = _forks.acquire(timeout=_FORK_WITHIN)
    return alone


def _fork_over(fork: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(fork)
    def fork_whole() -> Any:
        global _forked
        found: Any = None
        try:
            # interrupted, what it locks before, such as that of `logging`, might stay locked
            with shield():
                alone = _await_forks()
                try:
                    found = fork()
                finally:
                    if alone:
                        _forked += 1
                        _forks.release()
            return found
        except WorkerInterrupted:
            pid = found[0] if isinstance(found, tuple) else found
            if pid == 0:  # the child, which the parent ends
                return found
            if pid is not None:  # nobody gets its number
                with shield():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    if isinstance(found, tuple):
                        os.close(found[1])
            raise

    return fork_whole


def _shield_of_worker() -> contextlib.AbstractContextManager[None]:
    """Nothing on the main thread: a forked child would keep the shield's handlers of signals."""
    return contextlib.nullcontext() if waiter_here() is None else shield()


def _start_process_over(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def start_whole(self: Any) -> None:
        try:
            with _shield_of_worker():  # or it would run, and nobody know of it
                start(self)
        except WorkerInterrupted:  # nobody gets it
            if self._popen is not None:
                with shield():
                    self.kill()
                    wait_in_shield(lambda: not self.is_alive(), _END_WITHIN)
            raise

    return start_whole


def _pool_over(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_whole(self: Any, *args: Any, **named: Any) -> None:
        try:
            # CPython leaves the processes that it has so far to themselves
            with _shield_of_worker():
                begin(self, *args, **named)
        except WorkerInterrupted:  # nobody gets it
            if hasattr(self, "_terminate"):
                with shield():
                    self.terminate()
            raise

    return begin_whole


def _finalize_over(finalize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finalize)
    def finalize_whole(self: Any, *args: Any, **named: Any) -> Any:
        # it is called once: the processes of a pool that it had not reached would run for ever
        with _shield_of_worker():
            return finalize(self, *args, **named)

    return finalize_whole


def _install(patches: Patches) -> None:
    for name in ("fork", "forkpty"):
        if hasattr(os, name):
            patches.replace(os, name, _fork_over)
    patches.replace(threading.Condition, "wait", _condition_over)
    patches.replace(threading.Thread, "join", _join_over)
    patches.replace(subprocess.Popen, "__init__", _start_over)
    patches.replace(subprocess.Popen, "__exit__", _exit_over)
    patches.replace(subprocess.Popen, "kill", _kill_over)
    patches.replace(subprocess.Popen, "wait", _process_over)
    patches.replace(subprocess.Popen, "communicate", _communicate_over)
    patches.replace(multiprocessing.process.BaseProcess, "start", _start_process_over)
    patches.replace(multiprocessing.pool.Pool, "__init__", _pool_over)
    patches.replace(multiprocessing.util.Finalize, "__call__", _finalize_over)
    for name in _SELECTORS:
        kind = getattr(selectors, name, None)
        if kind is not None and "select" in vars(kind):
            patches.replace(kind, "select", _select_over)


table.add(
    Row(
        state="interrupts of Python's waits",
        treatment=Treatment.PER_WORKER,
        meaning="An interrupt of a worker ends its waits for a `Condition`, an `Event`, a "
        "`queue.Queue`, a `Future`, a `Semaphore`, a thread or a process, and the sleep of an "
        "event loop, and goes to the programs that the call has started. A `Lock` that is acquired "
        "directly, a `SimpleQueue` and other code in C it can't end.",
        test="tests/isolation/test_waits.py::test_an_interrupt_ends_pythons_waits",
        install=_install,
        in_own_process=True,  # an interrupt comes from another thread there too
        library="Python",
    )
)
