"""Callees: threads that serve calls for one rank.

A `Callee` is interrupted as a worker is (runtime/interruptible.py). Its `turn` guards `task`: who
interrupts a task holds it, so that no other one is hit. Everything else is its own thread's.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..engines.local_workers import prepare_thread
from ..runtime.errors import DiscoError, WorkerInterrupted
from ..runtime.interruptible import Interruptible
from ..runtime.waiter import bind_waiter, waiter_here
from ..runtime.worker import bind_thread

if TYPE_CHECKING:
    from .pool import Pool


class Task(Protocol):
    """What a callee can do.

    Attributes
    ----------
    depth
        How many calls wait for it, each for the next; see queues.py.
    """

    depth: int

    def run(self, callee: Callee) -> None:
        """Do it, on that callee's thread; raises nothing but `WorkerInterrupted`."""

    def torn(self, callee: Callee) -> None:
        """An interrupt has come between two statements of ours; never raises."""

    def refuse(self, error: DiscoError) -> None:
        """It will not be done."""


class Callee(Interruptible):
    """One thread that serves calls.

    Attributes
    ----------
    pool
        To which it belongs.
    task
        What it does now.
    turn
        Held by who interrupts it, and by itself when it takes up or lays down a task.
    """

    def __init__(self, pool: Pool, number: int) -> None:
        super().__init__()
        self.pool = pool
        self.task: Task | None = None
        self._owed: Task | None = None  # taken from the pool, and not yet said to be done
        self.turn = threading.Lock()
        self.thread = threading.Thread(
            target=self._serve, name=f"discolab-rpc-{pool.name}-{number}", daemon=True
        )

    def wait_for(
        self,
        ready: Callable[[], bool],
        what: Any,
        timeout: float | None = None,
        check: Callable[[], float | None] | None = None,
    ) -> None:
        """See `Interruptible`; meanwhile another thread may take its place."""
        if ready():
            return
        parked = self._owed if getattr(what, "parks", False) else None
        was_running = self.running
        self._absorb()  # the wait itself raises; an exception from outside would tear the counting
        self.pool.blocks(parked)
        try:
            super().wait_for(ready, what, timeout, check)
        finally:
            self.pool.goes_on(parked)
            self.running = was_running
        if self.interrupts:
            self._raise_in_wait(what)

    def sleep(self, seconds: float) -> bool:
        """Until it is woken, while there is nothing to do; whether it was."""
        return self._wakeup.acquire(timeout=seconds)

    def _serve(self) -> None:
        worker = self.pool.worker
        self.thread_id = threading.get_ident()
        bind_waiter(self)
        bind_thread(worker)
        if worker is not None:
            prepare_thread(worker, self.pool.torch_threads)
        self.pool.on_thread()
        while True:
            try:
                if self._owed is not None:
                    self._lay_down_torn(self._owed)
                if not self._serve_on():
                    return
            except WorkerInterrupted:
                continue  # between two statements of ours

    def _serve_on(self) -> bool:
        """Do tasks until there are none for long; False: the thread ends."""
        next_task = self.pool.next_task
        turn, done = self.turn, self.pool.done
        while True:
            task = next_task(self)
            if task is None:
                return False
            self._owed = task
            with turn:
                self.task = task
            try:
                task.run(self)
            except WorkerInterrupted:
                raise
            except BaseException as exc:  # a fault of ours: nobody may wait for it
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

    def _lay_down_torn(self, task: Task) -> None:
        self._absorb()
        if self.task is not None:
            task.torn(self)
        with self.turn:
            self.task = None
            self.interrupts = 0
        self._absorb()
        self.pool.done(task)
        self._owed = None

    def forgive(self) -> None:
        """On its own thread: an interrupt has ended what it should; what cleans up may wait."""
        self._absorb()
        with self.turn:
            self.interrupts = 0
        self._absorb()
        self.running = True

    def remind(self) -> None:
        """Interrupt it once more, if it is interrupted and goes on."""
        with self.turn:
            if self.task is not None and self.interrupts:
                self.retry_interrupt()

    def interrupt_task(self, task: Task) -> bool:
        """End what it does, if it is that; whether it is."""
        with self.turn:
            if self.task is not task:
                return False
            self.interrupt()
            return True


def depth_here() -> int:
    """How deep a call is that the calling thread makes now."""
    me = waiter_here()
    if isinstance(me, Callee) and me.task is not None:
        return me.task.depth + 1
    return 0


def _show_fault() -> None:
    try:
        traceback.print_exc()
    except Exception:  # of an exception that can't be looked at
        pass
