"""What workers wait for, and where they meet: the state of all rendezvous of one session.

There is one `Board` a session and address space, or one at the coordinator. `lock` guards all of
it; the methods are called under it unless they say otherwise. Nothing waits, and no tensor is read
or written, under the lock. Only a worker's own thread enters it as waiting; whoever ends what it
waits for takes it out.

A collective is known by its group, the ordinal of the command (`Worker.executed`, the same
number on all workers) and its number among the collectives of this group in this command.
An interrupt can tear a worker out between any two statements. So every entry carries its
ordinal, and `refresh` drops what is from before the last interrupt.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ...runtime.errors import CollectiveAborted, CollectiveError
from ...runtime.failures import name_ranks
from ...runtime.interrupts import plain_lock
from ..call import DONE, FAILED, WAITING, Call, CallCounts, reception_title
from .p2p_queue import MessageQueue, Pair
from .peers import Peer


class Chunks:
    """Parts that may be done in any order, each once."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts
        self._next = itertools.count().__next__
        self._taken = 0  # at least so many; a hint, written by any thread
        self._finished: list[None] = []

    def work(self) -> None:
        """Do parts until all are taken."""
        parts, take, finish = self._parts, self._next, self._finished.append
        with torch.inference_mode():
            while (part := take()) < len(parts):
                self._taken = part + 1
                parts[part]()
                finish(None)

    def helpers(self) -> int:
        """How many more threads than one can be of use on this machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, (cores or 1) // torch.get_num_threads())
        return min(threads, len(self._parts)) - 1

    def left(self) -> bool:
        """Whether there may be parts that nobody has taken."""
        return self._taken < len(self._parts)

    def finished(self) -> bool:
        """Whether all parts are done."""
        return len(self._finished) == len(self._parts)


RUNNING = "running"
Key = tuple[tuple[int, ...], str, int, int]


class Contribution:
    """One worker's part in a collective; without its tensors once that has failed.

    On devices `events` are what it begins after, and `done` what is to be waited for then.
    """

    __slots__ = ("call", "done", "events", "outs", "srcs")

    def __init__(
        self,
        call: Call,
        srcs: Sequence[torch.Tensor] = (),
        outs: Sequence[torch.Tensor] = (),
        events: Sequence[torch.Event] = (),
    ) -> None:
        self.call, self.srcs, self.outs, self.events = call, srcs, outs, events
        self.done: Sequence[torch.Event] = ()


class Wait:
    """Something on the board that workers wait for."""

    __slots__ = ("error", "ordinal", "suspected")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.error: tuple[type[CollectiveError], str] | None = None
        self.suspected: float | None = None

    def settled(self) -> bool:
        """Whether the waiting is over; needs no lock."""
        return self.error is not None

    def missing(self) -> Collection[int]:
        """The workers each of which must do something before it can be over."""
        raise NotImplementedError

    def members(self) -> Collection[int]:
        """The workers that wait."""
        raise NotImplementedError

    def call_of(self, rank: int) -> Call | None:
        """The call with which a worker takes part; None if it does not."""
        raise NotImplementedError

    def stable(self, suspicious: bool, seconds: float) -> bool:
        """Whether every look in the last `seconds` found it suspicious."""
        now = time.monotonic()
        if not suspicious:
            self.suspected = None
        elif self.suspected is None:
            self.suspected = now
        return suspicious and self.suspected is not None and now - self.suspected >= seconds


class PendingCollective(Wait):
    """One collective. ``str()`` reads ``all_reduce #1 of float32[4] in workers 0-3``.

    `first` is the call of whoever joins first. `chunks` are there while the members that wait may
    help; `abroad` is set once the last one has given it to a library, which then goes on by itself.
    """

    __slots__ = (
        "abroad",
        "chunks",
        "contributions",
        "disagree",
        "executor",
        "first",
        "group",
        "number",
        "state",
    )  # fmt: skip

    def __init__(self, first: Call) -> None:
        super().__init__(first.ordinal)
        self.first, self.group, self.number = first, first.group, first.number
        self.contributions: dict[int, Contribution] = {}
        self.state = WAITING
        self.executor = -1
        self.disagree = False
        self.chunks: Chunks | None = None
        self.abroad = False

    @property
    def key(self) -> Key:
        """Under which the board holds it."""
        return self.group.ranks, self.group.tag, self.ordinal, self.number

    def settled(self) -> bool:
        """Whether it is done or has failed; needs no lock."""
        return self.state is DONE or self.state is FAILED

    def roused(self) -> bool:
        """Whether it is over or a member that waits can help; needs no lock."""
        return (
            self.state is DONE
            or self.state is FAILED
            or (self.chunks is not None and self.chunks.left())
        )

    def missing(self) -> Collection[int]:
        """Members that have not joined."""
        return [rank for rank in self.group.ranks if rank not in self.contributions]

    def members(self) -> Collection[int]:
        """Members that have joined."""
        return list(self.contributions)

    def call_of(self, rank: int) -> Call | None:
        """The call with which a member has joined."""
        contribution = self.contributions.get(rank)
        return contribution.call if contribution is not None else None

    def title(self) -> str:
        """Its name, without the missing members."""
        return self.first.title

    def __str__(self) -> str:
        missing = self.missing()
        return self.title() + (f" (missing: {name_ranks(missing)})" if missing else "")


class Reception(Wait):
    """One worker's wait for a message from one of some senders.

    `patient`: the user gave a timeout, so a sender that is idle may be sent to work later.
    """

    __slots__ = ("call", "messages", "pairs", "patient")

    def __init__(
        self, messages: MessageQueue, pairs: Sequence[Pair], call: Call, patient: bool = False
    ) -> None:
        super().__init__(call.ordinal)
        self.messages, self.pairs, self.call, self.patient = messages, pairs, call, patient

    @property
    def senders(self) -> list[int]:
        """The members of which one must send."""
        return [pair[0] for pair in self.pairs]

    def settled(self) -> bool:
        """Whether a message is there or none can come; needs no lock."""
        return self.error is not None or any(pair in self.messages for pair in self.pairs)

    def missing(self) -> Collection[int]:
        """The sender, while it has sent nothing; of several senders none is needed."""
        return () if len(self.pairs) > 1 or self.settled() else (self.pairs[0][0],)

    def members(self) -> Collection[int]:
        """The receiver."""
        return (self.call.rank,)

    def call_of(self, rank: int) -> Call | None:
        """The call of the receiver."""
        return self.call if rank == self.call.rank else None

    def __str__(self) -> str:
        sender = self.pairs[0][0] if len(self.pairs) == 1 else None
        return reception_title(self.call, sender, self.pairs[0][2])


class Board:
    """Collectives that are open or have failed, messages, and which worker waits for what.

    Attributes
    ----------
    cut
        The call in which the last interrupt ended: what is from before it is void.
    on_fail
        Called with each wait that fails, under the lock.
    """

    def __init__(self) -> None:
        self.lock = plain_lock()
        self.open: dict[Key, PendingCollective] = {}
        self.failed: dict[Key, PendingCollective] = {}
        self.messages = MessageQueue()
        self.waiting: dict[int, Wait] = {}
        self.cut = 0
        self.on_fail: Callable[[Wait], None] | None = None
        self._counts: dict[int, CallCounts] = {}

    # -- collectives -------------------------------------------------------------------------

    def join(self, contribution: Contribution) -> PendingCollective:
        """Enter a contribution; with the last the collective is RUNNING, or it failed before."""
        call = contribution.call
        worker: Peer = call.worker
        rank, group = call.rank, call.group
        if worker.resumed_at > self.cut:
            self.refresh(worker)
        if self.failed:
            self.sweep(worker.peers)
        if call.number < 0:  # or it was counted where it was made
            counts = self._counts.get(rank)
            if counts is None:
                counts = self._counts[rank] = CallCounts()
            call.number = counts.number(call)
        key = (group.ranks, group.tag, call.ordinal, call.number)
        collective = self.failed.get(key) or self.open.get(key)
        if collective is None:
            collective = self.open[key] = PendingCollective(call)
        if collective.state is FAILED:
            call.close(FAILED)
            collective.contributions[rank] = Contribution(call)
            self.sweep(worker.peers)
            return collective
        signature, first = call.signature, collective.first.signature
        if signature != first and not signature.agrees(first):
            collective.disagree = True
        collective.contributions[rank] = contribution
        if len(collective.contributions) == len(group.ranks):
            collective.state = RUNNING
            collective.executor = rank
            del self.open[key]
        elif not call.asynchronous:
            self.waiting[rank] = collective
        return collective

    def finish(self, collective: PendingCollective) -> None:
        """Say that all is done."""
        if collective.state is RUNNING:
            collective.state = DONE
            waiting = self.waiting
            for rank, contribution in collective.contributions.items():
                contribution.call.close(DONE)
                if waiting.get(rank) is collective:
                    del waiting[rank]

    def fail(self, wait: Wait, error: type[CollectiveError], text: str) -> None:
        """End a wait for all its members, those that come later too; the first reason stays."""
        if wait.error is not None or (isinstance(wait, PendingCollective) and wait.state is DONE):
            return
        wait.error = (error, text)
        for rank in wait.members():
            call = wait.call_of(rank)
            if call is not None:
                call.close(FAILED)
            self.rest(rank, wait)
        if isinstance(wait, PendingCollective):
            wait.state = FAILED
            self.open.pop(wait.key, None)
            if wait.missing():
                self.failed[wait.key] = wait
            for rank, contribution in wait.contributions.items():
                wait.contributions[rank] = Contribution(contribution.call)
        if self.on_fail is not None:
            self.on_fail(wait)

    def rest(self, rank: int, wait: Wait) -> None:
        """Say that a worker no longer waits."""
        if self.waiting.get(rank) is wait:
            del self.waiting[rank]

    # -- order -----------------------------------------------------------------------------

    def refresh(self, worker: Peer) -> None:
        """Drop what is from before the last interrupt, which ended it on all workers."""
        cut = worker.resumed_at
        if cut <= self.cut:
            return
        self.cut = cut
        for collective in [
            collective for collective in self.open.values() if collective.ordinal < cut
        ]:
            self.fail(collective, CollectiveAborted, f"{collective} was ended by an interrupt")
        for key in [key for key in self.failed if key[2] < cut]:
            del self.failed[key]
        for rank in [rank for rank, wait in self.waiting.items() if wait.ordinal < cut]:
            del self.waiting[rank]
        self.messages.cut(cut)

    def replaced(self, rank: int) -> None:
        """Forget what a worker that was lost has waited for, sent and counted."""
        self.waiting.pop(rank, None)
        self._counts.pop(rank, None)
        self.messages.forget(rank)

    def sweep(self, peers: Mapping[int, Peer]) -> None:
        """Forget failed collectives to which nobody can come any more, and void messages."""
        self.messages.purge(peers)
        for key, collective in self.failed.copy().items():
            if not any(_may_come(peers.get(rank), collective) for rank in collective.missing()):
                del self.failed[key]

    def summary(self) -> tuple[int, int, tuple[str, ...]]:
        """How many collectives and messages it holds, and a line for each thing waited for."""
        held = [str(collective) for collective in self.open.values()]
        held += [f"{collective.title()} (failed)" for collective in self.failed.values()]
        receivers = [str(wait) for wait in self.waiting.values() if isinstance(wait, Reception)]
        return len(held), len(self.messages), tuple(held + receivers)


def _may_come(peer: Peer | None, collective: PendingCollective) -> bool:
    return peer is not None and not peer.ended and peer.executed <= collective.ordinal
