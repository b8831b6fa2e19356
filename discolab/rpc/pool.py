"""The threads on which a rank serves calls, beside its own commands: how many, and which does what.

A `Pool` belongs to one rank. Its `lock` guards all of its fields. There are as many threads as
there is something to do, at most `MOST_RUNNING` of them at work; those that wait for something do
not count, and queues.py says which call is next, so that calls back and forth never deadlock. Short
calls are done sooner by a few threads than by many: only `AT_ONCE` are started as calls come, and
the housekeeping thread starts more while calls wait. A thread that has nothing to do sleeps, and
after a while it ends.

A `ServerThread` is interrupted as a worker is (runtime/interrupts.py). Its `turn` guards `task`:
a thread that interrupts a task holds it, so that no other is hit. All else is its own thread's.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..runtime.errors import DiscoError, WorkerInterrupted
from ..runtime.interrupts import Interruptible, bind_waiter, reentrant_lock, shield, waiter_here
from ..runtime.landings import give_back_locks
from ..runtime.worker import Worker, bind_thread, prepare_thread
from .errors import session_over
from .names import CONTROLLER, format_rank
from .outcome import spin
from .queues import DEEPEST, Queues

MOST_RUNNING = 16  # at work on one rank, as in PyTorch RPC
AT_ONCE = 3  # of these, started as calls come; more if calls wait for long
LONG = 0.002  # seconds
MOST_THREADS = 512  # with those that wait
_IDLE = 5.0  # seconds after which a thread with nothing to do ends


class Task(Protocol):
    """What a server thread does.

    Attributes
    ----------
    depth
        How many calls wait for it, each for the next; see queues.py.
    """

    depth: int

    def run(self, thread: ServerThread) -> None:
        """Do the task, on that thread; raises nothing but `WorkerInterrupted`."""

    def torn(self, thread: ServerThread) -> None:
        """An interrupt has come between two statements of discolab's; never raises."""

    def refuse(self, error: DiscoError) -> None:
        """The task will not be done."""


class Chore:
    """A task that runs a function of discolab's own, in any case: if it is refused, right away."""

    def __init__(self, func: Callable[..., Any], *args: Any) -> None:
        self.depth = DEEPEST
        self._func, self._args = func, args

    def run(self, _: Any = None) -> None:
        """See `Task`."""
        try:
            self._func(*self._args)
        except Exception:
            _show_fault()

    torn = refuse = run


