"""What is read of the others to judge a wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from ...runtime.failures import Failure


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
    def resumed_at(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    @property
    def died(self) -> bool: ...

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
