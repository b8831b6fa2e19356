"""Workers as threads of this process: the session for a laptop and for one server's GPUs.

Each worker is one daemon thread with its own device and, on CUDA, its own stream. Threads
hold their `Worker`, never the session, so that a session nobody holds can be collected:
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..runtime.actions import DiscoAction
from ..runtime.arguments import parse_device
from ..runtime.channel import ThreadChannel
from ..runtime.errors import ArgumentError
from ..runtime.functions import find_func
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from ..runtime.worker import Worker
from . import hooks

_END_GRACE = 1.0  # seconds that interrupted workers are given when a session ends
_EXIT_GRACE = 2.0  # seconds that busy workers are given at interpreter exit
_sessions_made = 0

# every thread with its worker, for the end of the process; a thread leaves when it ends
_running: weakref.WeakKeyDictionary[threading.Thread, Worker] = weakref.WeakKeyDictionary()
if hasattr(os, "register_at_fork"):  # a child process has none of them
    os.register_at_fork(after_in_child=_running.clear)


class ThreadedSession(Session):
    """A session whose workers are threads of this process.

    Parameters
    ----------
    num_workers
        The world size, 1 or more.
    num_groups
        Cuts the workers in this many equal groups.
    devices
        One device for all or a list with one for each worker; None: the GPUs in turn, or
        the CPU where there is none.
    timeout
        Seconds that any wait may take; None: no limit (Ctrl-C always ends a wait).

    Raises
    ------
    ArgumentError
        If the numbers do not fit or a device is not there.

    Examples
    --------
    >>> with ThreadedSession(2) as sess:
    ...     ranks = sess.call_packed(sess.get_global_func("runtime.disco.worker_id"))
    ...     ranks.debug_get_from_all()
    [0, 1]
    """

    engine = "threads"

    def __init__(
        self,
        num_workers: int,
        num_groups: int = 1,
        devices: Any = None,
        *,
        timeout: float | None = None,
    ) -> None:
        global _sessions_made
        num_workers, num_groups = check_world(num_workers, num_groups)
        placed = place_workers(num_workers, devices)
        channels = [ThreadChannel() for _ in range(num_workers)]
        host_data: dict[int, torch.Tensor] = {}
        super().__init__(channels, num_groups, placed, host_data, timeout)
        shared: dict[str, Any] = {}
        self._workers = [
            Worker(
                rank,
                num_workers,
                num_groups,
                placed[rank],
                channels[rank],
                shared=shared,
                worker_zero_data=host_data,
            )
            for rank in range(num_workers)
        ]
        peers = {worker.worker_id: worker for worker in self._workers}
        for worker in self._workers:
            worker.peers = peers
        _sessions_made += 1
        self._threads = [
            threading.Thread(
                target=_run_worker,
                args=(worker, max(1, torch.get_num_threads() // num_workers)),
                name=f"discolab-{_sessions_made}-worker-{worker.worker_id}",
                daemon=True,
            )
            for worker in self._workers
        ]
        weakref.finalize(self, _Stop(self._workers))  # before: should the n-th thread fail to start
        for thread, worker in zip(self._threads, self._workers, strict=True):
            _running[thread] = worker
            thread.start()
        hooks.hold(self, self._threads)

    def status(self) -> list[WorkerStatus]:
        """What each worker does now; never waits."""
        found = []
        for worker, thread in zip(self._workers, self._threads, strict=True):
            state, detail, seconds = worker.doing()
            if not thread.is_alive() and state != "ended":
                state, detail = "dead", ""
            found.append(
                WorkerStatus(
                    worker.worker_id,
                    str(worker.device),
                    state,
                    detail,
                    seconds,
                    worker.channel.pending(),
                )
            )
        return found

    def workers_here(self) -> Mapping[int, Worker]:
        """All of them."""
        return {worker.worker_id: worker for worker in self._workers}

    def _check_name(self, name: str) -> None:
        find_func(name)

    def _interrupt_workers(self) -> None:
        for worker in self._workers:
            worker.announce_interrupt()
        for worker in self._workers:
            worker.retry_interrupt()

    def _retry_interrupt(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._workers[rank].retry_interrupt()

    def _dead(self) -> list[int]:
        return [
            worker.worker_id
            for worker, thread in zip(self._workers, self._threads, strict=True)
            if worker.died or not (worker.ended or thread.is_alive())
        ]

    def _join(self, timeout: float) -> list[int]:
        _join_threads(self._threads, timeout)
        late = self._alive()
        if late:
            for worker in late:
                worker.interrupt()
            _join_threads(self._threads, _END_GRACE, late)
        hooks.settle()
        return [worker.worker_id for worker in self._alive()]

    def _alive(self) -> list[Worker]:
        return [w for w, t in zip(self._workers, self._threads, strict=True) if t.is_alive()]


class _Stop:
    """Ends the workers of a session that was dropped; safe in the garbage collector."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def __call__(self) -> None:
        for worker in self._workers:
            if not worker.ended:
                worker.channel.send((DiscoAction.SHUTDOWN, 0))


