"""The nodes of a session: which have joined, what each of them runs, and what became of it.

A *member* is one process that brings workers: a node started by hand with several, or one of a
launcher's processes with one. Workers are counted member by member, in the order of the ranks that
the members have been given, else in the order in which they came. Worker 0 and those beside it, on
the session's own machine, are no member's.

`Membership` is pure. `Nodes` is the session's side of its nodes: the reader thread calls
`node_said`; its `_lock` guards the membership and what is known of workers, which the thread that
starts the session reads.
"""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.errors import DiscoError
from ..transport.addresses import machine_id
from ..transport.frame import VERSION
from .child_processes import Children, how_it_ended
from .connections.controller_side import WorkerConnections
from .connections.tcp import TcpTransport
from .heartbeat import process_state

_QUIET = 2.5  # seconds of silence of a node that says each second that it lives


def versions() -> dict[str, str]:
    """The versions that must be equal on all machines: functions travel as Python's byte code."""
    return {
        "discolab": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": torch.__version__.partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "protocol": str(VERSION),
    }


@dataclass
class Member:
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
        Threads for torch, and GPUs or other accelerators.
    accelerator
        The type of device that these have.
    local_rank
        Of its first worker among those of its machine, as far as GPUs go.
    devices
        What it is to use; None: the GPUs in turn.
    ranks
        Of its workers, empty until all members have come.
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
    accelerator: str = "cuda"
    local_rank: int = 0
    devices: Any = None
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
            turns = range(self.local_rank, self.local_rank + self.workers)
            own = [f"{self.accelerator}:{turn % self.gpus}" for turn in turns]
        else:
            own = ["cpu"] * self.workers
        return [str(device) for device in own]


class Membership:
    """Which members have joined. `join` and `leave` are events; what to do is what they return.

    Parameters
    ----------
    wanted
        How many workers the nodes are to bring.
    first
        The rank of the first of them.
    each
        How many a node brings for which no number was given.
    """

    def __init__(self, wanted: int, first: int, each: int) -> None:
        self.wanted, self.first, self.each = wanted, first, each
        self.members: dict[bytes, Member] = {}
        self.refused: list[str] = []
        self.complete = wanted == 0

    def join(self, node: bytes, hello: dict[str, Any]) -> str:
        """Take in a process that says what it is and brings; "" if it may join, else why not.

        All of the hello is checked, so that another version's is an error in words.
        """
        try:
            member, theirs = _member(node, hello, self.each)
        except (KeyError, TypeError, ValueError) as exc:
            name = str(hello.get("name", "somewhere"))
            return self._refuse(name, f"its hello is not understood ({exc!r}): another version?")
        why = self._why_not(member, theirs)
        if why:
            return self._refuse(str(member), why)
        self.members[node] = member
        if self._brought() == self.wanted:
            self._count()
        return ""

    def leave(self, node: bytes) -> Member | None:
        """Remove the member whose connection has ended; gives it."""
        if self.complete:
            return self.members.get(node)
        return self.members.pop(node, None)

    def member_of(self, rank: int) -> Member | None:
        """The node that runs that worker."""
        return next((m for m in self.members.values() if rank in m.ranks), None)

    def missing(self) -> int:
        """How many workers are still to come."""
        return self.wanted - self._brought()

    def here(self) -> str:
        """The nodes that have joined, in words."""
        names = [f"{member.name} ({member.workers})" for member in self.members.values()]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more if names else "nobody yet"

    def validate(self) -> None:
        """Assert what must hold."""
        assert self._brought() <= self.wanted
        assert self.complete == (self._brought() == self.wanted)
        given = [m.rank for m in self.members.values() if m.rank is not None]
        assert len(given) == len(set(given))
        if self.complete:
            ranks = sorted(rank for m in self.members.values() for rank in m.ranks)
            assert ranks == list(range(self.first, self.first + self.wanted))

    def _brought(self) -> int:
        return sum(member.workers for member in self.members.values())

    def _refuse(self, name: str, why: str) -> str:
        self.refused.append(f"{name}: {why}")
        return why

    def _why_not(self, member: Member, theirs: dict[str, str]) -> str:
        ours = versions()
        for name, wanted in ours.items():
            if theirs.get(name) != wanted:
                return (
                    f"it has {name} {theirs.get(name)}, the session has {wanted}: install the "
                    "same version on all machines"
                )
        for other in self.members.values():
            if member.rank is not None and member.rank == other.rank:
                return f"rank {member.rank} has joined already: {other}"
        room = self.missing()
        if room == 0:
            return (
                f"all {self.wanted} workers that the session wants from its nodes have come: "
                f"{self.here()}"
            )
        if member.size * member.workers > self.wanted:
            return (
                f"{member.launcher} has started {member.size} processes with {member.workers} "
                f"worker{'s' if member.workers > 1 else ''} each, the session wants "
                f"{self.wanted} workers from its nodes"
            )
        if member.workers > room:
            return (
                f"it brings {member.workers} workers, the session wants {room} more: "
                f"--workers {min(room, self.each)}"
            )
        return ""

    def _count(self) -> None:
        order = sorted(
            self.members.values(), key=lambda m: float("inf") if m.rank is None else m.rank
        )
        first = self.first
        for member in order:
            member.ranks = range(first, first + member.workers)
            first += member.workers
        self.complete = True


