"""Gloo: torch's collectives for CPU tensors, over sockets."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime.worker import Worker
from ..call import Call
from ..rendezvous.conductor import ProcessGroup
from . import steps, wire
from .process_groups import STEP_SECONDS, ProcessGroupBackend, await_all, start

LOOPBACK = "127.0.0.1"


class GlooBackend(ProcessGroupBackend):
    """Collectives of CPU tensors by Gloo, between workers of one address space."""

    name = "gloo"
    ops = wire.ARITHMETIC | wire.BITWISE

    def _reaches(self, call: Call) -> bool:
        return not call.on_gpu

    def _files(self, members: int) -> int:
        return members * (members - 1)  # both ends of a socket for every pair

    def _connect(self, store: Any, place: int, size: int, worker: Worker) -> ProcessGroup:
        return connect(store, place, size, LOOPBACK)

    def _perform(self, worker: Worker, end: ProcessGroup, step: steps.Step) -> None:
        await_all(start(end, step))


def connect(store: Any, place: int, size: int, host: str) -> ProcessGroup:
    """One member's process group. Waits for the other members, who make theirs."""
    library: Any = c10d.ProcessGroupGloo
    options = library._Options()
    options._devices = [_device(host, os.getpid())]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    options._threads = 1
    return library(store, place, size, options)


@functools.cache
def _device(host: str, _pid: int) -> Any:
    """The interface over which the members reach this one. One for each process."""
    return c10d.ProcessGroupGloo.create_device(hostname=host)


def obstacle() -> str:
    """Why Gloo can't be used, "" if it can."""
    if torch.distributed.is_gloo_available():
        return ""
    return f"this torch ({torch.__version__}) was built without Gloo; use 'local'"
