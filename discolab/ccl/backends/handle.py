"""A worker's process group of Gloo: how it is made, and how the steps of exchanges.py are done."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d
from torch._C import _distributed_c10d as c10d

from ..coordinator import protocol
from ..rendezvous.client import CoordinatorClient
from ..rendezvous.conductor import Gone, ProcessGroup, Ranks
from .exchanges import SCRATCH
from .process_groups import STEP_SECONDS, start
from .steps import Await, DirectStep, DirectSteps, Exchange, Finish, Step, run

_Store: Any = torch.distributed.distributed_c10d.Store  # its trampoline has no types


class GroupStore(_Store):  # type: ignore[misc] # Any, see above
    """Used on the conductor's thread, and the library's own. Names are those that torch calls.

    Once it is `connected`, whether anybody waits for the connection says nothing any more.
    """

    connected = False

    def __init__(
        self, client: CoordinatorClient, prefix: str, seconds: float, unwanted: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._client, self._prefix, self._seconds, self._unwanted = (
            client, prefix, seconds, unwanted,
        )  # fmt: skip

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._ask("set", [self._prefix + key], [bytes(value)])

    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""
        return bytes(self._ask("get", [self._prefix + key])[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask("wait", [self._prefix + key for key in keys])

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first; the sum."""
        return int(self._ask("add", self._prefix + key, value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", [self._prefix + key for key in keys]))

    def _ask(self, what: str, *args: Any) -> Any:
        return self._client.ask(
            protocol.STORE,
            -1,
            "groups",
            what,
            *args,
            what="the other workers to connect",
            timeout=self._seconds,
            wanted=lambda: self.connected or not self._unwanted(),
        )


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
