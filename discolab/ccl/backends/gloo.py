"""Gloo: torch's collectives for CPU tensors, over sockets of this machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...runtime.worker import Worker
from ..board.rendezvous import Contribution, PendingCollective
from ..call import Call
from ..groups import Group
from . import steps, wire
from .connections import ProcessGroup
from .process_groups import STEP_SECONDS, ProcessGroupBackend, start


class GlooBackend(ProcessGroupBackend):
    """Collectives of CPU tensors by Gloo."""

    name = "gloo"
    ops = wire.ARITHMETIC | wire.BITWISE

    def _reaches(self, call: Call) -> bool:
        return not call.on_gpu

    def _files(self, count: int) -> int:
        return count * (count - 1)  # both ends of a socket for every pair

    def _make(self, store: c10d.Store, place: int, worker: Worker, group: Group) -> ProcessGroup:
        library: Any = c10d.ProcessGroupGloo
        options = library._Options()
        options._devices = [_device(os.getpid())]
        options._timeout = timedelta(seconds=STEP_SECONDS)
        return library(store, place, len(group), options)

    def _perform(
        self,
        collective: PendingCollective,
        contributions: Sequence[Contribution],
        todo: list[steps.Step],
    ) -> None:
        with self._leased(collective, contributions) as groups:
            with self._connections.lock:
                works = [w for g, step in zip(groups, todo, strict=True) for w in start(g, step)]
            while works:
                works.pop().wait()  # and let go of it: it holds the connections open


@functools.cache
def _device(_pid: int) -> Any:
    """The loopback interface: all members are in this process. One for each that was forked."""
    return c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def obstacle() -> str:
    """Why Gloo can't be used, "" if it can."""
    if torch.distributed.is_gloo_available():
        return ""
    return f"this torch ({torch.__version__}) was built without Gloo; use 'local'"
