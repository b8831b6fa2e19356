"""Workers as threads of this process: the session for a laptop and for one server's GPUs.

Each worker is one daemon thread with its own device; on CUDA it uses the device's default stream,
as the notebook does. What they have in common with other engines' worker 0 is in worker_threads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..runtime.actions import Command, DiscoAction
from ..runtime.channel import ThreadChannel, Ticket
from ..runtime.failures import Failure
from ..runtime.functions import find_func
from ..runtime.restart import at_replaced
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from ..runtime.worker import Worker
from .placement import check_world, place_workers
from .worker_threads import LocalWorkers

_COPIES = (DiscoAction.COPY_FROM_WORKER0, DiscoAction.COPY_TO_WORKER0)


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
        # of a worker that takes the place of another one: its channel, and what is kept for it
        self._next: tuple[ThreadChannel, list[Command]] = ThreadChannel(), []
        self._failure: Failure | None = None  # what the lost one's questions are answered with
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

    # -- one worker started afresh; see runtime/restart.py -------------------------------------

    def _check_replaceable(self, rank: int) -> None:
        pass

    def _take_down(self, rank: int) -> str:
        return self._local.take_down(rank)

    def _answer_for(self, rank: int, failure: Failure) -> None:
        with self._lock:
            channel = self._channels[rank]
            assert isinstance(channel, ThreadChannel)
            commands = channel.drain()
            kept: list[Command] = []
            self._next = ThreadChannel(), kept
            self._replace_send(rank, kept.append)
        self._failure = failure
        for command in commands:
            self._answer(rank, command, failure)

    def _answer(self, rank: int, command: Command, failure: Failure) -> None:
        """Answer a command that a worker will never execute, if it wants an answer."""
        ticket = command[-1]
        if isinstance(ticket, Ticket):
            ticket.deliver(rank, ticket.of_lost(failure))
        elif command[0] in _COPIES and rank == 0:
            self._worker_zero_data.pop(command[2], None)

    def _prepare(self, rank: int) -> None:
        """Nothing: a thread is there at once."""

    def _not_replaced(self, rank: int) -> None:
        """Nothing can go wrong."""

    def _admit(self, rank: int, position: int) -> None:
        channel, kept = self._next
        assert self._failure is not None
        for command in kept:
            self._answer(rank, command, self._failure)
        kept.clear()
        channels = list(self._channels)
        channels[rank] = channel
        self._channels = tuple(channels)
        worker = self._local.make_another(rank, channel)
        worker.executed = worker.joined_at = position
        for replaced in at_replaced:
            replaced(worker)

    def _let_in(self, rank: int, first: Sequence[Command]) -> None:
        channel, kept = self._next
        for command in (*first, *kept):
            channel.send(command)
        self._replace_send(rank, channel.send)
        self._local.start_another(self, rank)

    def _replace_send(self, rank: int, send: Callable[[Command], None]) -> None:
        sends = list(self._sends)
        sends[rank] = send
        self._sends = tuple(sends)
        self._send_by(self._sends)

    def _for_new_worker(self) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
        return []
