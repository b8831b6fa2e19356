"""Collectives of workers in several processes: collects their calls, and tells them to go on.

Pure state, under the coordinator's lock. When all members have called, one of two things happens:
if their data came with the calls, the coordinator sends all of it to all, and the collective is
over; otherwise the members carry it out over a process group, and each says when it has done so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.errors import CollectiveAborted, CollectiveError
from ..board import diagnosis
from ..board.handles import GroupHandle, GroupHandles
from ..board.ledger import Ledger
from ..board.peers import Peer
from ..board.rendezvous import RUNNING, Board, Contribution, PendingCollective
from ..call import FAILED, Call
from . import protocol
from .protocol import SERVICE, Like

Data = bytes | tuple[bytes, ...] | None
"""What a member contributes, if that may go with its call: the same to all, or a part each."""


class RemoteCall(Call):
    """A call of a worker, made of what `protocol.call_out` has sent; see `Call`.

    Attributes
    ----------
    seq
        The number that its worker has given to it.
    data
        What it gives; None: too much to go through the coordinator.
    waits_since
        When its worker began to wait for it; 0.0: it does not.
    over
        Whether the worker has done its part.
    """

    __slots__ = ("data", "over", "reported_missing", "seq", "waits_since")

    def __init__(
        self, worker: Any, seq: int, ordinal: int, number: int, alike: bytes, data: Data = None
    ) -> None:
        name, group, signature, site, timeout, asynchronous, patient = protocol.alike_in(alike)
        super().__init__(name, worker, group, signature, site, timeout, asynchronous, ordinal)
        self.seq, self.number, self.patient, self.data = seq, number, patient, data
        self.over = False
        self.reported_missing: tuple[int, ...] = ()
        self.waits_since = 0.0


Tell = Callable[[int, str, tuple[Any, ...]], None]

GRACE = 0.3  # seconds from what a library says to what we say: a better reason may be on its way


class Part:
    """What collectives and messages share: the coordinator's state, and a way to tell workers."""

    def __init__(
        self,
        board: Board,
        peers: Mapping[int, Peer],
        ledger: Ledger,
        handles: GroupHandles,
        tell: Tell,
    ) -> None:
        self._board, self._peers, self._ledger = board, peers, ledger
        self._handles, self._tell = handles, tell

    def _refuse(self, call: RemoteCall, kind: type[CollectiveError], text: str) -> None:
        """Tell a worker that its call has failed."""
        call.close(FAILED)
        aborted = issubclass(kind, CollectiveAborted)
        self._tell(call.rank, SERVICE, (protocol.FAIL, call.seq, aborted, text))


