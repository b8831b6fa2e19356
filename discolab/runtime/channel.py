"""How the controller and one worker talk: `send`, `recv`, `reply`, `recv_reply`.

A channel is FIFO in both directions. Here is the one for workers that share the
controller's memory: commands are objects in a queue, nothing is encoded. Replies carry a
`Ticket`, so that several threads of the controller can wait for the same worker.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .actions import Command


def _itself(failure: Any) -> Any:
    return failure


_numbers = itertools.count(1)


class Ticket:
    """One question to some workers: collects a reply from each, and wakes the thread that waits.

    `deliver` runs on any thread; `acquire` on the one that asked. `values` is written by
    `deliver` alone, one key a worker, and read once all have come. `of_lost` makes the reply of a
    worker that has died, of the failure that describes this. `number` stands for it on its way to
    another process. No other ticket ever has it: a reply of a worker that has died may come late.
    """

    __slots__ = ("_arrived", "_done", "asked", "number", "of_lost", "values", "what")

    def __init__(
        self, asked: Iterable[int], what: str, of_lost: Callable[[Any], Any] = _itself
    ) -> None:
        self.asked = tuple(asked)
        self.number = next(_numbers)
        self.what = what
        self.of_lost = of_lost
        self.values: dict[int, Any] = {}
        self._arrived = itertools.count(1)
        self._done = threading.Lock()
        if self.asked:
            self._done.acquire()

    def deliver(self, rank: int, value: Any) -> None:
        """Enter the reply of one worker."""
        self.values[rank] = value
        if next(self._arrived) == len(self.asked):
            self._done.release()

    def acquire(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the last reply; true once it has come."""
        if self._done.acquire(timeout=timeout):
            self._done.release()
            return True
        return False

    @property
    def missing(self) -> list[int]:
        """The workers that have not replied yet."""
        return [rank for rank in self.asked if rank not in self.values]


class Channel(Protocol):
    """The controller's end and the worker's end of one connection.

    `copies`: whether what is replied is copied on its way, rather than given by reference.
    """

    copies: bool

    def send(self, command: Command) -> None:
        """Queue a command (controller)."""

    def recv(self) -> Command:
        """Wait for the next command (worker)."""

    def reply(self, ticket: Any, rank: int, value: Any) -> None:
        """Answer a command that carried a ticket, or what stands for it on the way (worker)."""

    def pending(self) -> int:
        """How many commands wait to be received."""


class ThreadChannel:
    """A channel between threads of one process; `send` never blocks and is safe in `__del__`."""

    copies = False

    def __init__(self) -> None:
        commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # bound methods of the C queue: no Python frame on the way of a command
        self.send = commands.put
        self.recv = commands.get
        self.pending = commands.qsize
        self._commands = commands

    def drain(self) -> list[Command]:
        """Take out all that waits, of a worker that will never take it."""
        left = []
        try:
            while True:
                left.append(self._commands.get_nowait())
        except queue.Empty:
            return left

    def reply(self, ticket: Ticket, rank: int, value: Any) -> None:
        """Hand the value over by reference."""
        ticket.deliver(rank, value)
