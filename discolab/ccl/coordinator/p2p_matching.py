"""Matches sends and receptions of workers in several processes, in the coordinator.

Pure state, under the coordinator's lock. A small tensor goes with its message; a larger one stays
where it was sent until somebody receives it, and comes then over a process group between the two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ...runtime.errors import CollectiveAborted, CollectiveError
from ..board import diagnosis
from ..board.handles import GroupHandle
from ..board.p2p_queue import Message, Pair
from ..board.rendezvous import Reception
from ..call import DONE, FAILED
from . import protocol
from .collectives import Part, RemoteCall, Tell
from .protocol import SERVICE, Like


@dataclass(slots=True, eq=False)
class RemoteMessage(Message):
    """A message; `data` is None while the sender holds it, as its `number`."""

    sender: int = -1
    number: int = 0
    data: bytes | None = None
    tell: Tell | None = None

    def drop(self) -> None:
        if self.data is None and self.tell is not None:
            self.tell(self.sender, SERVICE, (protocol.DROP, 0, self.number))


class Messages(Part):
    """The messages and receptions of one session."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # receptions that are not over, with where their messages may come from
        self._calls: dict[tuple[int, int], tuple[RemoteCall, list[Pair]]] = {}
        self._fetching: dict[tuple[int, int], tuple[RemoteCall, int, GroupHandle]] = {}

    def send(
        self,
        rank: int,
        number: int,
        wire: protocol.WireCall,
        peer: int,
        tag: str,
        direct: bool,
        data: bytes | None,
    ) -> None:
        """A worker sends a message; `data` is None if it keeps what is too large."""
        board = self._board
        call = RemoteCall(self._peers[rank], number, *wire)
        self._ledger.enter(call)
        call.close(DONE)
        dtype, shape = call.signature.kinds[0]
        message = RemoteMessage(
            Like(dtype, shape or ()),
            call.ordinal,
            call.site,
            (),
            direct,
            rank,
            number,
            data,
            self._tell,
        )
        pair = (rank, peer, tag)
        board.messages.put(pair, message, self._peers)
        wait = board.waiting.get(peer)
        if isinstance(wait, Reception) and pair in wait.pairs and not wait.error:
            self._serve(wait)

    def recv(
        self, rank: int, seq: int, wire: protocol.WireCall, peer: int | None, tag: str
    ) -> None:
        """A worker will receive a message; `TAKE` says when it waits for it."""
        call = RemoteCall(self._peers[rank], seq, *wire)
        self._ledger.enter(call)
        senders = [peer] if peer is not None else [r for r in call.group.ranks if r != rank]
        self._calls[rank, seq] = call, [(sender, rank, tag) for sender in senders]

    def take(self, rank: int, seq: int, patient: bool) -> None:
        """A worker waits for a message now."""
        found = self._calls.get((rank, seq))
        if found is None:
            return
        call, pairs = found
        if call.ordinal < self._board.cut:
            self._refuse(call, CollectiveAborted, f"{call.signature} was ended by an interrupt")
            return
        call.waits_since = time.monotonic()
        self._serve(Reception(self._board.messages, pairs, call, patient))

    def _serve(self, wait: Reception) -> None:
        """Deliver the oldest message to the waiting worker, or have the worker wait for one."""
        board, call = self._board, wait.call
        rank = call.rank
        assert isinstance(call, RemoteCall)
        for pair in wait.pairs:
            try:
                message = board.messages.take(pair, self._peers[rank].executed, self._peers)
            except CollectiveError as exc:
                board.rest(rank, wait)
                self._refuse(call, CollectiveError, str(exc))
                return
            if message is not None:
                board.rest(rank, wait)
                assert isinstance(message, RemoteMessage)
                self._deliver(call, pair, message)
                return
        verdict = diagnosis.lost(board, wait, self._peers[rank])
        if not diagnosis.fail(board, verdict):
            board.waiting[rank] = wait

    def _deliver(self, call: RemoteCall, pair: Pair, message: RemoteMessage) -> None:
        like = message.tensor
        head = (call.seq, pair[0], protocol.kind_out(like), protocol.site_out(message.site))
        fits = call.signature.takes(like.dtype, like.shape)
        self._forget(call)
        if not fits:
            message.drop()
            call.close(FAILED)
            self._tell(call.rank, SERVICE, (protocol.MESSAGE, *head, b""))
        elif message.data is not None:
            call.close(DONE)
            self._tell(call.rank, SERVICE, (protocol.MESSAGE, *head, message.data))
        else:
            handle = self._handles.take(tuple(sorted(pair[:2])))
            self._fetching[call.rank, call.seq] = call, pair[0], handle
            give = protocol.GIVE, 0, message.number, call.rank, handle.number
            self._tell(pair[0], SERVICE, give)
            self._tell(call.rank, SERVICE, (protocol.FETCH, *head, handle.number))

    def over(self, rank: int, seq: int) -> None:
        """A message has come over a process group."""
        found = self._fetching.pop((rank, seq), None)
        if found is not None:
            call, _, handle = found
            call.close(DONE)
            self._handles.give_back(handle)

    def broken(self, rank: int, seq: int, text: str) -> None:
        """A message could not come over a process group."""
        found = self._fetching.pop((rank, seq), None)
        if found is not None:
            call, sender, handle = found
            self._handles.drop(handle)
            gone = self._peers[sender].ended
            why = f"worker {sender} has died" if gone else text
            self._refuse(call, CollectiveError, f"{call.signature} failed: {why}")

    def left(self, rank: int, seq: int, why: str) -> None:
        """A worker does not receive what it wanted to."""
        found = self._calls.get((rank, seq))
        if found is not None:
            call = found[0]
            wait = self._board.waiting.get(rank)
            if isinstance(wait, Reception) and wait.call is call:
                self._board.rest(rank, wait)
            call.close(FAILED)
            self._forget(call)
        self.broken(rank, seq, why)

    def reception_of(self, rank: int, seq: int) -> Reception | None:
        """The wait of a worker for a message."""
        wait = self._board.waiting.get(rank)
        if (
            isinstance(wait, Reception)
            and isinstance(wait.call, RemoteCall)
            and wait.call.seq == seq
        ):
            return wait
        return None

    def available(self, rank: int, seq: int, ahead: int) -> bool:
        """Whether so many messages are there for a reception, or none can come."""
        found = self._calls.get((rank, seq))
        if found is None:
            return True
        call, pairs = found
        messages = self._board.messages
        messages.purge(self._peers)
        if sum(messages.count(pair) for pair in pairs) >= ahead:
            return True
        wait = Reception(messages, pairs, call)
        return diagnosis.lost(self._board, wait, self._peers[rank]) is not None

    def report(self, wait: Reception) -> None:
        """Say to a receiver that its wait has failed."""
        assert wait.error is not None and isinstance(wait.call, RemoteCall)
        self._refuse(wait.call, *wait.error)

    def lost(self, rank: int) -> None:
        """A worker is no more: what it was sending or receiving over a process group won't come."""
        for receiver, seq in [
            key for key, (_, sender, _) in self._fetching.items() if rank in (key[0], sender)
        ]:
            self.broken(receiver, seq, f"worker {rank} has died")

    def replaced(self, rank: int) -> None:
        """Forget the receptions of a lost worker: their numbers come again."""
        for key in [key for key in self._calls if key[0] == rank]:
            del self._calls[key]

    def cut(self, ordinal: int) -> None:
        """An interrupt has ended what is from before `ordinal`."""
        for key, (call, _, handle) in self._fetching.copy().items():
            if call.ordinal < ordinal:
                del self._fetching[key]
                self._handles.drop(handle)
        for call in [call for call, _ in self._calls.values() if call.ordinal < ordinal]:
            self._forget(call)

    def _refuse(self, call: RemoteCall, kind: type[CollectiveError], text: str) -> None:
        self._forget(call)
        super()._refuse(call, kind, text)

    def _forget(self, call: RemoteCall) -> None:
        self._calls.pop((call.rank, call.seq), None)
