"""Socket sessions by the number of all their workers, as `make_session` and magics ask for them."""

from __future__ import annotations

import os
from typing import Any

from ...runtime.errors import ArgumentError
from ..placement import check_world
from ..remote.session import HEARTBEAT, START_TIMEOUT, Progress
from ..sockets import SocketSession


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
    )
