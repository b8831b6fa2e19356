"""Gloo: torch's collectives for CPU tensors, over sockets."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime.interrupts import plain_lock
from ...runtime.worker import Worker
from ..call import Call
from ..rendezvous.conductor import ProcessGroup
from . import encoding, steps
from .process_groups import STEP_SECONDS, ProcessGroupBackend, await_all, start

LOOPBACK = "127.0.0.1"


class GlooBackend(ProcessGroupBackend):
    """Collectives of CPU tensors by Gloo, between workers of one address space."""

    name = "gloo"
    ops = encoding.ALL_OPS

    def _reaches(self, call: Call) -> bool:
        return not call.on_gpu

    def _files(self, members: int) -> int:
        return members * (members - 1)  # both ends of a socket for every pair

    def _connect(self, store: Any, place: int, size: int, worker: Worker) -> ProcessGroup:
        return connect(store, place, size, LOOPBACK)

    def _perform(self, worker: Worker, end: ProcessGroup, step: steps.Step) -> None:
        await_all(start(end, step))


def connect(store: Any, place: int, size: int, host: str) -> ProcessGroup:
    """One member's process group. Waits for the other members, which make theirs."""
    library: Any = c10d.ProcessGroupGloo
    options = library._Options()
    device = _device(host, os.getpid())
    options._devices = [device]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    options._threads = 1
    made: ProcessGroup = library(store, place, size, options)
    _device_of[made] = device
    return made


# A device listens on a port, to which anybody on the machine can connect: it goes with the last
# process group that uses it. `_lock` guards the making of one.
_lock = plain_lock()
_devices: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
_device_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _device(host: str, pid: int) -> Any:
    """The interface over which the members reach this one. One for each process."""
    with _lock:
        device = _devices.get((host, pid))
        if device is None:
            made = c10d.ProcessGroupGloo.create_device(hostname=host)
            device = _devices[host, pid] = made
        return device


def obstacle() -> str:
    """Why Gloo can't be used, "" if it can."""
    if torch.distributed.is_gloo_available():
        return ""
    return f"this torch ({torch.__version__}) was built without Gloo; use 'local'"
