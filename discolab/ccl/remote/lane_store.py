"""The store in which the ends of one lane find each other: keys and values at the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d

from ..hub import letters
from .spoke import Spoke

_Store: Any = torch.distributed.distributed_c10d.Store  # its trampoline has no types


class LaneStore(_Store):  # type: ignore[misc] # Any, see above
    """Used on the conductor's thread, and the library's own. Names are those that torch calls.

    Once it is `connected`, whether anybody waits for the connection says nothing any more.
    """

    connected = False

    def __init__(
        self, spoke: Spoke, prefix: str, seconds: float, unwanted: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._spoke, self._prefix, self._seconds, self._unwanted = (
            spoke, prefix, seconds, unwanted,
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
        return self._spoke.ask(
            letters.STORE,
            -1,
            "lanes",
            what,
            *args,
            what="the other workers to connect",
            timeout=self._seconds,
            wanted=lambda: self.connected or not self._unwanted(),
        )
