"""Keys and values of a session: torch.distributed's store, and how process groups connect.

Pure state. At the coordinator its lock guards it; there a worker that asks for what is not there
yet is answered when it is. rendezvous/store.py has the stores that torch sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..board.peers import Peer


class KeyValues:
    """Values by their keys. Each method takes a list of keys first."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def get(self, keys: Sequence[str]) -> list[bytes] | None:
        """Their values; None if one has none."""
        data = self._data
        return [data[key] for key in keys] if self.check(keys) else None

    wait = get

    def set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Store a value for each."""
        self._data.update(zip(keys, values, strict=True))

    def add(self, keys: Sequence[str], value: int) -> int:
        """Add to a number, 0 at first; the sum."""
        total = int(self._data.get(keys[0], b"0")) + value
        self._data[keys[0]] = str(total).encode()
        return total

    def compare_set(self, keys: Sequence[str], expected: bytes, desired: bytes) -> bytes:
        """Store a value if the present one is as expected; the value that is there then."""
        present = self._data.get(keys[0])
        if present == expected or (present is None and not expected):
            self._data[keys[0]] = desired
            return desired
        return expected if present is None else present

    def append(self, keys: Sequence[str], value: bytes) -> None:
        """Put bytes behind those that are there."""
        self._data[keys[0]] = self._data.get(keys[0], b"") + value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(key in self._data for key in keys)

    def delete(self, keys: Sequence[str]) -> bool:
        """Forget a key; whether it was there."""
        return self._data.pop(keys[0], None) is not None

    def count(self, _keys: Sequence[str] = ()) -> int:
        """How many keys there are."""
        return len(self._data)

    def forget(self, prefix: str) -> None:
        """Drop all keys that begin so."""
        for key in [key for key in self._data if key.startswith(prefix)]:
            del self._data[key]


SETTLED = 0.5  # seconds for which workers wait before it counts that they store nothing


class Asker(NamedTuple):
    """A caller that waits for keys; `ordinal`: of its command, -1 if its thread is no worker's."""

    rank: int
    ticket: int
    keys: Sequence[str]
    ordinal: int
    since: float


class KeyValueStore(KeyValues):
    """The coordinator's. `answer` is called with rank, ticket and what was asked for."""

    def __init__(self, answer: Callable[[int, int, Any], None]) -> None:
        super().__init__()
        self._answer = answer
        self.askers: list[Asker] = []

    def ask(
        self, rank: int, ticket: int, ordinal: int, what: str, keys: Sequence[str], *args: Any
    ) -> None:
        """Do what a worker asks for, by a method's name; ``get`` and ``wait`` may have to wait."""
        if what in ("get", "wait"):
            asker = Asker(rank, ticket, keys, ordinal, time.monotonic())
            if not self._served(asker):
                self.askers.append(asker)
            return
        answer = getattr(self, what)(keys, *args)
        self.askers = [asker for asker in self.askers if not self._served(asker)]
        self._answer(rank, ticket, answer)

    def _served(self, asker: Asker) -> bool:
        values = self.get(asker.keys)
        if values is not None:
            self._answer(asker.rank, asker.ticket, values)
        return values is not None

    def leave(self, rank: int, ticket: int) -> None:
        """Somebody does not wait any more."""
        self.askers = [one for one in self.askers if (one.rank, one.ticket) != (rank, ticket)]

    def lost(self, rank: int) -> None:
        """A worker is no more."""
        self.askers = [asker for asker in self.askers if asker.rank != rank]

    def hopeless(self, peers: Mapping[int, Peer]) -> list[Asker]:
        """Workers for which no other can store anything any more.

        All have ended the command; or some have, and the others wait as well.
        """
        before = time.monotonic() - SETTLED
        waiting = {one.rank for one in self.askers if one.ordinal >= 0 and one.since <= before}
        hopeless = []
        for asker in self.askers:
            others = [rank for rank in peers if rank != asker.rank]
            left = {
                rank
                for rank in others
                if not (peers[rank].ended or peers[rank].executed > asker.ordinal)
            }
            in_vain = len(left) < len(others) and {asker.rank, *left} <= waiting
            if asker.ordinal >= 0 and (not left or in_vain):
                hopeless.append(asker)
        self.askers = [asker for asker in self.askers if asker not in hopeless]
        return hopeless