class ServerThread(Interruptible):
    """One thread that serves calls.

    Attributes
    ----------
    pool
        The pool it belongs to.
    task
        What it does now.
    turn
        A lock, held by whoever interrupts the thread, and by itself to begin or end a task.
    """

    def __init__(self, pool: Pool, number: int) -> None:
        super().__init__()
        self.pool = pool
        self.task: Task | None = None
        self._owed: Task | None = None  # taken from the pool, and not yet said to be done
        self.turn = reentrant_lock()
        self.thread = threading.Thread(
            target=self._serve, name=f"discolab-rpc-{pool.name}-{number}", daemon=True
        )

    def work(self) -> object:
        return self.task

    def wait_for(
        self,
        ready: Callable[[], bool],
        what: Any,
        timeout: float | None = None,
        check: Callable[[], float | None] | None = None,
    ) -> None:
        """See `Interruptible`; meanwhile another thread of the pool may take its place."""
        if ready():
            return
        parked = self._owed if getattr(what, "parks", False) else None
        was_running = self.running
        self._absorb()  # the wait itself raises; an exception from outside would tear the counting
        self.pool.wait_begins(parked)
        try:
            super().wait_for(ready, what, timeout, check)
        finally:
            self.pool.wait_ends(parked)
            self.running = was_running
        if self.interrupts:
            self._raise_in_wait(what)

    def sleep(self, seconds: float) -> bool:
        """Sleep until it is woken, while there is nothing to do; whether it was."""
        return self._wakeup.acquire(timeout=seconds)

    def _serve(self) -> None:
        worker = self.pool.worker
        self.thread_id = threading.get_ident()
        bind_waiter(self)
        bind_thread(worker)
        if worker is not None:
            prepare_thread(worker, self.pool.torch_threads)
        self.pool.on_thread()
        self.serve_on(self._do_tasks)

    def _do_tasks(self) -> None:
        """Do tasks until there were none for long, or an interrupt comes between two statements."""
        give_back_locks(self._cut_off)
        self._cut_off = None
        if self._owed is not None:
            self._end_torn(self._owed)
        next_task, worker = self.pool.next_task, self.pool.worker
        turn, done = self.turn, self.pool.done
        while True:
            task = next_task(self)
            if task is None:
                return
            self._owed = task
            with turn:
                self.task = task
            bind_thread(worker)  # which may have set another default dtype since the last task
            try:
                task.run(self)
            except WorkerInterrupted:
                raise
            except BaseException as exc:  # a fault of ours: the caller must not wait for it
                self._absorb()
                _show_fault()
                task.refuse(DiscoError(f"a fault of discolab in a call: {type(exc).__name__}"))
            self._absorb()
            if not torch.is_grad_enabled():  # what one call has left is not for the next
                torch.set_grad_enabled(True)
            with turn:
                self.task = None
                self.interrupts = 0
            self._absorb()  # sent meanwhile
            done(task)
            self._owed = None
            del task  # an idle thread keeps no values alive

    def _end_torn(self, task: Task) -> None:
        self._absorb()
        if self.task is not None:
            task.torn(self)
        with self.turn:
            self.task = None
            self.interrupts = 0
        self._absorb()
        self.pool.done(task)
        self._owed = None

    def clear_interrupt(self) -> None:
        """On its own thread, after an interrupt has ended its work: cleaning up may wait again."""
        self._absorb()
        with self.turn:
            self.interrupts = 0
        self._absorb()
        self.running = True

    def retry(self) -> None:
        """Interrupt its task once more, if it was interrupted and goes on."""
        with self.turn:
            if self.task is not None and self.interrupts:
                self.retry_interrupt()

    def interrupt_task(self, task: Task) -> bool:
        """Interrupt the task, if the thread is at it; whether it is."""
        with self.turn:
            if self.task is not task:
                return False
            self.interrupt()
            return True


def depth_here() -> int:
    """The depth of a call that the calling thread makes now."""
    me = waiter_here()
    if isinstance(me, ServerThread) and me.task is not None:
        return me.task.depth + 1
    return 0


def _show_fault() -> None:
    try:
        traceback.print_exc()
    except Exception:  # of an exception that can't be looked at
        pass


