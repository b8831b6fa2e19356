"""Workers as processes of this machine, each with its own GIL and device; worker 0 stays here.

A fork server forks them (forkserver.py), and pairs of sockets that nobody else can connect to lead
to them (connections/socket_pairs.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ..runtime.errors import DiscoError
from ..transport.unix_sockets import HAVE_LOCAL, socket_pair
from .child_processes import Children
from .connections.controller_side import WorkerConnections
from .connections.socket_pairs import LocalTransport
from .forkserver import ForkServer, like_here
from .heartbeat import process_state
from .placement import check_world, place_workers
from .remote_session import HEARTBEAT, START_TIMEOUT, Progress, RemoteSession


class ProcessSession(RemoteSession):
    """A session whose workers are processes of this machine, but for worker 0.

    Parameters
    ----------
    num_workers, num_groups, devices, timeout
        As for `ThreadedSession`.
    heartbeat
        Seconds of silence after which a worker that is shown not to run is taken for frozen.
    start_timeout
        Seconds that starting may take.
    progress
        Called with a line of text now and then while starting takes long.
    respawn
        Whether a worker that dies is replaced at once, as by `restart_worker`.

    Raises
    ------
    ArgumentError
        If the numbers do not fit or a device is not there.
    DiscoError
        If a worker could not start; none is left running then.

    Examples
    --------
    >>> with ProcessSession(2) as sess:
    ...     ranks = sess.call_packed(sess.get_global_func("runtime.disco.worker_id"))
    ...     ranks.debug_get_from_all()
    [0, 1]
    """

    engine = "processes"

    def __init__(
        self,
        num_workers: int,
        num_groups: int = 1,
        devices: Any = None,
        *,
        timeout: float | None = None,
        heartbeat: float = HEARTBEAT,
        start_timeout: float = START_TIMEOUT,
        progress: Progress | None = None,
        respawn: bool = False,
    ) -> None:
        num_workers, num_groups = check_world(num_workers, num_groups)
        placed = place_workers(num_workers, devices)
        if not HAVE_LOCAL:
            raise DiscoError(
                "the engine 'processes' needs Linux; here use 'threads', or 'sockets' with a node "
                "on this machine"
            )
        self._transport = LocalTransport()
        self._children = Children()
        super().__init__(
            num_workers,
            num_groups,
            placed,
            self._transport,
            _Processes(self._children),
            timeout=timeout,
            heartbeat=heartbeat,
            start_timeout=start_timeout,
            progress=progress,
            respawn=respawn,
        )
        self._begin()

    def _start_processes(self) -> None:
        if self.num_workers == 1:
            return
        server, like = self._ready_fork_server(), like_here()
        for rank in range(1, self.num_workers):
            self._start_process(server, rank, self._settings_of(rank, like))

    def _start_another(self, rank: int) -> None:
        self._start_process(self._ready_fork_server(), rank, self._settings_of(rank, like_here()))

    def _kill_process(self, rank: int) -> None:
        self._children.kill(rank)

    def _settings_of(self, rank: int, like: dict[str, Any]) -> dict[str, Any]:
        return self._settings(
            threads=max(1, torch.get_num_threads() // self.num_workers),
            **like,
            rank=rank,
            local_rank=rank,
            device=str(self._devices[rank]),
        )

    def _start_process(self, server: ForkServer, rank: int, settings: dict[str, Any]) -> None:
        (commands, their_commands), (control, their_control) = socket_pair(), socket_pair()
        text, their_text = os.pipe()
        try:
            fds = their_commands.fileno(), their_control.fileno()
            process = self._children.start(
                server, rank, settings, their_text, fds, self._start_timeout
            )
            self._transport.add(rank, commands, control, text, process)
        finally:
            their_commands.close()
            their_control.close()
            os.close(their_text)
            if rank not in self._transport:  # a Ctrl-C may come right after it took them over
                commands.close()
                control.close()
                os.close(text)


class _Processes:
    """See `WorkerProcesses`."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self.connections: WorkerConnections

    def exit_reason(self, rank: int) -> str:
        """See `WorkerProcesses`; what the worker has not sent is shown first."""
        children, connections = self._children, self.connections
        if rank in children.pids:
            connections.channels[rank].knows_done(children.commands_done(rank))
            connections.put_out(rank, children.last_output(rank))
            children.await_end(rank)
        return f"{self.where(rank)} {children.exit_reason(rank)}"

    def where(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        return f"(pid {self._children.pids.get(rank)})"

    def pid_here(self, rank: int) -> int | None:
        """See `WorkerProcesses`."""
        return self._children.pids.get(rank)

    def activity(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        return process_state(self.pid_here(rank))

    def cut_off(self, rank: int) -> str:
        """See `WorkerProcesses`: they are on this machine."""
        return ""

    def end(self, wait: bool = True) -> None:
        """See `WorkerProcesses`."""
        self._children.end()
