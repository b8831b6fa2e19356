"""Which nodes have joined a session, and which workers each of them runs; pure.

A *party* is one process that brings workers: a node started by hand with several, or one of a
launcher's processes with one. Workers are counted party by party, in the order of the ranks that
the parties have been given, else in the order in which they came. Worker 0 and those beside it, on
the session's own machine, are not here: `first` is the first rank of the others.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ...transport.frame import VERSION


def versions() -> dict[str, str]:
    """What must be equal on all machines: functions travel as Python's byte code."""
    return {
        "discolab": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": torch.__version__.partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "protocol": str(VERSION),
    }


@dataclass
class Party:
    """A process that brings workers.

    Attributes
    ----------
    node
        Its connection.
    workers
        How many it brings.
    rank, size, launcher
        What it was given; None where it was not, "" without a launcher.
    machine, name, pid
        Of its machine: an identity, and what people call it; its process id.
    address
        At which other machines reach it.
    cores, gpus
        Threads for torch, and GPUs.
    local_rank
        Of its first worker among those of its machine, as far as GPUs go.
    devices
        What it was told to use; None: the GPUs in turn.
    first
        The rank of its first worker, -1 until all have come.
    """

    node: bytes
    workers: int
    rank: int | None = None
    size: int = 0
    launcher: str = ""
    machine: str = ""
    name: str = ""
    pid: int = 0
    address: str = ""
    reached: str = ""
    cores: int = 1
    gpus: int = 0
    local_rank: int = 0
    devices: Any = None
    first: int = -1
    ranks: range = field(default=range(0))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" {self.rank}"
        return f"node{rank} on {self.name or self.address} (pid {self.pid})"

    def device_names(self, everywhere: Any) -> list[str]:
        """The device of each of its workers; `everywhere` is what the session wants, or None."""
        if everywhere is not None:
            own = [everywhere] * self.workers
        elif self.devices is not None:
            own = list(self.devices)
            own = [own[index % len(own)] for index in range(self.workers)]
        elif self.gpus:
            own = [f"cuda:{(self.local_rank + i) % self.gpus}" for i in range(self.workers)]
        else:
            own = ["cpu"] * self.workers
        return [str(device) for device in own]


class Roster:
    """Who has joined. `join` and `leave` are the events; what is to be done is what they return.

    Parameters
    ----------
    wanted
        How many workers the nodes are to bring.
    first
        The rank of the first of them.
    each
        How many a node brings that was not told a number.
    """

    def __init__(self, wanted: int, first: int, each: int) -> None:
        self.wanted, self.first, self.each = wanted, first, each
        self.parties: dict[bytes, Party] = {}
        self.refused: list[str] = []
        self.complete = wanted == 0

    def join(self, node: bytes, hello: dict[str, Any]) -> str:
        """A process says what it is and brings; "" if it is taken in, else why not.

        Whatever a node says is looked at, so that another version's hello is an error in words.
        """
        try:
            party, theirs = _party(node, hello, self.each)
        except (KeyError, TypeError, ValueError) as exc:
            name = str(hello.get("name", "somewhere"))
            return self._refuse(name, f"its hello is not understood ({exc!r}): another version?")
        why = self._why_not(party, theirs)
        if why:
            return self._refuse(str(party), why)
        self.parties[node] = party
        if self._brought() == self.wanted:
            self._count()
        return ""

    def leave(self, node: bytes) -> Party | None:
        """A connection has ended; the party whose it was."""
        if self.complete:
            return self.parties.get(node)
        return self.parties.pop(node, None)

    def party_of(self, rank: int) -> Party | None:
        """Who runs that worker."""
        return next((p for p in self.parties.values() if rank in p.ranks), None)

    def missing(self) -> int:
        """How many workers are still to come."""
        return self.wanted - self._brought()

    def here(self) -> str:
        """Who has joined, in words."""
        names = [f"{party.name} ({party.workers})" for party in self.parties.values()]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more if names else "nobody yet"

    def validate(self) -> None:
        """What must hold."""
        assert self._brought() <= self.wanted
        assert self.complete == (self._brought() == self.wanted)
        given = [p.rank for p in self.parties.values() if p.rank is not None]
        assert len(given) == len(set(given))
        if self.complete:
            ranks = sorted(rank for p in self.parties.values() for rank in p.ranks)
            assert ranks == list(range(self.first, self.first + self.wanted))

    def _brought(self) -> int:
        return sum(party.workers for party in self.parties.values())

    def _refuse(self, who: str, why: str) -> str:
        self.refused.append(f"{who}: {why}")
        return why

    def _why_not(self, party: Party, theirs: dict[str, str]) -> str:
        ours = versions()
        for name, wanted in ours.items():
            if theirs.get(name) != wanted:
                return (
                    f"it has {name} {theirs.get(name)}, the session has {wanted}: install the "
                    "same version on all machines"
                )
        for other in self.parties.values():
            if party.rank is not None and party.rank == other.rank:
                return f"rank {party.rank} has joined already: {other}"
        room = self.missing()
        if room == 0:
            return (
                f"all {self.wanted} workers that the session wants from its nodes have come: "
                f"{self.here()}"
            )
        if party.size * party.workers > self.wanted:
            return (
                f"{party.launcher} has started {party.size} processes with {party.workers} "
                f"worker{'s' if party.workers > 1 else ''} each, the session wants "
                f"{self.wanted} workers from its nodes"
            )
        if party.workers > room:
            return (
                f"it brings {party.workers} workers, the session wants {room} more: "
                f"--workers {min(room, self.each)}"
            )
        return ""

    def _count(self) -> None:
        order = sorted(
            self.parties.values(), key=lambda p: float("inf") if p.rank is None else p.rank
        )
        first = self.first
        for party in order:
            party.first, party.ranks = first, range(first, first + party.workers)
            first += party.workers
        self.complete = True


def _party(node: bytes, hello: dict[str, Any], each: int) -> tuple[Party, dict[str, str]]:
    """What a node says of itself.

    Raises
    ------
    KeyError, TypeError, ValueError
        If it says something else.
    """
    workers = each if hello["workers"] is None else int(hello["workers"])
    if workers < 1:
        raise ValueError(f"{workers} workers")
    texts = {key: str(hello[key]) for key in ("launcher", "machine", "name", "address", "reached")}
    numbers = {key: int(hello[key]) for key in ("size", "pid", "cores", "gpus", "local_rank")}
    rank = None if hello["rank"] is None else int(hello["rank"])
    devices = None if hello["devices"] is None else [str(name) for name in hello["devices"]]
    found = {str(key): str(value) for key, value in dict(hello["versions"]).items()}
    return Party(node, workers, rank, devices=devices, **texts, **numbers), found  # type: ignore[arg-type]
