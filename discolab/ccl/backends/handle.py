"""A worker's process group of Gloo: how it is made, and how the steps of exchanges.py are done."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ..rendezvous.client import CoordinatorClient
from ..rendezvous.conductor import Gone, ProcessGroup, Ranks
from ..rendezvous.store import GroupStore
from .exchanges import SCRATCH
from .process_groups import STEP_SECONDS, start
from .steps import Await, DirectStep, DirectSteps, Exchange, Finish, Step, run

_own = threading.local()


def connect(
    client: CoordinatorClient, ranks: Ranks, number: int, unwanted: Callable[[], bool]
) -> ProcessGroup:
    """This worker's end of a process group. Waits for the other members, who make theirs."""
    library: Any = c10d.ProcessGroupGloo
    options = library._Options()
    options._devices = [_device(getattr(client.link, "host", "127.0.0.1"), os.getpid())]
    options._timeout = timedelta(seconds=STEP_SECONDS)
    options._threads = 1  # tensors are given and taken without them
    store = GroupStore(client, f"{number}/", STEP_SECONDS, unwanted)
    return library(store, ranks.index(client.worker.worker_id), len(ranks), options)


def carry_out(end: ProcessGroup, steps: DirectSteps, void: Callable[[], bool]) -> Finish:
    """Do the steps of a program; what it returns.

    Raises
    ------
    Gone
        Between two steps, if `void()`.
    """
    under_way: dict[Exchange, list[Any]] = {}

    def do_or_begin(step: DirectStep) -> None:
        if void():
            raise Gone
        if isinstance(step, Await):
            _wait(under_way.pop(step.exchange))
        elif isinstance(step, Exchange) and step.later:
            under_way[step] = start(end, step)
        else:
            do(end, step)

    return run(steps, do_or_begin)


def do(end: ProcessGroup, step: Step | Exchange) -> None:
    """Do one step."""
    _wait(start(end, step))


def room(size: int) -> torch.Tensor:
    """At least so many bytes, the same memory each time: for one program at a time on a thread."""
    held: torch.Tensor | None = getattr(_own, "room", None)
    if held is None or len(held) < size:
        held = torch.empty(size, dtype=torch.uint8)
        _own.room = held if size <= SCRATCH else None
    return held


def _wait(works: list[Any]) -> None:
    while works:
        works.pop(0).wait()  # and let go of it: it holds the sockets open


@functools.cache
def _device(host: str, _pid: int) -> Any:
    """The interface over which other workers reach this one. One for each process."""
    return c10d.ProcessGroupGloo.create_device(hostname=host)
