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
        shared: dict[str, Any] = {}
        self.workers = [
            Worker(
                rank,
                num_workers,
                num_groups,
                devices[rank],
                channel,
                shared=shared,
                worker_zero_data=worker_zero_data,
            )
            for rank, channel in enumerate(channels)
        ]
        peers = {worker.worker_id: worker for worker in self.workers}
        for worker in self.workers:
            worker.peers = peers
        self.threads: list[threading.Thread] = []

    def start(self, session: Session, threads_each: int) -> None:
        """Start the threads of `session`, each with so many threads of torch."""
        global _sessions_made
        _sessions_made += 1
        self.threads += [
            threading.Thread(
                target=_run_worker,
                args=(worker, threads_each),
                name=f"discolab-{_sessions_made}-worker-{worker.worker_id}",
                daemon=True,
            )
            for worker in self.workers
        ]
        weakref.finalize(session, _Stop(self.workers))  # before: should the n-th fail to start
        for thread, worker in zip(self.threads, self.workers, strict=True):
            _running[thread] = worker
        hooks.hold(session, self.threads)

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
            if worker.died or not (worker.ended or thread.is_alive())
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
