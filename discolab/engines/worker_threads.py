"""Workers that are threads of this process: their start, interrupts and end.

A `ThreadedSession` has all of its workers here; where workers are processes it is worker 0.
Threads hold their `Worker`, never the session, so that a session nobody holds can be collected:
its workers then finish what is queued and end.

At interpreter exit `_end_all` interrupts workers that still run and gives them a moment;
being daemons they never keep the process alive.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.actions import DiscoAction
from ..runtime.channel import ThreadChannel
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from ..runtime.worker import Worker, prepare_thread
from . import hooks

_END_GRACE = 1.0  # seconds that interrupted workers are given when a session ends
_EXIT_GRACE = 2.0  # seconds that busy workers are given at interpreter exit
_sessions_made = 0

# every thread with its worker, for the end of the process; a thread leaves when it ends
_running: weakref.WeakKeyDictionary[threading.Thread, Worker] = weakref.WeakKeyDictionary()
if hasattr(os, "register_at_fork"):  # a child process has none of them
    os.register_at_fork(after_in_child=_running.clear)


class LocalWorkers:
    """The workers of one session that are threads here.

    Attributes
    ----------
    workers, threads
        In the order of their ranks, which count from 0.
    """

    def __init__(
        self,
        channels: Sequence[ThreadChannel],
        num_workers: int,
        num_groups: int,
        devices: Sequence[torch.device],
        worker_zero_data: dict[int, torch.Tensor],
    ) -> None:
        self._shared: dict[str, Any] = {}
        self._groups, self._world, self._data = num_groups, num_workers, worker_zero_data
        self.abandoned: list[threading.Thread] = []  # of workers that were replaced, and hang
        self._peers: dict[int, Worker] = {}
        self.workers = [
            self._make(rank, channel, devices[rank]) for rank, channel in enumerate(channels)
        ]
        self._peers.update((worker.worker_id, worker) for worker in self.workers)
        self.threads: list[threading.Thread] = []
        self._number = self._threads_each = 0

    def _make(self, rank: int, channel: ThreadChannel, device: torch.device) -> Worker:
        worker = Worker(
            rank,
            self._world,
            self._groups,
            device,
            channel,
            shared=self._shared,
            worker_zero_data=self._data,
        )
        worker.peers = self._peers
        return worker

    def _thread_of(self, worker: Worker) -> threading.Thread:
        thread = threading.Thread(
            target=_run_worker,
            args=(worker, self._threads_each),
            name=f"discolab-{self._number}-worker-{worker.worker_id}",
            daemon=True,
        )
        _running[thread] = worker
        return thread

    def start(self, session: Session, threads_each: int) -> None:
        """Start the threads of `session`, each with so many threads of torch."""
        global _sessions_made
        _sessions_made += 1
        self._number, self._threads_each = _sessions_made, threads_each
        weakref.finalize(session, _Stop(self.workers))  # before: should the n-th fail to start
        self.threads += [self._thread_of(worker) for worker in self.workers]
        hooks.hold(session, self.threads)

    def take_down(self, rank: int) -> str:
        """End one worker, or, where it hangs, leave it alone; what has become of it.

        An abandoned thread ends once it comes out of what it hangs in. Whatever it does until
        then reaches nobody: it has no place among the others any more.
        """
        worker, thread = self.workers[rank], self.threads[rank]
        if not thread.is_alive():
            return "has died"
        worker.gives_way = True
        worker.announce_interrupt()
        worker.channel.send((DiscoAction.SHUTDOWN, 0))
        _join_threads([thread], _END_GRACE, [worker])
        if not thread.is_alive():
            return "was ended by restart_worker"
        _, detail, _ = worker.doing()
        worker.shared, worker.peers = {}, {rank: worker}
        worker.ended = True
        worker.retry_interrupt()
        self.abandoned.append(thread)
        return f"hung{f' in {detail}' if detail else ''}, and its thread was left behind"

    def make_another(self, rank: int, channel: ThreadChannel) -> Worker:
        """A worker in the place of one that was taken down; `start_another` starts its thread."""
        worker = self._make(rank, channel, self.workers[rank].device)
        self.threads[rank] = self._thread_of(worker)
        self.workers[rank] = self._peers[rank] = worker
        return worker

    def start_another(self, session: Session, rank: int) -> None:
        """Start the thread of a new worker."""
        hooks.hold(session, [self.threads[rank]])

    def status(self) -> list[WorkerStatus]:
        """What each does now."""
        statuses = []
        for worker, thread in zip(self.workers, self.threads, strict=True):
            state, detail, seconds = worker.doing()
            if not thread.is_alive() and state != "ended":
                state, detail = "dead", ""
            rank, device, queued = worker.worker_id, str(worker.device), worker.channel.pending()
            statuses.append(WorkerStatus(rank, device, state, detail, seconds, queued))
        return statuses

    def interrupt(self) -> None:
        """Begin an interrupt of all."""
        for worker in self.workers:
            worker.announce_interrupt()
        for worker in self.workers:
            worker.retry_interrupt()

    def dead(self) -> list[int]:
        """Those that have died."""
        return [
            worker.worker_id
            for worker, thread in zip(self.workers, self.threads, strict=True)
            # one that was not started yet takes the place of a lost one
            if worker.died or not (worker.ended or thread.is_alive() or thread.ident is None)
        ]

    def join(self, timeout: float) -> list[int]:
        """Wait for them to end, interrupt them at the deadline; gives those that did not end."""
        _join_threads(self.threads, timeout)
        late = self._alive()
        if late:
            for worker in late:
                worker.interrupt()
            _join_threads(self.threads, _END_GRACE, late)
        hooks.settle()
        return [worker.worker_id for worker in self._alive()]

    def _alive(self) -> list[Worker]:
        # a session that fails early has not started them
        return [w for w, t in zip(self.workers, self.threads, strict=False) if t.is_alive()]


class _Stop:
    """Ends the workers of a session that was dropped; safe in the garbage collector."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def __call__(self) -> None:
        for worker in self._workers:
            if not worker.ended:
                worker.channel.send((DiscoAction.SHUTDOWN, 0))


def leave_thread(worker: Worker) -> None:
    """Clean up a worker's own thread, on it, after its last command."""
    try:
        hooks.leave(worker)
    finally:
        worker.leave()


def _run_worker(worker: Worker, num_threads: int) -> None:
    try:
        prepare_thread(worker, num_threads)
        hooks.enter(worker)
        worker.run()
    finally:
        leave_thread(worker)


def _join_threads(
    threads: list[threading.Thread], timeout: float, retry: Sequence[Worker] = ()
) -> None:
    """Wait for threads to end; Ctrl-C is seen, because no join is longer than a tick."""
    deadline = time.monotonic() + timeout
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for thread in threads:
            if thread.is_alive():
                thread.join(0.01)
        for worker in retry:
            worker.retry_interrupt()


@atexit.register
def _end_all() -> None:
    alive = [(t, w) for t, w in _running.items() if t.is_alive()]
    for _, worker in alive:
        worker.interrupt()
        worker.channel.send((DiscoAction.SHUTDOWN, 0))
    _join_threads([t for t, _ in alive], _EXIT_GRACE, [w for _, w in alive])
