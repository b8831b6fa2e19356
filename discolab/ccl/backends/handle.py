"""A worker's process group of Gloo: how it is made, and how the steps of exchanges.py are done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..rendezvous.client import CoordinatorClient
from ..rendezvous.conductor import Gone, ProcessGroup, Ranks
from ..rendezvous.store import GroupStore
from . import gloo
from .exchanges import SCRATCH
from .process_groups import STEP_SECONDS, await_all, start
from .steps import Await, DirectStep, DirectSteps, Exchange, Finish, Step, run

_own = threading.local()


def connect(
    client: CoordinatorClient, ranks: Ranks, number: int, unwanted: Callable[[], bool]
) -> ProcessGroup:
    """This worker's end of a process group. Waits for the other members, who make theirs."""
    store = GroupStore(client, f"{number}/", STEP_SECONDS, unwanted)
    place = ranks.index(client.worker.worker_id)
    return gloo.connect(store, place, len(ranks), getattr(client.link, "host", gloo.LOOPBACK))


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
            await_all(under_way.pop(step.exchange))
        elif isinstance(step, Exchange) and step.later:
            under_way[step] = start(end, step)
        else:
            do(end, step)

    return run(steps, do_or_begin)


def do(end: ProcessGroup, step: Step | Exchange) -> None:
    """Do one step."""
    await_all(start(end, step))


def room(size: int) -> torch.Tensor:
    """At least so many bytes, the same memory each time: for one program at a time on a thread."""
    held: torch.Tensor | None = getattr(_own, "room", None)
    if held is None or len(held) < size:
        held = torch.empty(size, dtype=torch.uint8)
        _own.room = held if size <= SCRATCH else None
    return held