class Collectives(Part):
    """The collectives of one session."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._of: dict[tuple[int, int], PendingCollective] = {}  # by rank and number of the call
        self._handle_of: dict[int, GroupHandle] = {}  # by the id of a collective that uses one
        self._broken: list[tuple[float, PendingCollective, str]] = []

    def join(
        self,
        rank: int,
        seq: int,
        ordinal: int,
        number: int,
        alike: bytes,
        parts: tuple[Any, Any] | None,
        data: Data,
    ) -> None:
        """Take in a worker's call; `parts` describe its tensors, in an all-to-all only."""
        board, worker = self._board, self._peers[rank]
        call = RemoteCall(worker, seq, ordinal, number, alike, data)
        self._ledger.enter(call)
        if ordinal < board.cut:
            text = f"{call.signature.op} in {call.group} was ended by an interrupt"
            self._refuse(call, CollectiveAborted, text)
            return
        contribution = Contribution(call)
        if parts is not None:
            likes: list[Any] = [[Like.of(kind) for kind in kinds] for kinds in parts]
            contribution.srcs, contribution.outs = likes
        collective = board.join(contribution)
        self._of[rank, seq] = collective
        if not call.asynchronous:
            call.waits_since = call.began
        if call.number == 0 and len(board.open) > 1:
            diagnosis.abandon(board, worker)
        if collective.state is RUNNING:
            self._all_there(collective, worker)
        elif collective.state is FAILED and (rank, seq) in self._of:  # had failed before
            self.report(collective, rank)

    def _all_there(self, collective: PendingCollective, worker: Peer) -> None:
        text = diagnosis.disagreement(self._board, collective, worker)
        calls: list[Any] = []
        given: list[Any] = []
        common = True  # whether a member contributes the same for all; else a part for each
        for rank in collective.group.ranks:
            if text is None and self._peers[rank].ended:
                text = self.account(collective, worker)
            call: Any = collective.contributions[rank].call
            calls.append(call)
            given.append(call.data)
            common = common and type(call.data) is bytes
            call.data = None
        if text is not None:
            self._board.fail(collective, CollectiveError, text)
        elif None in given:
            self._run(collective, calls)
        else:
            self._go(collective, calls, given, common)

    def account(self, collective: PendingCollective, worker: Peer) -> str:
        """Say that it can't complete, and what each member did."""
        return f"{collective.title()} can't complete" + diagnosis.account(
            self._board, collective, worker
        )

    def _go(
        self, collective: PendingCollective, calls: list[RemoteCall], given: list[Any], common: bool
    ) -> None:
        """Send to each member what all have contributed; the collective is over."""
        self._board.finish(collective)
        mine: Any = tuple(given) if any(given) else ()
        for place, call in enumerate(calls):
            self._of.pop((call.rank, call.seq), None)
            if not common:
                mine = tuple([one[place] if type(one) is tuple else one for one in given])
            self._tell(call.rank, SERVICE, (protocol.GO, call.seq, *mine))

    def _run(self, collective: PendingCollective, calls: list[RemoteCall]) -> None:
        """Have the members carry it out over a process group."""
        collective.abroad = True
        handle = self._handles.take(collective.group.ranks, collective.group.tag)
        self._handle_of[id(collective)] = handle
        for call in calls:
            self._tell(call.rank, SERVICE, (protocol.RUN, call.seq, handle.number))

    # -- what members say later ------------------------------------------------------------------

    def wait(self, rank: int, seq: int, patient: bool) -> None:
        """Note that a worker waits for a collective that it started before."""
        collective = self._of.get((rank, seq))
        if collective is not None:
            call = _call(collective, rank)
            call.patient |= patient
            call.waits_since = time.monotonic()
            self._board.waiting[rank] = collective

    def over(self, rank: int, seq: int) -> None:
        """Note that a member has done its part over a process group."""
        collective = self._of.get((rank, seq))
        if collective is None:
            return
        _call(collective, rank).over = True
        self._board.rest(rank, collective)
        if all(_call(collective, member).over for member in collective.group.ranks):
            self._handles.give_back(self._handle_of.pop(id(collective)))
            self._board.finish(collective)
            for member in collective.group.ranks:
                self._of.pop((member, _call(collective, member).seq), None)

    def broken(self, rank: int, seq: int, text: str) -> None:
        """Note that a library has failed in a member's part; it is reported a little later."""
        collective = self._of.get((rank, seq))
        if collective is not None and not any(one is collective for _, one, _ in self._broken):
            self._broken.append((time.monotonic() + GRACE, collective, text))

    def left(self, rank: int, seq: int, why: str) -> None:
        """Fail a collective of which a member has given up its part."""
        collective = self._of.get((rank, seq))
        if collective is not None:
            text = f"{collective} was left by worker {rank}: {why}"
            self._board.fail(collective, CollectiveAborted, text)

    def collective_of(self, rank: int, seq: int) -> PendingCollective | None:
        """The collective in which a worker's call takes part, None if it is over."""
        return self._of.get((rank, seq))

    # -- ends --------------------------------------------------------------------------------------

    def report(self, collective: PendingCollective, only: int | None = None) -> None:
        """Tell the members that have called, or one of them, that it has failed."""
        assert collective.error is not None
        kind, text = collective.error
        for rank in collective.members():
            if only is not None and rank != only:
                continue
            call = _call(collective, rank)
            call.data = None
            if self._of.pop((rank, call.seq), None) is not None and not call.over:
                self._refuse(call, kind, text)
        handle = self._handle_of.pop(id(collective), None)
        if handle is not None:
            self._handles.drop(handle)

    def cut(self, ordinal: int) -> None:
        """Fail the collectives from before `ordinal`, at which an interrupt has ended."""
        for collective in self._of_before(ordinal):
            self._board.fail(
                collective, CollectiveAborted, f"{collective.title()} was ended by an interrupt"
            )

    def lost(self, rank: int) -> None:
        """Fail what a worker that has died took part in over a process group."""
        for collective in {id(one): one for one in self._of.values()}.values():
            call = collective.call_of(rank)
            if collective.state is RUNNING and isinstance(call, RemoteCall) and not call.over:
                text = self.account(collective, self._peers[rank])
                self._board.fail(collective, CollectiveError, text)

    def replaced(self, rank: int) -> None:
        """Fail what a lost worker took part in, and forget its calls: their numbers come again."""
        for collective in {id(c): c for (r, _), c in self._of.items() if r == rank}.values():
            text = self.account(collective, self._peers[rank])
            self._board.fail(collective, CollectiveError, text)
        for key in [key for key in self._of if key[0] == rank]:
            del self._of[key]

    def due(self) -> float | None:
        """When `look` has something to do."""
        return self._broken[0][0] if self._broken else None

    def look(self, now: float) -> None:
        """Fail what a library could not do."""
        due = [entry for entry in self._broken if entry[0] <= now]
        self._broken = [entry for entry in self._broken if entry[0] > now]
        for _, collective, text in due:
            self._board.fail(collective, CollectiveError, f"{collective.title()} failed in {text}")

    def _of_before(self, ordinal: int) -> list[PendingCollective]:
        found = {id(one): one for one in self._of.values() if one.ordinal < ordinal}
        return list(found.values())


def _call(collective: PendingCollective, rank: int) -> RemoteCall:
    call = collective.contributions[rank].call
    assert isinstance(call, RemoteCall)
    return call
