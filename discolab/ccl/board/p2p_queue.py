"""Messages between workers: sent, not yet received, and still valid. Guarded by the board's lock.

A message belongs to the call in which it was sent. It may be received in a later call, but only
if its own did not fail on the sender or on the receiver: what a failed call has left is void, or
every later recv of this pair would get its neighbour's tensor. A void message is dropped, and a
recv that then can't complete says so. Only the sender counts if the session called the send itself,
as in Disco: such a message is for a later call, and the send fails where there is no next worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.actions import site_text
from ...runtime.errors import CollectiveError
from ...runtime.interpreter_lock import copied
from ..call import Site
from .peers import Peer

Pair = tuple[int, int, str]  # ranks of sender and receiver, and the tag


@dataclass(slots=True)
class Message:
    """A tensor on its way, a copy; `direct` if the session called the send, not a user's code.

    Where it is on the way between processes, `tensor` says only of what dtype and shape it is.
    """

    tensor: Any
    ordinal: int
    site: Site | None
    events: Sequence[torch.Event] = ()
    direct: bool = False

    def drop(self) -> None:
        """Nobody will receive it."""


class MessageQueue:
    """First in, first out for each pair of workers and tag. ``len()`` counts messages."""

    def __init__(self) -> None:
        self._boxes: dict[Pair, deque[Message]] = {}
        self._dropped: dict[Pair, str] = {}
        self._cut = 0

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._boxes  # needs no lock

    def __len__(self) -> int:
        return sum(len(box) for box in self._boxes.values())

    def count(self, pair: Pair) -> int:
        """How many messages are on their way."""
        return len(self._boxes.get(pair, ()))

    def put(self, pair: Pair, message: Message, peers: Mapping[int, Peer]) -> None:
        """Append a message, unless an interrupt or a failure has made it void already."""
        if message.ordinal >= self._cut:
            self._boxes.setdefault(pair, deque()).append(message)
            self._purge(pair, peers)
        else:
            message.drop()

    def take(self, pair: Pair, ordinal: int, peers: Mapping[int, Peer]) -> Message | None:
        """The oldest valid message for a recv in the call `ordinal`, removed; None without one.

        What the sender sent after it failed in that very call is for the receiver's later calls.

        Raises
        ------
        CollectiveError
            If so many calls have failed since that nobody knows whether the message is valid.
        """
        self._purge(pair, peers)
        box = self._boxes.get(pair)
        if box is None or (box[0].ordinal > ordinal and failed_in(peers.get(pair[0]), ordinal)):
            return None
        message = box.popleft()
        if not box:
            del self._boxes[pair]
        if any(failed_in(peers.get(r), message.ordinal) is None for r in _parties(pair, message)):
            message.drop()
            raise CollectiveError(
                f"recv on worker {pair[1]}: the next message from worker {pair[0]}{_at(message)} "
                "was sent too long ago: so many calls have failed since that it may belong to one "
                "of them (the message is used up)"
            )
        self._dropped.pop(pair, None)
        return message

    def dropped(self, pair: Pair) -> str:
        """A sentence on the last message that was dropped since one was received, or ""."""
        return self._dropped.get(pair, "")

    def waiting(self) -> list[tuple[Pair, list[Message]]]:
        """What is on its way, by pair."""
        return [(pair, list(box)) for pair, box in sorted(self._boxes.items())]

    def purge(self, peers: Mapping[int, Peer]) -> None:
        """Drop all void messages."""
        for pair in list(self._boxes):
            self._purge(pair, peers)

    def cut(self, ordinal: int) -> None:
        """Drop what is from before an interrupt, that which is still to be put as well."""
        self._cut = ordinal
        self._dropped.clear()
        for pair, box in self._boxes.copy().items():
            for message in box:
                if message.ordinal < ordinal:
                    message.drop()
            self._keep(pair, [message for message in box if message.ordinal >= ordinal])

    def forget(self, rank: int) -> None:
        """Drop what a worker that was lost has sent, or was to receive."""
        for pair in [pair for pair in self._boxes if rank in pair[:2]]:
            for message in self._boxes.pop(pair):
                message.drop()
            self._dropped[pair] = (
                f"a message that worker {pair[0]} sent was dropped, because worker {rank} was lost"
            )

    def _purge(self, pair: Pair, peers: Mapping[int, Peer]) -> None:
        if not any(peers[rank].failed_calls for rank in pair[:2] if rank in peers):
            return
        kept = []
        for message in self._boxes.get(pair, ()):
            parties = _parties(pair, message)
            failed = [rank for rank in parties if failed_in(peers.get(rank), message.ordinal)]
            if failed:
                message.drop()
                self._dropped[pair] = (
                    f"a message that worker {pair[0]} sent{_at(message)} in an earlier call was "
                    f"dropped, because that call failed on worker {failed[0]}"
                )
            else:
                kept.append(message)
        self._keep(pair, kept)

    def _keep(self, pair: Pair, kept: list[Message]) -> None:
        if kept:
            self._boxes[pair] = deque(kept)
        else:
            self._boxes.pop(pair, None)


def failed_in(peer: Peer | None, ordinal: int) -> bool | None:
    """Whether the call `ordinal` has failed on `peer`; None if that is forgotten."""
    if peer is None or peer.executed <= ordinal:
        return False
    calls = copied(peer.failed_calls)  # an entry is there before `executed` counts its call
    if any(number == ordinal for number, _ in calls):
        return True
    return None if len(calls) == peer.failed_calls.maxlen and calls[0][0] > ordinal else False


def _parties(pair: Pair, message: Message) -> tuple[int, ...]:
    """The members on which the call of a message must not fail."""
    return pair[:1] if message.direct else pair[:2]


def _at(message: Message) -> str:
    return "" if message.site is None else f" at {site_text(message.site)}"
