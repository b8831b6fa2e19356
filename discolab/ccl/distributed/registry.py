"""torch's C++ registry of process groups by name: one for each thread while workers live.

Functional collectives look a group up there by its name, and workers have different groups of the
same name. torch has one registry for the process and, in its mode of isolated threads, one for
each thread. The groups of threads that are no workers, as of a main thread that is a process of
torchrun too, are carried over when the mode changes, and to a thread that asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d

from ...isolation.patches import Patches
from ...runtime.worker import current_worker_or_none

c10d: Any = torch.distributed.distributed_c10d  # its private names have no types
_native: Any = torch._C._distributed_c10d


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


def carry_over(torchs: Any) -> None:
    """Have the registry in use here hold the groups that are not of workers."""
    for group, name in tuple(torchs.pg_names.items()):
        try:
            if _native._resolve_process_group(name) is group:
                continue
        except RuntimeError:  # not there, or no more
            pass
        _native._unregister_process_group(name)
        _native._register_process_group(name, group)


def _anew(register: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """In an earlier session another thread may have destroyed a group that had this name."""

    def register_anew(name: str, group: Any) -> None:
        if current_worker_or_none() is None:
            _native._unregister_process_group(name)
        register(name, group)

    return register_anew
