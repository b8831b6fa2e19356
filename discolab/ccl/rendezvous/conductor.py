"""A worker's conductor: the thread that uses its process groups, in the coordinator's order.

All members of a collective hear of it in one order, and each conductor does one thing at a time; so
no two can wait for each other. A worker never waits inside of a library: its wait is ended by an
interrupt, whatever the conductor does meanwhile.

The ends of process groups are the library's objects, made when they are first used. Only
the conductor touches them.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...runtime.errors import SessionError
from ...runtime.interrupts import plain_lock, shield
from ...runtime.worker import Worker, bind_thread

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
        `unwanted`.
    void
        Whether nobody waits for it any more.
    perform
        Does it; raises `Gone` if it is void.
    done
        Called when it has been done.
    failed
        Called when it could not be done, with what the library said, "" if it is void.
    unwanted
        Whether not even the process group need be made; None: as `void`.
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
    unwanted: Callable[[], bool] | None = None
    let_go: threading.Event = field(default_factory=threading.Event)


class Conductor:
    """See the module.

    Attributes
    ----------
    name
        Of the library, for errors.
    absorbing
        Held by the thread, the worker's or this one, that writes what came of a collective.
    """

    def __init__(self, worker: Worker, name: str) -> None:
        self.name = name
        self.absorbing = plain_lock()
        self._worker, self._threads = worker, torch.get_num_threads()
        self._tasks: _Tasks = queue.SimpleQueue()
        self._swap = plain_lock()  # guards which queue is `_tasks`, and `_ended`
        self._ended = False
        self._doing: Task | None = None
        self._void_since: tuple[Task, float] | None = None
        self._begin()

    def _begin(self) -> None:
        """Start the thread, and wait until it runs.

        Unlike `Thread.start` this has or has not happened, wherever an interrupt lands. Until it
        runs a thread bears the identifier of its maker, and would get what an interrupt sends to
        that.
        """
        if _process_ends:
            raise SessionError("no collective can begin any more: the process ends")
        begun = threading.Lock()
        begun.acquire()
        with shield():
            _thread.start_new_thread(self._run, (begun.release, self._tasks))
            begun.acquire()

    def submit(self, task: Task | Callable[[], None]) -> None:
        """Have it done after all that was submitted before; from any thread."""
        self._put(task)

    def close(self, ranks: Ranks, number: int) -> None:
        """Let go of the end of a process group, if it still is that one."""
        self._put((ranks, number))

    def end(self) -> None:
        """Let go of everything, once what was submitted is done; never waits."""
        self._put(None)

    def _put(self, task: _AnyTask) -> None:
        with self._swap:
            if self._ended:  # there is no thread that would ever finish it
                return
            self._ended = task is None
            token = object()
            _unfinished.add(token)
            self._tasks.put((token, task))

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
            before.put((None, None))
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

    def come_out(self) -> None:
        """As `pass_by`, before the worker begins something new: wait a moment, then abandon it."""
        doing = self._doing
        if doing is not None and doing.void() and not doing.let_go.wait(LET_GO_SECONDS):
            self.abandon()

    # -- on its thread -----------------------------------------------------------------------------

    def _run(self, begun: Callable[[], None], tasks: _Tasks) -> None:
        begun()
        bind_thread(None)
        torch.set_num_threads(self._threads)
        ends = _Ends()
        task: _AnyTask = ()
        while task is not None:
            del task  # it holds tensors
            token, task = tasks.get()
            try:
                if isinstance(task, Task):
                    self._now(tasks, task)
                    self._perform(task, ends)
                    self._now(tasks, None)
                elif isinstance(task, tuple):
                    ends.drop(*task)
                elif task is not None:
                    task()
                else:
                    ends.drop_all()
            finally:
                _unfinished.discard(token)

    def _now(self, tasks: _Tasks, task: Task | None) -> None:
        with self._swap:
            if self._tasks is tasks:  # else this thread was abandoned
                self._doing = task

    def _perform(self, task: Task, ends: _Ends) -> None:
        try:
            if (task.unwanted or task.void)():
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
            end = made[task.connect] = task.connect(
                task.ranks, task.number, task.unwanted or task.void
            )
        return end

    def drop(self, ranks: Ranks, number: int | None = None) -> None:
        """Let go of an end, if it is the one with that number: this closes its sockets."""
        held = self._held.get(ranks)
        if held is not None and number in (None, held[0]):
            del self._held[ranks]
            for end in held[1].values():
                if end.name() != "gloo":  # a device's: its end may wait for that
                    abort_beside(end)

    def drop_all(self) -> None:
        """Let go of all ends."""
        for ranks in list(self._held):
            self.drop(ranks)


def abort_beside(end: ProcessGroup) -> None:
    """End a process group on a thread of its own: the library may take its time."""
    token = object()
    _unfinished.add(token)
    threading.Thread(target=_abort, args=([end], token), daemon=True).start()


def _abort(held: list[Any], token: object) -> None:
    """End and free a process group that nobody else has; the driver must not go before."""
    try:
        held.pop().abort()
    finally:
        _unfinished.discard(token)


_AnyTask = Task | Callable[[], None] | tuple[Ranks, int] | tuple[()] | None
_Tasks = queue.SimpleQueue[tuple[object, _AnyTask]]


# When the interpreter ends conductors are given a moment: a thread that frees tensors or the
# library's objects while it goes would abort the process.

END_SECONDS = 5.0

_unfinished: set[object] = set()  # what is still to be done; any thread changes it
_process_ends = False


def idle() -> bool:
    """Whether no conductor of this process has anything to do."""
    return not _unfinished


if hasattr(os, "register_at_fork"):  # a child process has none of them
    os.register_at_fork(after_in_child=_unfinished.clear)


@atexit.register
def _end_all() -> None:
    global _process_ends
    _process_ends = True
    deadline = time.monotonic() + END_SECONDS
    while not idle() and time.monotonic() < deadline:
        time.sleep(0.01)
