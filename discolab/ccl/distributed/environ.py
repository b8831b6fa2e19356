"""Environment variables: each worker has its own, with those that torchrun sets.

``os.environ`` gets another class while worker threads live. A worker reads what it has written or
deleted there, then RANK and its like, then the process's variables; processes that it starts get
the same. C code (`getenv`) sees the process's: what a worker writes is put there too, so the value
of the last writer, until that worker ends.

A worker that has a process for itself writes to the process's, but for RANK and its like: they are
asked of the session when a program first looks, and are put into the process's when it runs a
script (`publish`).
"""

from __future__ import annotations

import _posixsubprocess
import functools
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ...isolation import table
from ...isolation.imports import is_importing
from ...isolation.patches import Patches
from ...isolation.table import Row, Treatment
from ...runtime.worker import Worker, current_worker_or_none, has_own_process
from ..rendezvous.client import client_of, has_coordinator

_WORLDS = "discolab.ccl.distributed.environ"
_PORT = "discolab.ccl.distributed.port"
_OF_TORCHRUN = frozenset([
    "RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "OMP_NUM_THREADS",
])  # fmt: skip


def variables_of(worker: Worker) -> dict[str, str]:
    """What torchrun would set for a process of this rank; made once for each worker."""
    everybody = worker.shared.setdefault(_WORLDS, {})
    found: dict[str, str] | None = everybody.get(worker.worker_id)
    if found is None:
        rank, size = str(worker.worker_id), str(worker.num_workers)
        port, local_size, machine, machines = _place(worker)
        found = {
            "RANK": rank, "LOCAL_RANK": str(worker.local_worker_id), "ROLE_RANK": rank,
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": str(local_size),
            "ROLE_WORLD_SIZE": size, "GROUP_RANK": str(machine), "GROUP_WORLD_SIZE": str(machines),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": f"discolab-{port}",
        }  # fmt: skip
        if not _is_set("OMP_NUM_THREADS"):
            found["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        found = everybody.setdefault(worker.worker_id, found)
    return found


def _place(worker: Worker) -> tuple[int, int, int, int]:
    """A port, the same for all workers; how many are on this machine, which it is, of how many."""
    if has_coordinator(worker):
        port, local_size, machine, machines = client_of(worker).ask("hello")
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


_Environ: type[Any] = type(os.environ)
_OVER = "os.environ"  # in `Worker.process_state`
_read = _Environ.__getitem__


def _is_set(name: str) -> bool:
    """Whether the process has a variable."""
    try:
        _read(os.environ, name)
    except KeyError:
        return False
    return True


def _written(worker: Worker) -> dict[str, str | None]:
    """What a worker has written in place of the process's variables; None: deleted."""
    found: dict[str, str | None] | None = worker.process_state.get(_OVER)
    if found is None:
        found = worker.process_state.setdefault(_OVER, {})
    return found


def seen_by(worker: Worker) -> dict[str, str | None]:
    """What differs for a worker from the process's variables; None: it has no such one."""
    return {**variables_of(worker), **_written(worker)}


def publish(worker: Worker) -> None:
    """Put a worker's variables into its process's own, which C code and new processes see."""
    if has_own_process(worker):
        for name, value in seen_by(worker).items():
            if value is not None:
                os.putenv(name, value)


def _writes_own(worker: Worker, name: str) -> bool:
    """Whether a variable is the worker's own, and not one that a module sets as it is imported."""
    if name in _OF_TORCHRUN or name in _written(worker):
        return True
    return not (has_own_process(worker) or is_importing())


class WorkerEnviron(_Environ):  # type: ignore[misc] # the base is a variable
    """``os.environ`` of which each worker has its own."""

    def __getitem__(self, key: str) -> str:
        worker = current_worker_or_none()
        if worker is not None:
            own: Mapping[str, str | None] | None = worker.process_state.get(_OVER)
            if own is not None and key in own:
                value = own[key]
                if value is None:
                    raise KeyError(key)
                return value
            if key in _OF_TORCHRUN:  # the session is asked for no other variable
                torchruns = variables_of(worker)
                if key in torchruns:
                    return torchruns[key]
        found: str = _read(self, key)
        return found

    def __setitem__(self, key: str, value: str) -> None:
        worker = current_worker_or_none()
        if worker is None or not _writes_own(worker, key):
            super().__setitem__(key, value)
            return
        os.putenv(self.encodekey(key), self.encodevalue(value))  # checks their types too
        _written(worker)[key] = value

    def __delitem__(self, key: str) -> None:
        worker = current_worker_or_none()
        if worker is None or not _writes_own(worker, key):
            super().__delitem__(key)
            return
        self[key]  # there is one
        os.unsetenv(self.encodekey(key))
        _written(worker)[key] = None

    def __iter__(self) -> Iterator[str]:
        worker = current_worker_or_none()
        own = {} if worker is None else seen_by(worker)
        yield from (key for key, value in own.copy().items() if value is not None)
        yield from (key for key in super().__iter__() if key not in own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _EnvironInBytes(MutableMapping[bytes, bytes]):
    """``os.environb``: what ``os.environ`` gives the worker that asks."""

    def __getitem__(self, key: bytes) -> bytes:
        return os.fsencode(os.environ[os.fsdecode(key)])

    def __setitem__(self, key: bytes, value: bytes) -> None:
        os.environ[os.fsdecode(key)] = os.fsdecode(value)

    def __delitem__(self, key: bytes) -> None:
        del os.environ[os.fsdecode(key)]

    def __iter__(self) -> Iterator[bytes]:
        return map(os.fsencode, os.environ)

    def __len__(self) -> int:
        return len(os.environ)


def _system_over(system: Callable[[str], int]) -> Callable[[str], int]:
    """The shell that a worker starts gets the variables that the worker sees."""

    @functools.wraps(system)
    def system_of_worker(command: str) -> int:
        if current_worker_or_none() is None:
            return system(command)
        code = subprocess.run(command, shell=True, check=False).returncode
        return code << 8 if code >= 0 else -code  # as a wait status

    return system_of_worker


def _leave(worker: Worker) -> None:
    """C code sees the process's own again."""
    if has_own_process(worker):
        return
    for name in worker.process_state.pop(_OVER, ()):
        if _is_set(name):
            os.putenv(name, _read(os.environ, name))
        else:
            os.unsetenv(name)


def _fork_exec_over(fork_exec: Callable[..., int]) -> Callable[..., int]:
    """A program that a worker starts gets the variables that the worker sees."""

    def fork_exec_of_worker(*args: Any) -> int:
        if current_worker_or_none() is not None and args[5] is None:
            own = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
            args = (*args[:5], own, *args[6:])
        return fork_exec(*args)

    return fork_exec_of_worker


def _spawn_over(spawn: Callable[..., int]) -> Callable[..., int]:
    """The same for what `subprocess` starts by its whole path, from Python 3.13 on."""

    @functools.wraps(spawn)
    def spawn_of_worker(path: Any, args: Any, env: Any, /, **settings: Any) -> int:
        if current_worker_or_none() is not None and env is None:
            env = dict(os.environ)
        return spawn(path, args, env, **settings)

    return spawn_of_worker


def _install(patches: Patches) -> None:
    if type(os.environ) is _Environ:
        os.environ.__class__ = WorkerEnviron
    patches.at_undo(_put_back)
    patches.replace(_posixsubprocess, "fork_exec", _fork_exec_over)  # of multiprocessing's spawn
    patches.replace(subprocess, "_fork_exec", _fork_exec_over)
    patches.replace(os, "system", _system_over)
    for name in ("posix_spawn", "posix_spawnp"):
        if hasattr(os, name):
            patches.replace(os, name, _spawn_over)
    if hasattr(os, "environb"):
        patches.replace(os, "environb", lambda _: _EnvironInBytes())


def _put_back() -> None:
    """Give ``os.environ`` its class back; what others made of it since is left alone."""
    if type(os.environ) is WorkerEnviron:
        os.environ.__class__ = _Environ


table.add(
    Row(
        state="`os.environ`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker has the variables that torchrun sets, and what it writes to `os.environ` "
        "is its own and that of the processes it starts. C code sees the value written last, by "
        "whichever worker; `os.putenv` writes it too.",
        test="tests/isolation/test_process_state.py::test_each_worker_has_environment_variables",
        install=_install,
        leave=_leave,
        in_own_process=True,  # which rank it is, the session says after the process has begun
        library="Python",
    )
)
