"""Workers as threads of this process: the session for a laptop and for one server's GPUs.

Each worker is one daemon thread with its own device and, on CUDA, its own stream; what they have in
common with other engines' worker 0 is in worker_threads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime.channel import ThreadChannel
from ..runtime.functions import find_func
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from ..runtime.worker import Worker
from .placement import check_world, place_workers
from .worker_threads import LocalWorkers


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
        num_workers, num_groups = check_world(num_workers, num_groups)
        placed = place_workers(num_workers, devices)
        channels = [ThreadChannel() for _ in range(num_workers)]
        host_data: dict[int, torch.Tensor] = {}
        super().__init__(channels, num_groups, placed, host_data, timeout)
        self._local = LocalWorkers(channels, num_workers, num_groups, placed, host_data)
        self._workers, self._threads = self._local.workers, self._local.threads
        self._local.start(self, max(1, torch.get_num_threads() // num_workers))

    def status(self) -> list[WorkerStatus]:
        """What each worker does now; never waits."""
        return self._local.status()

    def workers_here(self) -> Mapping[int, Worker]:
        """All of them."""
        return {worker.worker_id: worker for worker in self._workers}

    def _check_name(self, name: str) -> None:
        find_func(name)

    def _interrupt_workers(self) -> None:
        self._local.interrupt()

    def _retry_interrupt(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._workers[rank].retry_interrupt()

    def _dead(self) -> list[int]:
        return self._local.dead()

    def _join(self, timeout: float) -> list[int]:
        return self._local.join(timeout)
