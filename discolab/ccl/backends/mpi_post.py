"""Letters between processes: any picklable value, to a rank, under a key; over MPI.

They arrive in the order in which they were sent to one rank, and lie here until somebody asks
for those of their sender and key. Unpickling is safe as far as MPI is: what mpirun has started
for one user. A `Post` belongs to one thread.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import numpy as np

Communicator = Any  # mpi4py has its types, but need not be installed
Key = tuple[Any, ...]
_TAG = 1


class Post:
    """The letters of one process.

    Parameters
    ----------
    world
        A communicator on which nobody else sends messages.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._leaving: list[Any] = []
        self._arrived: dict[tuple[int, Key], deque[Any]] = {}

    def send(self, rank: int, key: Key, value: Any) -> None:
        """Send; does not wait."""
        letter = np.frombuffer(pickle.dumps((key, value)), np.uint8)
        self._leaving.append(self._world.Isend(letter, rank, _TAG))  # keeps the letter

    def look(self) -> None:
        """Take in what has come; never waits."""
        from mpi4py import MPI

        self._leaving = [request for request in self._leaving if not request.Test()]
        status = MPI.Status()
        while (message := self._world.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            letter = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv(letter)
            key, value = pickle.loads(letter.tobytes())
            self._arrived.setdefault((status.source, key), deque()).append(value)

    def first(self, rank: int, key: Key) -> Any:
        """The oldest letter that has come from there; None without one."""
        line = self._arrived.get((rank, key))
        return line[0] if line else None

    def take(self, rank: int, key: Key) -> Any:
        """As `first`, and removes it."""
        line = self._arrived.get((rank, key))
        if not line:
            return None
        value = line.popleft()
        if not line:
            del self._arrived[rank, key]
        return value

    def count(self, kind: str) -> int:
        """How many letters lie here whose keys begin with `kind`."""
        return sum(len(line) for (_, key), line in self._arrived.items() if key[0] == kind)
