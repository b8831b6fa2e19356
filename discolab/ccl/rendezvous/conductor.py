"""A worker's conductor: the thread that uses its process groups, in the coordinator's order.

All members of a collective hear of it in one order, and each conductor does one thing at a time; so
no two can wait for each other. A worker never waits inside of a library: its wait is ended by an
interrupt, whatever the conductor does meanwhile.

The ends of process groups are the library's objects, made when they are first used. Only
the conductor touches them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...runtime.errors import SessionError
from ...runtime.worker import Worker, bind_thread
from ..backends import background

Ranks = tuple[int, ...]
ProcessGroup = Any  # of the library, one member's
Connect = Callable[["Ranks", int, Callable[[], bool]], ProcessGroup]


LET_GO_SECONDS = 0.25  # that a library is given to come out of what nobody wants any more


class Gone(Exception):
    """Nobody waits for it any more."""


@dataclass(eq=False, slots=True)
class Task:
    """Something to be done over a process group.

    Attributes
    ----------
    ranks, number
        Of the process group.
    connect
        Makes this worker's end of it, if there is none: called with the ranks, the number, and
        `void`.
    void
        Whether nobody waits for it any more.
    perform
        Does it; raises `Gone` if it is void.
    done
        Called when it has been done.
    failed
        Called when it could not be done, with what the library said, "" if it is void.
    let_go
        Set once the library has come out of it.
    """

    ranks: Ranks
    number: int
    connect: Connect
    void: Callable[[], bool]
    perform: Callable[[ProcessGroup], None]
    done: Callable[[], None] = lambda: None
    failed: Callable[[str], None] = lambda text: None
    let_go: threading.Event = field(default_factory=threading.Event)


class Conductor:
    """See the module.

    Attributes
    ----------
    name
        Of the library, for errors.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.name = name
        self._worker, self._threads = worker, torch.get_num_threads()
        self._tasks: _Tasks = queue.SimpleQueue()
        self._swap = threading.Lock()  # guards which queue is `_tasks`
        self._doing: Task | None = None
        self._void_since: tuple[Task, float] | None = None
        self._begin()

    def _begin(self) -> None:
        with self._worker.sheltered():
            background.start(self._run, self._tasks)

    def submit(self, task: Task | Callable[[], None]) -> None:
        """Have it done after all that was submitted before; from any thread."""
        with self._swap:
            self._tasks.put(task)

    def close(self, ranks: Ranks, number: int) -> None:
        """Let go of the end of a process group, if it still is that one."""
        with self._swap:
            self._tasks.put((ranks, number))

    def end(self) -> None:
        """Let go of everything, once what was submitted is done; never waits."""
        with self._swap:
            self._tasks.put(None)

    def abandon(self) -> None:
        """Leave what it can't be torn out of, and all ends, to a thread that ends then.

        On the worker's own thread.
        """
        with self._swap:
            before, self._tasks = self._tasks, queue.SimpleQueue()
            self._doing = None
            try:
                while True:  # what waits behind it is for the new thread
                    self._tasks.put(before.get_nowait())
            except queue.Empty:
                pass
            before.put(None)
        self._begin()

    def pass_by(self) -> None:
        """Abandon what the thread is stuck in, if nobody wants that any more.

        An interrupt may have ended a call before its worker waited for what this thread does: then
        the worker has left nothing. On the worker's own thread, now and then while it waits.
        """
        doing, since = self._doing, self._void_since
        if doing is None or not doing.void():
            self._void_since = None
        elif since is None or since[0] is not doing:
            self._void_since = doing, time.monotonic()
        elif time.monotonic() - since[1] > LET_GO_SECONDS:
            self._void_since = None
            self.abandon()

    # -- on its thread -----------------------------------------------------------------------------

    def _run(self, begun: Callable[[], None], tasks: _Tasks) -> None:
        begun()
        bind_thread(None)
        torch.set_num_threads(self._threads)
        ends = _Ends()
        while (task := tasks.get()) is not None:
            with background.busy():
                if callable(task):
                    task()
                elif isinstance(task, tuple):
                    ends.drop(*task)
                else:
                    self._now(tasks, task)
                    self._perform(task, ends)
                    self._now(tasks, None)
            del task  # it holds tensors

    def _now(self, tasks: _Tasks, task: Task | None) -> None:
        with self._swap:
            if self._tasks is tasks:  # else this thread was abandoned
                self._doing = task

    def _perform(self, task: Task, ends: _Ends) -> None:
        try:
            if task.void():
                raise Gone
            with torch.inference_mode():
                task.perform(ends.of(task))
        except Exception as exc:
            ends.drop(task.ranks)
            task.let_go.set()
            text = "" if isinstance(exc, Gone | SessionError) else f"{type(exc).__name__}: {exc}"
            task.failed(f"{self.name}: {text}" if text else "")
        else:
            task.let_go.set()
            task.done()


class _Ends:
    """The ends of process groups that one thread has made; one for each library."""

    def __init__(self) -> None:
        self._held: dict[Ranks, tuple[int, dict[Connect, ProcessGroup]]] = {}

    def of(self, task: Task) -> ProcessGroup:
        """The end that a task needs."""
        number, made = self._held.get(task.ranks, (0, {}))
        if number != task.number:
            self.drop(task.ranks)
            made = {}
            self._held[task.ranks] = task.number, made
        end = made.get(task.connect)
        if end is None:
            end = made[task.connect] = task.connect(task.ranks, task.number, task.void)
        return end

    def drop(self, ranks: Ranks, number: int | None = None) -> None:
        """Let go of an end, if it is the one with that number: this closes its sockets."""
        held = self._held.get(ranks)
        if held is not None and number in (None, held[0]):
            del self._held[ranks]
            for end in held[1].values():
                if end.name() == "nccl":  # its end may wait for the device
                    background.begin(end.abort)


_Tasks = queue.SimpleQueue[Task | Callable[[], None] | tuple[Ranks, int] | None]
