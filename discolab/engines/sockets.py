"""Workers on several machines: nodes connect to the session over TCP, with the keys of a file.

Worker 0 is a thread of this process, the other workers of node 0 are processes of this machine,
and each other node is a process that was started on its machine (`discolab node`: node_agent.py)
and forks the workers there. All of them are reached over one port (connections/tcp.py).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..runtime.arguments import parse_device
from ..runtime.errors import ArgumentError, DiscoError
from ..transport.addresses import checked_endpoint, machine_id, split_endpoint
from . import node_agent
from .connections.tcp import TcpTransport
from .forkserver import ForkServer, like_here, the_fork_server
from .keys import default_file, load_keys
from .membership import Nodes
from .placement import check_world, place_workers
from .remote_session import HEARTBEAT, START_TIMEOUT, Progress, RemoteSession

_LOOK = 0.2  # seconds between two checks which nodes are missing


class SocketSession(RemoteSession):
    """A session on several nodes; this process is node 0, the others connect to it.

    Parameters
    ----------
    num_nodes, num_workers_per_node
        How many nodes there are, this one included, and how many workers each runs. What counts
        is how many workers the others bring together: launchers bring them one by one.
    num_groups, devices, timeout
        As for `ThreadedSession`; `devices` None: each node uses its own GPUs in turn.
    host, port
        Where nodes are awaited: an address of this machine that the others reach, or
        ``"0.0.0.0"`` for all; by default the loopback interface. Port 0: any that is free.
    key_file
        The keys of the session, None: the user's own (`keys.default_file`), made if they are not
        there. Every process that connects must have them.
    spawn_nodes
        Start the other nodes on this machine too, to try things out.
    heartbeat, start_timeout
        As for `ProcessSession`; the second counts from when all nodes are there, too.
    progress
        Called with a line of text on which nodes have joined and what is missing; None: they go to
        standard error. What is to be run on the other machines is printed.

    Raises
    ------
    ArgumentError
        If the numbers do not fit or a device is not there.
    DiscoError
        If the port is in use, the key file is not private, or the nodes do not come in time.

    Examples
    --------
    >>> with SocketSession(2, 1, spawn_nodes=True) as sess:  # doctest: +SKIP
    ...     ranks = sess.call_packed(sess.get_global_func("runtime.disco.worker_id"))
    ...     ranks.debug_get_from_all()
    [0, 1]
    """

    engine = "sockets"

    def __init__(
        self,
        num_nodes: int,
        num_workers_per_node: int,
        num_groups: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        devices: Any = None,
        key_file: str | os.PathLike[str] | None = None,
        spawn_nodes: bool = False,
        timeout: float | None = None,
        heartbeat: float = HEARTBEAT,
        start_timeout: float = START_TIMEOUT,
        progress: Progress | None = None,
        respawn: bool = False,
    ) -> None:
        here = _positive_integer(num_workers_per_node, "num_workers_per_node")
        self.num_nodes = _positive_integer(num_nodes, "num_nodes")
        num_workers, num_groups = check_world(num_nodes * here, num_groups)
        self._wanted, placed = _devices(num_workers, here, devices)
        self._here, self._spawn = here, bool(spawn_nodes)
        self._key_file = default_file() if key_file is None else Path(key_file).expanduser()
        self._keys = load_keys(self._key_file)
        self._host = host
        self._transport = transport = TcpTransport(checked_endpoint(host, port), self._keys)
        self._nodes = Nodes(transport, here, num_workers - here, here)
        try:
            super().__init__(
                num_workers,
                num_groups,
                placed,
                transport,
                self._nodes,
                timeout=timeout,
                heartbeat=heartbeat,
                start_timeout=start_timeout,
                progress=progress or _print_line,
                respawn=respawn,
            )
        except BaseException:
            transport.close()
            raise
        self._begin()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which nodes connect."""
        host, port = split_endpoint(self._transport.endpoint)
        if host in ("0.0.0.0", "::"):
            import socket

            host = socket.gethostname()
        return host, port

    @property
    def command(self) -> str:
        """What to run on each other machine."""
        host, port = self.address
        name = f"[{host}]" if ":" in host else host
        arguments = ["discolab", "node", "--connect", f"tcp://{name}:{port}"]
        arguments += ["--key-file", str(self._key_file), "--workers", str(self._here)]
        return shlex.join(arguments)

    # -- starting ----------------------------------------------------------------------------

    def _start_processes(self) -> None:
        if self._here > 1 or self._spawn:
            the_fork_server()  # it imports meanwhile
        if self._spawn and self.num_nodes > 1:
            server = self._ready_fork_server()
            for number in range(1, self.num_nodes):
                self._spawn_node(server, number)
        self._await_nodes()
        self._place()
        common = self._settings(token=self._transport.token.hex())
        self._nodes.welcome(common, self._device_names, self._threads)
        if self._here > 1:
            server = self._ready_fork_server()
            for rank in range(1, self._here):
                self._start_worker(server, rank, common)

    def _start_another(self, rank: int) -> None:
        if not self._nodes.start_another(rank):
            common = self._settings(token=self._transport.token.hex())
            self._start_worker(self._ready_fork_server(), rank, common)

    def _kill_process(self, rank: int) -> None:
        self._nodes.kill(rank)

    def _spawn_node(self, server: ForkServer, number: int) -> None:
        settings = {
            "run": f"{node_agent.__name__}:{node_agent.run_forked.__name__}",
            "node": {
                "connect": self._endpoint_here(),
                "keys": self._keys.as_dict(),
                "rank": number,
                "workers": self._here,
            },
            **like_here(),
        }
        process = self._nodes.children.start(server, -number, settings)
        self._transport.watch_process(process, self._nodes.child_ended)

    def _start_worker(self, server: ForkServer, rank: int, common: dict[str, Any]) -> None:
        text, theirs = os.pipe()
        settings = {
            **common,
            **like_here(),
            "connect": self._endpoint_here(),
            "keys": self._keys.as_dict(),
            "rank": rank,
            "local_rank": rank,
            "device": self._device_names[rank],
            "threads": self._threads[machine_id()],
            "host": self._local_host(),
        }
        self._transport.watch_text(rank, text)
        try:
            process = self._nodes.children.start(server, rank, settings, theirs)
            self._transport.watch_process(process, self._nodes.child_ended)
        finally:
            os.close(theirs)

    def _endpoint_here(self) -> str:
        """Where this machine's own processes connect."""
        return self._transport.endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace(
            "[::]", "[::1]"
        )

    def _await_nodes(self) -> None:
        nodes = self._nodes
        deadline = time.monotonic() + self._start_timeout
        if not (nodes.complete or self._spawn):
            print(f"On the other machines run: {self.command}", flush=True)
        while not nodes.complete:
            self._check_spawned()
            nodes.show_refusals()
            missing, here = nodes.missing()
            if missing and time.monotonic() > deadline:
                why = "".join(f"\n    refused: {refusal}" for refusal in nodes.refused()[-8:])
                raise DiscoError(
                    f"{missing} of {self.num_workers} workers did not come within "
                    f"{self._start_timeout:g} s (start_timeout=); joined: {here}. On the other "
                    f"machines run: {self.command}{why}"
                )
            if missing and not self._spawn:
                self._say(f"waiting for {missing} of {self.num_workers} workers; joined: {here}")
            self._connections.wait_until(lambda: nodes.complete, _LOOK)

    def _check_spawned(self) -> None:
        children = self._nodes.children
        ended = [number for number in children.codes if number < 0]
        if ended and self._spawn:
            raise DiscoError(
                f"node {-ended[0]}, started on this machine, {children.exit_reason(ended[0])}; "
                "what it wrote is in the terminal of the session's process"
            )

    def _place(self) -> None:
        """Settle each worker's machine, device and share of it; all nodes are there."""
        names = [str(device) for device in self._devices]
        self.hosts = [machine_id()] * self._here
        self._threads = {machine_id(): torch.get_num_threads()}
        for member in self._nodes.members():
            self.hosts += [member.machine] * member.workers
            self._threads.setdefault(member.machine, member.cores)
            if self._wanted is None:
                names[member.ranks.start : member.ranks.stop] = member.device_names(None)
        for name in self._threads:
            self._threads[name] = max(1, self._threads[name] // self.hosts.count(name))
        self._device_names = names
        self._devices = tuple(torch.device(name) for name in names)
        self._connections.hosts = self.hosts
        link = self._local.workers[0].link
        assert link is not None
        link.host = self._local_host()

    def _local_host(self) -> str:
        """Where this machine's workers are reached: as the first node has reached it."""
        reached = [member.reached for member in self._nodes.members()]
        return reached[0] if reached else "127.0.0.1"

    def _workers_here(self) -> int:
        return self.hosts.count(machine_id())


def make_socket_session(
    num_workers: int,
    num_groups: int = 1,
    devices: Any = None,
    *,
    nodes: int | str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key_file: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    heartbeat: float = HEARTBEAT,
    start_timeout: float = START_TIMEOUT,
    progress: Progress | None = None,
    respawn: bool = False,
) -> SocketSession:
    """A `SocketSession` by the number of all workers.

    Parameters
    ----------
    nodes
        How many nodes, this one included: ``2`` or ``"2"``; ``"local:2"`` starts the others on
        this machine, to try things out.
    others
        As for `SocketSession`.

    Raises
    ------
    ArgumentError
        If the workers can't be divided over the nodes.
    """
    count, spawn = nodes, False
    if isinstance(nodes, str):
        name, _, number = nodes.rpartition(":")
        spawn = name == "local"
        count = int(number) if number.isdigit() and name in ("", "local") else None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        given = "" if nodes is None else f", got {nodes!r}"
        raise ArgumentError(
            "on how many nodes, this one included? nodes=2 waits for another one to connect, "
            f"nodes='local:2' starts it on this machine{given}"
        )
    check_world(num_workers, 1)
    if num_workers % count:
        raise ArgumentError(f"{num_workers} workers can't be divided equally over {count} nodes")
    return SocketSession(
        count,
        num_workers // count,
        num_groups,
        host,
        port,
        devices=devices,
        key_file=key_file,
        spawn_nodes=spawn,
        timeout=timeout,
        heartbeat=heartbeat,
        start_timeout=start_timeout,
        progress=progress,
        respawn=respawn,
    )


def _positive_integer(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{name} must be a positive integer, got {value!r}")
    return value


def _devices(num_workers: int, here: int, wanted: Any) -> tuple[Any, list[torch.device]]:
    """What the session wants for all, and the devices by rank; of nodes to come not yet known."""
    if wanted is None or isinstance(wanted, str | torch.device):
        own = place_workers(here, wanted)
        rest = torch.device("cpu") if wanted is None else own[0]
        return wanted, own + [rest] * (num_workers - here)
    names = list(wanted)
    if len(names) != num_workers:
        place_workers(num_workers, names)  # raises
    others = [parse_device(name) for name in names[here:]]
    return names, place_workers(here, names[:here]) + [d or torch.device("cpu") for d in others]


def _print_line(text: str) -> None:
    if text:
        sys.stderr.write(f"{text}\n")
