"""Collectives of workers in several processes: who has come, and what all are told then.

Pure state, under the hub's lock. A meeting to which all have come is over at once if what its
members give went with their calls, and so goes to all with the word that they may go on; or the
members do it over a lane, and say when they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.errors import CollectiveAborted, CollectiveError
from ..call import FAILED
from ..groups import Group
from ..ledger import Ledger
from ..meeting import verdicts
from ..meeting.board import Board
from ..meeting.peers import Peer
from ..meeting.waits import RUNNING, Meeting, Post
from . import letters
from .calls import Data, HubCall
from .lanes import Lane, Lanes
from .letters import Like

Tell = Callable[[int, tuple[Any, ...]], None]

GRACE = 0.3  # seconds from what a library says to what we say: a better reason may be on its way


class Collectives:
    """The meetings of one session."""

    def __init__(
        self, board: Board, peers: Mapping[int, Peer], ledger: Ledger, lanes: Lanes, tell: Tell
    ) -> None:
        self._board, self._peers, self._ledger = board, peers, ledger
        self._lanes, self._tell = lanes, tell
        self._of: dict[tuple[int, int], Meeting] = {}  # by rank and number of the call
        self._lane_of: dict[int, Lane] = {}  # by the id of a meeting that uses one
        self._broken: list[tuple[float, Meeting, str]] = []

    def join(
        self,
        rank: int,
        seq: int,
        ordinal: int,
        number: int,
        ranks: tuple[int, ...],
        tag: str,
        name: str,
        signature: letters.WireSignature,
        site: letters.WireSite,
        timeout: float | None,
        flags: int,
        parts: tuple[Any, Any] | None,
        data: Data,
    ) -> None:
        """A worker calls a collective; see letters.py."""
        board, worker = self._board, self._peers[rank]
        group = Group(ranks, tag)
        call = HubCall(worker, seq, ordinal, name, group, signature, site, timeout, flags)
        call.number, call.data = number, data
        self._ledger.enter(call)
        if ordinal < board.cut:
            call.close(FAILED)
            text = f"{call.signature.op} in {group} was ended by an interrupt"
            self._tell(rank, (letters.FAIL, seq, True, text))
            return
        post = Post(call, *_likes(parts)) if parts is not None else Post(call)
        meeting = board.join(post)
        self._of[rank, seq] = meeting
        if not call.asynchronous:
            call.wait()
        if number == 0 and len(board.open) > 1:
            verdicts.abandon(board, worker)
        if meeting.state is RUNNING:
            self._all_there(meeting, worker)
        elif meeting.state is FAILED and (rank, seq) in self._of:  # had failed before
            self.told(meeting, rank)

    def _all_there(self, meeting: Meeting, worker: Peer) -> None:
        text = verdicts.disagreement(self._board, meeting, worker)
        gone = [rank for rank in meeting.group.ranks if self._peers[rank].ended]
        if text is not None or gone:
            self._board.fail(meeting, CollectiveError, text or self.account(meeting, worker))
            return
        calls = [_call(meeting, rank) for rank in meeting.group.ranks]
        if any(call.data is None for call in calls):
            self._run(meeting, calls)
        else:
            self._go(meeting, calls)

    def account(self, meeting: Meeting, worker: Peer) -> str:
        """That it can't complete, and what each member did."""
        return f"{meeting.title()} can't complete" + verdicts.account(self._board, meeting, worker)

    def _go(self, meeting: Meeting, calls: list[HubCall]) -> None:
        """What all give is there: give it to all."""
        self._finish(meeting)
        common = all(type(call.data) is bytes for call in calls)
        given: Any = tuple([call.data for call in calls])
        empty = common and not any(given)
        for place, call in enumerate(calls):
            mine: Any = () if empty else given
            if not common:
                mine = tuple([one[place] if type(one) is tuple else one for one in given])
            self._tell(call.rank, (letters.GO, call.seq, mine))
        for call in calls:
            call.data = None

    def _run(self, meeting: Meeting, calls: list[HubCall]) -> None:
        """Have the members do it over a lane."""
        meeting.abroad = True
        lane = self._lanes.take(meeting.group.ranks, meeting.group.tag)
        self._lane_of[id(meeting)] = lane
        for call in calls:
            call.data = None
            self._tell(call.rank, (letters.RUN, call.seq, lane.number))

    def _finish(self, meeting: Meeting) -> None:
        self._board.finish(meeting)
        for rank in meeting.group.ranks:
            self._of.pop((rank, _call(meeting, rank).seq), None)
            self._board.rest(rank, meeting)

    # -- what members say later ------------------------------------------------------------------

    def wait(self, rank: int, seq: int, patient: bool) -> None:
        """A worker waits for what it has started before."""
        meeting = self._of.get((rank, seq))
        if meeting is not None:
            call = _call(meeting, rank)
            call.patient |= patient
            call.wait()
            self._board.waiting[rank] = meeting

    def over(self, rank: int, seq: int) -> None:
        """A member has done its part over a lane."""
        meeting = self._of.get((rank, seq))
        if meeting is None:
            return
        _call(meeting, rank).over = True
        self._board.rest(rank, meeting)
        if all(_call(meeting, member).over for member in meeting.group.ranks):
            self._lanes.give_back(self._lane_of.pop(id(meeting)))
            self._finish(meeting)

    def broken(self, rank: int, seq: int, text: str) -> None:
        """A library could not do a member's part."""
        meeting = self._of.get((rank, seq))
        if meeting is not None and not any(one is meeting for _, one, _ in self._broken):
            self._broken.append((time.monotonic() + GRACE, meeting, text))

    def left(self, rank: int, seq: int, why: str) -> None:
        """A member does not wait any more, and will not do its part."""
        meeting = self._of.get((rank, seq))
        if meeting is not None:
            text = f"{meeting} was left by worker {rank}: {why}"
            self._board.fail(meeting, CollectiveAborted, text)

    def meeting_of(self, rank: int, seq: int) -> Meeting | None:
        """What a worker's call takes part in, while it is not over."""
        return self._of.get((rank, seq))

    # -- ends --------------------------------------------------------------------------------------

    def told(self, meeting: Meeting, only: int | None = None) -> None:
        """Say to the members that have come, or to one of them, that it has failed."""
        assert meeting.error is not None
        kind, text = meeting.error
        for rank in meeting.members():
            if only is not None and rank != only:
                continue
            call = _call(meeting, rank)
            call.data = None
            self._board.rest(rank, meeting)
            if self._of.pop((rank, call.seq), None) is not None and not call.over:
                aborted = issubclass(kind, CollectiveAborted)
                self._tell(rank, (letters.FAIL, call.seq, aborted, text))
        lane = self._lane_of.pop(id(meeting), None)
        if lane is not None:
            self._lanes.drop(lane)

    def cut(self, ordinal: int) -> None:
        """An interrupt has ended what is from before `ordinal`."""
        for meeting in self._of_before(ordinal):
            self._board.fail(
                meeting, CollectiveAborted, f"{meeting.title()} was ended by an interrupt"
            )

    def lost(self, rank: int) -> None:
        """A worker is no more: what it took part in over a lane can't complete."""
        for meeting in {id(one): one for one in self._of.values()}.values():
            call = meeting.call_of(rank)
            if meeting.state is RUNNING and isinstance(call, HubCall) and not call.over:
                text = self.account(meeting, self._peers[rank])
                self._board.fail(meeting, CollectiveError, text)

    def due(self) -> float | None:
        """When `look` has something to do."""
        return self._broken[0][0] if self._broken else None

    def look(self, now: float) -> None:
        """Fail what a library could not do."""
        due = [entry for entry in self._broken if entry[0] <= now]
        self._broken = [entry for entry in self._broken if entry[0] > now]
        for _, meeting, text in due:
            self._board.fail(meeting, CollectiveError, f"{meeting.title()} failed in {text}")

    def _of_before(self, ordinal: int) -> list[Meeting]:
        found = {id(one): one for one in self._of.values() if one.ordinal < ordinal}
        return list(found.values())


def _call(meeting: Meeting, rank: int) -> HubCall:
    call = meeting.posts[rank].call
    assert isinstance(call, HubCall)
    return call


def _likes(parts: tuple[Any, Any]) -> tuple[Any, Any]:
    """Of an all-to-all: what its tensors are like, for they may be different on each member."""
    srcs, outs = ([Like.of(kind) for kind in kinds] for kinds in parts)
    return srcs, outs
