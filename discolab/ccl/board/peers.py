"""What is known of a worker where its collectives are judged: in its process, or from afar."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

from ...runtime.failures import Failure
from ...runtime.services import WorkerState
from ...runtime.worker import Worker


class Queue(Protocol):
    """Where a worker's commands wait."""

    def pending(self) -> int:
        """How many it has not received."""


class Peer(Protocol):
    """A worker, or what is known of one in another process. Attributes are those of `Worker`."""

    @property
    def worker_id(self) -> int:
        """Its rank."""

    @property
    def peers(self) -> Mapping[int, Peer]:
        """All workers that meet on the same board, itself included."""

    @property
    def executed(self) -> int: ...

    @property
    def sat_out(self) -> int: ...

    @property
    def joined_at(self) -> int: ...

    @property
    def resumed_at(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    @property
    def died(self) -> bool: ...

    @property
    def gives_way(self) -> bool: ...

    @property
    def current(self) -> tuple[Any, ...] | None: ...

    @property
    def registers(self) -> Mapping[int, Any]: ...

    @property
    def failed_calls(self) -> deque[tuple[int, Failure]]: ...

    @property
    def channel(self) -> Queue: ...

    @property
    def waiting_for(self) -> Any: ...

    def doing(self) -> tuple[str, str, float]:
        """See `Worker.doing`."""


_FAILED_CALLS = 16  # as many as a `Worker` keeps
_BUSY = (0, 0)  # a command of which nothing is known


class RemotePeer:
    """One worker in another process; see `Worker` for the attributes.

    It is a little older than the worker. What it says has been so, and most of it only grows: calls
    that were executed, that failed, that the worker has ended.
    """

    here = False

    def __init__(
        self, rank: int, peers: Mapping[int, Peer], sent: Callable[[], int], joined_at: int = 0
    ) -> None:
        self.worker_id = rank
        self.peers = peers
        self.executed = self.joined_at = joined_at
        self.sat_out = -1
        self.resumed_at = 0
        self.interrupts = 0
        self.ended = self.died = self.gives_way = False
        self.current: tuple[Any, ...] | None = None
        self.registers: dict[int, Any] = {}
        self.failed_calls: deque[tuple[int, Failure]] = deque(maxlen=_FAILED_CALLS)
        self.channel = self
        self.backend = ""
        self.waiting_for: Any = None
        self._sent, self._received = sent, 0
        self._doing = ("idle", "", 0.0)
        self._told_at = time.monotonic()

    def update(self, state: WorkerState) -> None:
        """Take in what the worker has said."""
        self.executed = max(self.executed, state.executed)
        self.sat_out, self.interrupts = state.sat_out, state.interrupts
        self.resumed_at = max(self.resumed_at, state.resumed_at)
        self.ended = self.ended or state.ended
        self.current = _BUSY if state.busy else None
        self._received = state.received
        self._doing, self._told_at = (state.state, state.detail, state.seconds), time.monotonic()
        if len(state.failed_calls) != len(self.failed_calls) or (
            state.failed_calls and state.failed_calls[-1][0] != self.failed_calls[-1][0]
        ):
            self.failed_calls = deque(state.failed_calls, maxlen=_FAILED_CALLS)

    def note(self, executed: int, resumed_at: int) -> None:
        """The worker has said something in the command of that ordinal."""
        if executed > self.executed:
            self.executed = executed
            self._doing = ("running", "", 0.0)
        self.current = _BUSY
        self.resumed_at = max(self.resumed_at, resumed_at)

    def pending(self) -> int:
        """As of its channel: how many commands it has not received, as far as is known."""
        return self._sent() - self._received

    def lost(self, died: bool) -> None:
        """The worker is no more."""
        self.ended, self.died = True, died

    def doing(self) -> tuple[str, str, float]:
        """See `Worker.doing`."""
        if self.ended:
            return "dead" if self.died else "ended", "", 0.0
        state, detail, seconds = self._doing
        return state, detail, seconds + time.monotonic() - self._told_at


def _of_worker(name: str) -> Any:
    """An attribute of a `LocalPeer` that is its worker's."""
    return property(attrgetter(f"_worker.{name}"))


class LocalPeer:
    """As a `RemotePeer`, of worker 0 in the coordinator's own process: always up to date."""

    here = True
    executed, resumed_at = _of_worker("executed"), _of_worker("resumed_at")
    sat_out, joined_at = _of_worker("sat_out"), _of_worker("joined_at")
    ended, died, gives_way = map(_of_worker, ("ended", "died", "gives_way"))
    current, interrupts = _of_worker("current"), _of_worker("interrupts")
    registers, failed_calls = _of_worker("registers"), _of_worker("failed_calls")
    channel, doing, shared = _of_worker("channel"), _of_worker("doing"), _of_worker("shared")

    def __init__(self, worker: Worker, peers: Mapping[int, Peer]) -> None:
        self._worker, self.peers, self.backend = worker, peers, ""
        self.worker_id = worker.worker_id
        self.waiting_for: Any = None

    def update(self, state: WorkerState) -> None:
        """See `RemotePeer`."""

    def note(self, executed: int, resumed_at: int) -> None:
        """See `RemotePeer`."""

    def lost(self, died: bool) -> None:
        """See `RemotePeer`."""