def check_world(num_workers: Any, num_groups: Any) -> tuple[int, int]:
    """Check the number of workers and groups of any engine.

    Raises
    ------
    ArgumentError
        If either is no positive integer, or the workers can't be cut in equal groups.
    """
    for what, value in (("num_workers", num_workers), ("num_groups", num_groups)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{what} must be a positive integer, got {value!r}")
    if num_workers % num_groups:
        raise ArgumentError(
            f"{num_workers} workers can't be cut in {num_groups} equal groups: num_workers must "
            "be divisible by num_groups"
        )
    return num_workers, num_groups


def place_workers(num_workers: int, devices: Any) -> list[torch.device]:
    """The device of each worker.

    Raises
    ------
    ArgumentError
        If the list has another length, a name is none of torch's, or there is no such device.
    """
    if devices is None:
        gpus = torch.cuda.device_count()
        names: list[Any] = [f"cuda:{r % gpus}" if gpus else "cpu" for r in range(num_workers)]
    elif isinstance(devices, str | torch.device):
        names = [devices] * num_workers
    elif not isinstance(devices, Iterable):
        raise ArgumentError(
            f"devices is a device such as 'cpu' or 'cuda:0', or a list of them, got {devices!r}"
        )
    else:
        names = list(devices)
        if len(names) != num_workers:
            raise ArgumentError(
                f"devices lists {len(names)} devices for {num_workers} workers; give one for "
                "each, or a single one for all"
            )
    return [_check_device(name) for name in names]


def _check_device(name: Any) -> torch.device:
    device = parse_device(name)
    if device is None:
        raise ArgumentError("None is not a device; leave devices out to have them chosen")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ArgumentError(f"there is no {device}: torch sees {count} GPUs; try devices='cpu'")
        device = torch.device("cuda", device.index or 0)
    elif device.type != "cpu":
        raise ArgumentError(f"workers run on 'cpu' or 'cuda:N', not on {str(device)!r}")
    return device


def _run_worker(worker: Worker, num_threads: int) -> None:
    try:
        torch.set_num_threads(num_threads)
        # backward stays on this thread, on GPUs too: its collectives belong to the worker
        torch.autograd.set_multithreading_enabled(False)
        if worker.device.type == "cuda":
            torch.cuda.set_device(worker.device)
            torch.cuda.set_stream(torch.cuda.Stream(worker.device))
        worker.run()
    finally:
        try:
            hooks.leave(worker)
        finally:
            worker.leave()


def _join_threads(
    threads: list[threading.Thread], timeout: float, retry: Sequence[Worker] = ()
) -> None:
    """Wait for threads to end; Ctrl-C is seen, because no join is longer than a tick."""
    deadline = time.monotonic() + timeout
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for thread in threads:
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