class Pool:
    """See the module.

    Parameters
    ----------
    worker
        Whose calls they are; None: the controller's.
    name
        For the names of threads.
    on_thread
        Called on each thread when it begins.
    notify
        Called when calls are left waiting: then `add_thread` is to be called every `LONG` seconds.
    polls
        Whether a thread looks for its next task before it sleeps. Not where a receiving thread
        brings them: the two would take Python's lock from each other.
    """

    def __init__(
        self,
        worker: Worker | None,
        name: str,
        torch_threads: int,
        on_thread: Callable[[], None],
        notify: Callable[[], None],
        polls: bool,
    ) -> None:
        self.worker = worker
        self.name = name
        self.rank = CONTROLLER if worker is None else worker.worker_id
        self.torch_threads = torch_threads
        self.on_thread = on_thread
        self.notify = notify
        self.polls = polls
        self.lock = reentrant_lock()
        self.closed = False
        self._tasks: Queues[Task] = Queues()
        self._asleep: list[ServerThread] = []
        self._all: set[ServerThread] = set()
        self._polling = 0  # threads that look for a task, one at most
        self._blocked = 0
        self._stuck = False  # set by `_wake_or_make`: all threads wait, and there can be no more
        self._waited_first: Task | None = None  # by `add_thread`
        self._numbers = itertools.count(1)

    # -- tasks -------------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        """Queue a task; does not wait."""
        if not self._give_to_poller(task):
            with shield():  # or a thread would be counted that was never started
                self._submit(task)

    def _give_to_poller(self, task: Task) -> bool:
        """Queue it if a thread spins for its next task, which most calls find."""
        with self.lock:
            if not self._polling or self._tasks or self.closed:
                return False
            self._tasks.put(task)
            return True

    def _submit(self, task: Task) -> None:
        started: ServerThread | None = None
        error: DiscoError | None = None
        with self.lock:
            if self.closed:
                error = session_over()
            else:
                self._tasks.put(task)
                if self._tasks.ready() > self._polling:
                    started = self._wake_or_make()
                    if self._stuck:  # all wait, and perhaps for this very call
                        self._stuck = False
                        self._tasks.withdraw(task)
                        error = self._too_many()
        if error is not None:
            task.refuse(error)
        elif started is not None:
            self._start(started)

    def _wake_or_make(self, most: int = AT_ONCE) -> ServerThread | None:
        """Wake a thread, or return one that is to be started; under the lock."""
        asleep = self._asleep
        at_work = len(self._all) - self._blocked - self._polling - len(asleep)
        if at_work >= most:
            self.notify()
            return None
        if asleep:
            asleep.pop().wake()
            return None
        if len(self._all) >= MOST_THREADS:
            if not at_work:
                self._stuck = True
            return None
        thread = ServerThread(self, next(self._numbers))
        self._all.add(thread)
        return thread

    def add_thread(self) -> bool:
        """Start one more thread for calls that have waited for long; whether any wait still."""
        with self.lock:
            first = self._tasks.first()
            late = first is not None and first is self._waited_first
            self._waited_first = first
            started = self._wake_or_make(MOST_RUNNING) if late else None
        if started is not None:
            self._start(started)
        return first is not None

    def _start(self, thread: ServerThread) -> None:
        try:
            thread.thread.start()
        except RuntimeError as exc:  # no more threads from the system
            with self.lock:
                self._all.discard(thread)
                left = self._tasks.clear() if not self._all else []
            for task in left:
                task.refuse(DiscoError(f"no thread can be started for a call: {exc}"))

    def next_task(self, thread: ServerThread) -> Task | None:
        """Wait for the next task, on a server thread. None: the thread is to end."""
        tasks, lock = self._tasks, self.lock
        while True:
            with lock:
                task = tasks.take()
                if task is not None:
                    return task
                look = self.polls and not self._polling and not self.closed
                if look:
                    self._polling = 1
            if look:
                spin(lambda: bool(tasks))
            with lock:
                if look:
                    self._polling = 0
                task = tasks.take()
                if task is not None:
                    return task
                if self.closed:
                    self._all.discard(thread)
                    return None
                self._asleep.append(thread)
            if thread.sleep(_IDLE):
                continue
            with lock:
                if thread in self._asleep:
                    self._asleep.remove(thread)
                    self._all.discard(thread)
                    return None

    # -- what its threads say ------------------------------------------------------------------

    def wait_begins(self, parked: Task | None) -> None:
        """A server thread begins to wait.

        `parked` is its task if that waits for no other call, so that its depth says nothing.
        """
        refused = None
        with self.lock:
            self._blocked += 1
            if parked is not None:
                self._tasks.done(parked)
            waiting = self._tasks.ready() > self._polling
            started = self._wake_or_make() if waiting else None
            if self._stuck:  # it may wait for this very one
                self._stuck = False
                refused = self._tasks.first()
                if refused is not None:
                    self._tasks.withdraw(refused)
        if refused is not None:
            refused.refuse(self._too_many())
        if started is not None:
            self._start(started)

    def wait_ends(self, parked: Task | None) -> None:
        """A server thread goes on."""
        with self.lock:
            self._blocked -= 1
            if parked is not None:
                self._tasks.again(parked)

    # -- facts and the end -------------------------------------------------------------------

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return len(self._all)

    def done(self, task: Task) -> None:
        """A server thread has ended a task."""
        with self.lock:
            self._tasks.done(task)

    def running(self) -> list[ServerThread]:
        """The threads that have a task."""
        with self.lock:
            return [thread for thread in self._all if thread.task is not None]

    def retry_interrupts(self) -> None:
        """Interrupt once more what was interrupted and goes on: it may have swallowed that."""
        for thread in self.running():
            thread.retry()

    def close(self) -> None:
        """Interrupt the running tasks and refuse the queued ones; does not wait."""
        with self.lock:
            self.closed = True
            tasks = self._tasks.clear()
            asleep, self._asleep = self._asleep, []
        for thread in asleep:
            thread.wake()
        for task in tasks:
            task.refuse(session_over())
        for thread in self.running():
            current = thread.task
            if current is not None:
                thread.interrupt_task(current)

    def _too_many(self) -> DiscoError:
        return DiscoError(
            f"{format_rank(self.rank)} serves {MOST_THREADS} calls already, and all of them wait "
            "for others: is there an endless chain of calls back?"
        )
