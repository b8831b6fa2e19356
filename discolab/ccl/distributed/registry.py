"""torch's C++ registry of process groups by name: one for each thread while workers live.

Functional collectives look a group up there by its name, and workers have different groups of the
same name. torch has one registry for the process and, in its mode of isolated threads, one for
each thread. The groups of threads that are no workers, as of a main thread that is a process of
torchrun too, are carried over when the mode changes, and to a thread that asks for them. A thread
that works for a worker gets that worker's groups when it looks them up in Python.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d
from torch.distributed import device_mesh

from ...isolation.patches import Patches
from ...runtime.worker import current_worker_or_none

c10d: Any = torch.distributed.distributed_c10d  # its private names have no types
_native: Any = torch._C._distributed_c10d
_resolve = _native._resolve_process_group


def isolate(patches: Patches) -> None:
    """Have torch look groups up for each thread, until `patches` are undone."""
    torchs = c10d._world
    before = set(torchs.pg_names.values())
    _native._set_thread_isolation_mode(True)
    carry_over(torchs)

    def join() -> None:
        _native._set_thread_isolation_mode(False)
        for name in before.difference(torchs.pg_names.values()):  # destroyed since
            _native._unregister_process_group(name)
        carry_over(torchs)

    patches.at_undo(join)
    patches.replace(c10d, "_register_process_group", _anew)
    for owner in (_native, c10d, device_mesh):
        patches.replace(owner, "_resolve_process_group", resolve_over)


def carry_over(torchs: Any) -> None:
    """Have the registry in use here hold the groups that are not of workers."""
    for group, name in torchs.pg_names.copy().items():
        try:
            if _resolve(name) is group:
                continue
        except RuntimeError:  # not there, or no more
            pass
        _native._unregister_process_group(name)
        _native._register_process_group(name, group)


def resolve_over(resolve: Callable[[str], Any]) -> Callable[[str], Any]:
    """torch's function, with the groups of the worker for which a thread works."""
    if resolve is not _resolve:
        return resolve  # somebody else's

    @functools.wraps(resolve)
    def resolve_here(name: str) -> Any:
        worker = current_worker_or_none()
        if worker is not None and worker.thread_id != threading.get_ident():
            _bring(name)
        return resolve(name)

    return resolve_here


def _bring(name: str) -> None:
    """Have the registry of a thread that works for a worker hold the worker's group."""
    held = c10d._world.pg_names.copy().items()
    group = next((group for group, of in held if of == name), None)
    try:
        if _resolve(name) is group:
            return
    except RuntimeError:  # not there, or no more
        pass
    _native._unregister_process_group(name)  # an older one, or that of another worker
    if group is not None:
        _native._register_process_group(name, group)


def _anew(register: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """In an earlier session another thread may have destroyed a group that had this name."""

    def register_anew(name: str, group: Any) -> None:
        if current_worker_or_none() is None:
            _native._unregister_process_group(name)
        register(name, group)

    return register_anew
