"""What passes between a session and a worker in another process, besides commands and replies.

A *service* is a layer's part on the controller, one object a session (`SERVICES`); what it and
a worker say to each other goes over the worker's `Link`. Where all workers share the
controller's address space there is none of this: `Worker.link` is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .failures import Failure


class Link(Protocol):
    """The worker's end. `tell` may be called on any thread.

    `host` is the address of this machine at which the session's other workers reach it.
    """

    host: str

    def tell(self, service: str, value: Any) -> None:
        """Say something to a service of the session; in order with this worker's replies."""

    def call_failed(self, ordinal: int) -> None:
        """That call has failed: if it has told anything, say so, by the worker's state."""

    def flush_waiting(self) -> None:
        """Send what this worker has printed, before something else is said on another way."""

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        """Have `handler` called with what the service says: on the link's thread, so be quick."""


class Ears:
    """Who listens to services at a worker's end, and what was said before anybody did.

    Any thread may use it; single operations on its dicts need no lock.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._early: dict[str, list[Any]] = {}

    def listen(self, service: str, handler: Callable[[Any], None]) -> None:
        """See `Link`; what was said before is given to the handler now."""
        self._hand_over(service, handler)
        self._handlers[service] = handler
        self._hand_over(service, handler)

    def hear(self, worker: Any, service: str, value: Any) -> None:
        """A service has said something to the worker."""
        handler = self._handlers.get(service)
        if handler is not None:
            handler(value)
            return
        self._early.setdefault(service, []).append(value)
        if service in LISTENERS:
            LISTENERS[service](worker)
        handler = self._handlers.get(service)
        if handler is not None:  # it may have begun to listen before the value was among these
            self._hand_over(service, handler)

    def _hand_over(self, service: str, handler: Callable[[Any], None]) -> None:
        for value in self._early.pop(service, ()):
            handler(value)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What one worker was at one moment; made where it lives.

    Attributes
    ----------
    executed, sat_out, resumed_at, ended, interrupts
        As `Worker` has them.
    received
        How many commands it has received.
    busy
        Whether a call runs.
    state, detail, seconds
        As `Worker.doing` tells them.
    failed_calls
        The last calls that failed, by their ordinal.
    """

    rank: int
    executed: int
    sat_out: int
    resumed_at: int
    ended: bool
    interrupts: int
    received: int
    busy: bool
    state: str
    detail: str
    seconds: float
    failed_calls: tuple[tuple[int, Failure], ...]


class Service:
    """A layer's part on the controller. Nothing here may block or raise; a base that does nothing.

    All but `close` are called on the session's reader thread, or, for worker 0 of it, on that
    worker's own thread.
    """

    def receive(self, rank: int, value: Any) -> None:
        """A worker has said something."""

    def state(self, rank: int, state: WorkerState) -> None:
        """What a worker is has come in; all that it said before is known."""

    def lost(self, rank: int) -> None:
        """A worker has died."""

    def next_look(self) -> float | None:
        """When `look` is to be called, on the clock of `time.monotonic`; None: not."""
        return None

    def look(self) -> None:
        """Do what is due."""

    def close(self) -> None:
        """The session ends."""


SERVICES: dict[str, Callable[[Any], Service]] = {}
"""By name: makes the part of a layer for a `Session`."""

LISTENERS: dict[str, Callable[[Any], None]] = {}
"""By service: has a `Worker` listen to it. Called where something is said to it that does not
listen yet, on the link's thread, so be quick."""
