"""The environment variables that tell a program of torchrun who it is, for each worker its own.

``os.environ`` gets another class while worker threads live. On a worker, RANK and its like are
read from and written to that worker's own dict; all other names are the process's, as ever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

from ...runtime.worker import Worker, current_worker_or_none
from ..choose import has_hub

_WORLDS = "discolab.ccl.distributed.environ"
_PORT = "discolab.ccl.distributed.port"


def variables_of(worker: Worker) -> dict[str, str]:
    """What torchrun would set for a process of this rank; made once for each worker."""
    everybody = worker.shared.setdefault(_WORLDS, {})
    found: dict[str, str] | None = everybody.get(worker.worker_id)
    if found is None:
        rank, size = str(worker.worker_id), str(worker.num_workers)
        port, local_size, machine, machines = _place(worker)
        found = {
            "RANK": rank, "LOCAL_RANK": str(worker.local_worker_id), "ROLE_RANK": rank,
            "ROLE_NAME": "default", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": str(local_size),
            "ROLE_WORLD_SIZE": size, "GROUP_RANK": str(machine), "GROUP_WORLD_SIZE": str(machines),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "discolab",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        }  # fmt: skip
        found = everybody.setdefault(worker.worker_id, found)
    return found


def _place(worker: Worker) -> tuple[int, int, int, int]:
    """A port, the same for all workers; how many are on this machine, which it is, of how many."""
    if has_hub(worker):
        from ..remote.spoke import spoke_of

        port, local_size, machine, machines = spoke_of(worker).ask("hello")
        return port, local_size, machine, machines
    return _port(worker), len(worker.peers), 0, 1


def _port(worker: Worker) -> int:
    """A port that was free when the session first asked; nothing listens there."""
    port: int | None = worker.shared.get(_PORT)
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = worker.shared.setdefault(_PORT, probe.getsockname()[1])
    return port


def _own() -> dict[str, str]:
    """The variables of the worker on whose thread this runs; empty elsewhere."""
    worker = current_worker_or_none()
    return {} if worker is None else variables_of(worker)


_NAMES = frozenset({
    "RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
})  # fmt: skip

_Environ: type[Any] = type(os.environ)


class WorkerEnviron(_Environ):  # type: ignore[misc] # the base is a variable
    """``os.environ`` in which some names are the calling worker's own."""

    def __getitem__(self, key: str) -> str:
        if key in _NAMES and current_worker_or_none() is not None:
            return _own()[key]
        return str(super().__getitem__(key))

    def __setitem__(self, key: str, value: str) -> None:
        if key in _NAMES and current_worker_or_none() is not None:
            if not isinstance(value, str):
                raise TypeError(f"str expected, not {type(value).__name__}")
            _own()[key] = value
        else:
            super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        if key in _NAMES and current_worker_or_none() is not None:
            del _own()[key]
        else:
            super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        if current_worker_or_none() is None:
            yield from super().__iter__()
        else:
            yield from _own()
            yield from (key for key in super().__iter__() if key not in _NAMES)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def install() -> None:
    """Have workers see their own variables."""
    if type(os.environ) is _Environ:
        os.environ.__class__ = WorkerEnviron


def uninstall() -> None:
    """Give ``os.environ`` its class back; what others made of it since is left alone."""
    if type(os.environ) is WorkerEnviron:
        os.environ.__class__ = _Environ
