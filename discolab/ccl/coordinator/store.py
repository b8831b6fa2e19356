"""Keys and values of a session: torch.distributed's store, and how process groups connect.

Pure state, under the coordinator's lock. Who asks for what is not there yet is answered when it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..board.peers import Peer


class Asker(NamedTuple):
    """Who waits for keys; `ordinal` is of its command, -1 on a thread that is no worker's own."""

    rank: int
    ticket: int
    keys: tuple[str, ...]
    ordinal: int
    since: float


class KeyValueStore:
    """Values by their keys. `answer` is called with rank, ticket and what was asked for."""

    def __init__(self, answer: Callable[[int, int, Any], None]) -> None:
        self._answer = answer
        self._data: dict[str, bytes] = {}
        self.askers: list[Asker] = []

    def ask(self, rank: int, ticket: int, ordinal: int, what: str, *args: Any) -> None:
        """Do what a store is asked for."""
        if what in ("get", "wait"):
            asker = Asker(rank, ticket, tuple(args[0]), ordinal, time.monotonic())
            if not self._served(asker, what == "get"):
                self.askers.append(asker)
        else:
            self._answer(rank, ticket, getattr(self, "_" + what)(*args))

    def _served(self, asker: Asker, _get: bool = True) -> bool:
        data = self._data
        if not all(key in data for key in asker.keys):
            return False
        self._answer(asker.rank, asker.ticket, [data[key] for key in asker.keys])
        return True

    def _stored(self) -> None:
        if self.askers:
            self.askers = [asker for asker in self.askers if not self._served(asker)]

    def _set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._data.update(zip(keys, values, strict=True))
        self._stored()

    def _add(self, key: str, value: int) -> int:
        total = int(self._data.get(key, b"0")) + value
        self._set([key], [str(total).encode()])
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._data.get(key)
        if found == expected or (found is None and not expected):
            self._set([key], [desired])
            return desired
        return expected if found is None else found

    def _append(self, key: str, value: bytes) -> None:
        self._set([key], [self._data.get(key, b"") + value])

    def _check(self, keys: Sequence[str]) -> bool:
        return all(key in self._data for key in keys)

    def _delete(self, key: str) -> bool:
        return self._data.pop(key, None) is not None

    def _count(self) -> int:
        return len(self._data)

    def leave(self, rank: int, ticket: int) -> None:
        """Somebody does not wait any more."""
        self.askers = [one for one in self.askers if (one.rank, one.ticket) != (rank, ticket)]

    def forget(self, prefix: str) -> None:
        """Drop all keys that begin so."""
        for key in [key for key in self._data if key.startswith(prefix)]:
            del self._data[key]

    def lost(self, rank: int) -> None:
        """A worker is no more."""
        self.askers = [asker for asker in self.askers if asker.rank != rank]

    def hopeless(self, peers: Mapping[int, Peer]) -> list[Asker]:
        """Those for whom nobody can store anything any more: all others have ended the command."""
        found = [
            asker
            for asker in self.askers
            if asker.ordinal >= 0
            and all(
                peer.ended or peer.executed > asker.ordinal
                for rank, peer in peers.items()
                if rank != asker.rank
            )
        ]
        self.askers = [asker for asker in self.askers if asker not in found]
        return found
