"""Which library the accelerators of this process have for collectives: NCCL for CUDA, one for each.

torch names it, and has the class of its process group or that of whoever registered it. No state.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...runtime import accelerators

_NCCL, _GLOO = "nccl", "gloo"


def library_name() -> str:
    """What torch calls the library of this process's accelerators; NCCL where there are none."""
    found = dist.Backend.default_device_backend_map.get(accelerators.kind() or "cuda")
    return _NCCL if found in (None, _GLOO) else str(found)


def is_available() -> bool:
    """Whether this torch has that library."""
    name = library_name()
    return _class_of(name) is not None or name.upper() in dist.Backend._plugins


def has_library(device: torch.device) -> bool:
    """Whether a device is of the type that `library_name` is for."""
    return dist.Backend.default_device_backend_map.get(device.type) == library_name()


def make(store: Any, place: int, size: int, timeout: timedelta) -> Any:
    """One member's process group of that library."""
    name = library_name()
    torchs = _class_of(name)
    if torchs is not None:
        options = torchs.Options()
        options._timeout = timeout
        return torchs(store, place, size, options)
    plugin: Any = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, place, size, timeout)
    asked: Any = c10d._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size = store, place, size
    asked.timeout, asked.group_id, asked.global_ranks_in_group = timeout, "", []
    return plugin.creator_fn(asked, None)


def _class_of(name: str) -> Any:
    return getattr(c10d, f"ProcessGroup{name.upper()}", None)