def _member(node: bytes, hello: dict[str, Any], each: int) -> tuple[Member, dict[str, str]]:
    """Check what a node says of itself, and make a member of it.

    Raises
    ------
    KeyError, TypeError, ValueError
        If it says something else.
    """
    workers = each if hello["workers"] is None else int(hello["workers"])
    if workers < 1:
        raise ValueError(f"{workers} workers")
    named = ("launcher", "machine", "name", "address", "reached", "accelerator")
    texts = {key: str(hello[key]) for key in named}
    numbers = {key: int(hello[key]) for key in ("size", "pid", "cores", "gpus", "local_rank")}
    rank = None if hello["rank"] is None else int(hello["rank"])
    devices = None if hello["devices"] is None else [str(name) for name in hello["devices"]]
    theirs = {str(key): str(value) for key, value in dict(hello["versions"]).items()}
    return Member(node, workers, rank, devices=devices, **texts, **numbers), theirs  # type: ignore[arg-type]


class Nodes:
    """The nodes of one session, and its worker processes on this machine.

    A `WorkerProcesses` (connections/controller_side.py): it knows no session.

    Parameters
    ----------
    first
        The first rank that is a node's; those before it are of this machine.
    wanted
        How many workers the nodes bring, all together.
    each
        How many a node brings for which no number was given.

    Attributes
    ----------
    children
        The worker processes of this machine, by rank.
    """

    connections: WorkerConnections

    def __init__(self, transport: TcpTransport, first: int, wanted: int, each: int) -> None:
        self.transport, self.first = transport, first
        self.children = Children()
        self._lock = threading.Lock()
        self._membership = Membership(wanted, first, each)
        self._settings: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # of nodes' workers
        self._shown = 0  # how many refusals were shown
        self._codes: dict[int, int] = {}  # how workers of nodes have ended
        self._unsent: dict[int, str] = {}  # what they have printed and not sent
        self._heard: dict[bytes, float] = {}  # when each was heard last, in time of `Heartbeats`
        self._left: dict[bytes, str] = {}  # nodes that have gone, and why
        transport.settled = self._is_settled
        transport.node_said = self.node_said

    # -- on the reader thread --------------------------------------------------------------------

    def node_said(self, node: bytes, message: dict[str, Any] | None) -> None:
        """Take a node's message, or its end."""
        if message is None:
            self._lose(node, "has ended, or the connection to it was cut")
            return
        self._heard[node] = self.connections.heartbeats.now
        if "hello" in message and isinstance(message["hello"], dict):
            if self.connections.closing:
                return  # a node that comes now is for the next session at this address
            with self._lock:
                why = self._membership.join(node, message["hello"])
            self.transport.tell_node(node, {"refused": why} if why else {"taken": True})
            if why and self._membership.complete:
                self.show_refusals()
            self.connections.notify()
        elif "beat" in message:
            for rank, state in _by_rank(message["beat"]).items():
                self.connections.heartbeats.sample(rank, str(state))
        elif "ended" in message:
            self._unsent.update(_by_rank(message["unsent"]))
            for rank, code in _by_rank(message["ended"]).items():
                self._codes[rank] = code
                self.transport.end(rank)
        elif "leaving" in message:
            self._lose(node, str(message["leaving"]))

    def _lose(self, node: bytes, why: str) -> None:
        with self._lock:
            member = self._membership.leave(node)
        if member is not None:
            self._left.setdefault(node, why)
            for rank in member.ranks:
                self.transport.end(rank)

    def child_ended(self) -> None:
        """Take note that a process of this machine has ended."""
        for rank in self.children.look():
            if rank > 0:  # the others are nodes, of which their connection tells
                self.transport.end(rank)

    def _is_settled(self, rank: int) -> bool:
        """Whether it is known what became of a worker whose connection is broken."""
        if self.connections.closing or rank in self._codes:
            return True
        if rank < self.first:
            self.children.look()
            return rank in self.children.codes
        member = self._membership.member_of(rank)
        return member is None or member.node in self._left

    # -- on any thread ---------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all nodes are there."""
        return self._membership.complete

    def missing(self) -> tuple[int, str]:
        """How many workers are still to come, and which nodes have joined."""
        with self._lock:
            return self._membership.missing(), self._membership.here()

    def refused(self) -> list[str]:
        """Which nodes were refused, and why."""
        with self._lock:
            return list(self._membership.refused)

    def show_refusals(self) -> None:
        """Write refusals that were not shown yet to this process's standard error."""
        with self._lock:
            shown, self._shown = self._shown, len(self._membership.refused)
            news = self._membership.refused[shown:]
        for refusal in news:
            sys.stderr.write(f"a node was refused: {refusal}\n")

    def members(self) -> list[Member]:
        """All of them, in the order of their ranks."""
        with self._lock:
            return sorted(self._membership.members.values(), key=lambda m: m.ranks.start)

    def welcome(
        self, common: dict[str, Any], devices: Sequence[str], threads: dict[str, int]
    ) -> None:
        """Have the nodes start their workers.

        Parameters
        ----------
        common
            Settings of all workers (worker_main.py).
        devices
            By rank.
        threads
            How many threads torch gets in each worker of a machine.
        """
        before: dict[str, int] = {machine_id(): self.first}
        for member in self.members():
            there = before.get(member.machine, 0)
            before[member.machine] = there + member.workers
            each = {"threads": threads[member.machine], "host": member.address}
            workers = [
                {"rank": rank, "local_rank": there + i, "device": devices[rank], **each}
                for i, rank in enumerate(member.ranks)
            ]
            for rank, own in zip(member.ranks, workers, strict=True):
                self._settings[rank] = common, own
            welcome = {"common": common, "workers": workers}
            self.transport.tell_node(member.node, {"welcome": welcome})

    def start_another(self, rank: int) -> bool:
        """Have a worker's node start another one in its place; false if it has none.

        Raises
        ------
        DiscoError
            If the node has gone.
        """
        self._codes.pop(rank, None)
        self._unsent.pop(rank, None)
        member = self._membership.member_of(rank)
        if member is None:
            return False
        if member.node in self._left:
            raise DiscoError(f"worker {rank} can't be replaced: its {member} is gone, too")
        common, own = self._settings[rank]
        welcome = {"common": common, "workers": [own]}
        self.transport.tell_node(member.node, {"welcome": welcome})
        return True

    def kill(self, rank: int) -> None:
        """End one worker's process now, with what it has started."""
        member = self._membership.member_of(rank)
        if member is None:
            self.children.kill(rank)
        else:
            self.transport.tell_node(member.node, {"kill": rank})

    def end(self, wait: bool = True) -> None:
        """See `WorkerProcesses`; nodes end too."""
        for member in self.members():
            if member.node not in self._left:
                self.transport.tell_node(member.node, {"end": True})
        self.children.end()

    # -- facts for people ------------------------------------------------------------------------

    def exit_reason(self, rank: int) -> str:
        """See `WorkerProcesses`; what the worker has not sent is shown first."""
        unsent = self._unsent.get(rank) or self.children.last_output(rank)
        self.connections.put_out(rank, unsent)
        member = self._membership.member_of(rank)
        pid = self.connections.joined.get(rank)
        process = f"pid {pid}" if pid else "before it was ready"
        if member is None:
            return f"({process}) {self.children.exit_reason(rank)}"
        if rank in self._codes:
            return f"({process} on {member.name}) {how_it_ended(self._codes[rank])}"
        if member.node in self._left:
            return f"({process}) is lost: its {member} {self._left[member.node]}"
        return f"({process} on {member.name}) is lost: its connection was cut"

    def where(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        member = self._membership.member_of(rank)
        on = "" if member is None else f" on {member.name}"
        return f"(pid {self.connections.joined.get(rank)}{on})"

    def pid_here(self, rank: int) -> int | None:
        """See `WorkerProcesses`."""
        return self.children.pids.get(rank)

    def activity(self, rank: int) -> str:
        """See `WorkerProcesses`; nodes say it of theirs each second."""
        pid = self.pid_here(rank)
        return process_state(pid) if pid is not None else ""

    def cut_off(self, rank: int) -> str:
        """See `WorkerProcesses`."""
        member, heartbeats = self._membership.member_of(rank), self.connections.heartbeats
        if member is None:
            return ""
        quiet = heartbeats.now - self._heard.get(member.node, 0.0)
        if quiet <= max(_QUIET, 0.8 * heartbeats.silent_for(rank)):
            return ""
        return (
            f"nor has its {member}: that machine or the way to it is down, or the node is stopped"
        )


def _by_rank(values: Any) -> dict[int, Any]:
    """Make numbers of the keys, which JSON has as text."""
    return {int(rank): value for rank, value in dict(values).items()}
