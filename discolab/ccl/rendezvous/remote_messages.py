"""Messages between workers in several processes, as one of them sends and receives them.

What is sent is copied at once. Something small goes to the coordinator with the message; the copy
of something large stays here, and goes over a process group when the coordinator says that somebody
receives it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...runtime.errors import (
    CollectiveAborted,
    CollectiveError,
    WaitTimeoutError,
    WorkerInterrupted,
)
from .. import moves
from ..backends import wire
from ..backends.handle import do
from ..backends.steps import Exchange
from ..board.messages import Message
from ..call import DONE, Call
from ..coordinator import protocol
from ..coordinator.protocol import Like
from .client import CoordinatorClient
from .conductor import Conductor, Connect, ProcessGroup, Ranks
from .messages import MessageWork, P2PClient

LARGEST = 16_384  # bytes of a message that goes through the coordinator


class RemoteP2PClient(P2PClient):
    """The messages of one worker.

    `_kept` holds what was sent and not received, by the number of the message; the worker adds to
    it, and the link's thread takes from it.
    """

    def __init__(self, client: CoordinatorClient, conductor: Conductor, connect: Connect) -> None:
        super().__init__()
        self._client, self._conductor, self._connect = client, conductor, connect
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}
        client.listen(protocol.GIVE, self._give)
        client.listen(protocol.DROP, self._drop)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, call: Call, src: torch.Tensor, peer: int, tag: str) -> None:
        """Send a copy."""
        worker = call.worker
        direct = worker.current is not None and call.site is worker.current[-1]
        number = self._client.next_number()
        copy = wire.pack_bytes([src], torch.device("cpu")).cpu()
        data = copy.numpy().tobytes() if len(copy) <= LARGEST else None
        if data is None:
            for old in [n for n, (at, _) in self._kept.copy().items() if at < worker.resumed_at]:
                self._kept.pop(old, None)
            self._kept[number] = call.ordinal, copy
        self._client.tell(
            protocol.SEND,
            number,
            call.ordinal,
            peer,
            tag,
            protocol.kind_out((src.dtype, tuple(src.shape))),
            call.name,
            protocol.signature_out(call.signature),
            protocol.site_out(call.site),
            protocol.flags_of(call) | protocol.DIRECT * direct,
            data,
        )
        call.close(DONE)

    def _drop(self, number: int) -> None:
        """The coordinator has said that nobody will receive a message."""
        self._kept.pop(number, None)

    def _give(self, number: int, receiver: int, handle: int) -> None:
        """The coordinator has said that a message is received now."""
        found = self._kept.pop(number, None)
        if found is not None:
            ranks = tuple(sorted((self._client.worker.worker_id, receiver)))
            giving = _Giving(self._client, self._connect, ranks, handle, found)
            self._conductor.submit(giving)

    # -- receiving ---------------------------------------------------------------------------------

    def recv(self, call: Call, out: torch.Tensor, peer: int | None, tag: str) -> MessageWork:
        """Line up for the next message of that route."""
        work = super().recv(call, out, peer, tag)
        reception = _Reception(self._client, self._conductor, self._connect, work, out)
        work.at_coordinator = reception
        self._client.tell(
            protocol.RECV,
            reception.seq,
            call.ordinal,
            peer,
            tag,
            call.name,
            protocol.signature_out(call.signature),
            protocol.site_out(call.site),
            call.timeout,
            protocol.flags_of(call),
        )
        return work

    def _next_message(self, work: MessageWork, timeout: float | None) -> tuple[int, Message]:
        return _of(work).take(timeout)

    def _is_there(self, work: MessageWork, ahead: int) -> bool:
        reception = _of(work)
        return bool(self._client.ask(protocol.PEEK, reception.seq, ahead, what=str(reception)))

    def _gone(self, work: MessageWork) -> None:
        _of(work).leave("gone")


class _Reception:
    """One reception, as the coordinator knows it; see `Entry`."""

    def __init__(
        self,
        client: CoordinatorClient,
        conductor: Conductor,
        connect: Connect,
        work: MessageWork,
        out: torch.Tensor,
    ) -> None:
        self._client, self._conductor, self.connect = client, conductor, connect
        self._work, self._out = work, out
        self.seq = client.enter(self)
        self._found: list[tuple[int, Message]] = []
        self._error: list[Exception] = []
        self._let_go: threading.Event | None = None

    def heard(self, word: str, *rest: Any) -> None:
        """See `Entry`."""
        if word == protocol.MESSAGE:
            sender, kind, site, data = rest
            self._came(sender, kind, site, _tensor_of(data))
        elif word == protocol.FETCH:
            sender, kind, site, handle = rest
            room = torch.empty(Like.of(kind).shape, dtype=Like.of(kind).dtype)
            ranks = tuple(sorted((sender, self._work.call.rank)))
            fetching = _Fetching(self, ranks, handle, wire_view(room))
            self._let_go = fetching.let_go
            fetching.came = lambda: self._came(sender, kind, site, wire_view(room))
            self._conductor.submit(fetching)
        elif word == protocol.FAIL:
            aborted, text = rest
            self._error.append((CollectiveAborted if aborted else CollectiveError)(text))
        elif word == protocol.LATE:
            self._error.append(WaitTimeoutError(rest[0]))
        self._client.worker.wake()

    def _came(self, sender: int, kind: Any, site: Any, data: torch.Tensor) -> None:
        like = Like.of(kind)
        out = self._out
        tensor: Any = like
        if self._work.call.signature.takes(like.dtype, like.shape):
            tensor = wire.typed(data, out)
        self._found.append((sender, Message(tensor, 0, protocol.site_in(site))))
        self._client.leave(self.seq)
        self._client.worker.wake()

    def _ready(self) -> bool:
        return bool(self._found or self._error)

    def take(self, timeout: float | None) -> tuple[int, Message]:
        """Wait for the message."""
        client, worker, what = self._client, self._client.worker, self
        client.tell(protocol.TAKE, self.seq, timeout is not None)
        try:
            try:
                worker.wait_for(self._ready, what, timeout, client.check)
            except WaitTimeoutError:
                client.tell(protocol.LATE, self.seq, timeout)
                worker.wait_for(self._ready, what, None, client.check)
        except BaseException as exc:
            if not isinstance(exc, WorkerInterrupted):
                self.leave(type(exc).__name__)
            if self._let_go is not None and not self._let_go.wait(0.25):
                self._conductor.abandon()
            raise
        if self._found:
            return self._found.pop()
        raise self._error.pop()

    def leave(self, why: str) -> None:
        """Nobody waits for it any more."""
        self._client.tell(protocol.LEFT, self.seq, why)
        self._client.leave(self.seq)

    def void(self) -> bool:
        """Whether nobody waits for it any more."""
        worker = self._client.worker
        return worker.interrupts > 0 or self._work.call.ordinal < worker.resumed_at

    def tell(self, word: str, *rest: Any) -> None:
        """Say something about it to the coordinator."""
        self._client.tell(word, self.seq, *rest)

    def call_of(self, rank: int) -> Call | None:
        """See `RemoteWork`."""
        return self._work.call if rank == self._work.call.rank else None

    def __str__(self) -> str:
        sender, _, tag = self._work.route
        what = self._work.call.signature.of.removeprefix(" of ")
        whom = f"worker {sender}" if sender is not None else "any worker"
        return f"recv of {what} from {whom}" + (f" with tag {tag}" if tag else "")


class _Fetching:
    """Taking a message from a process group; see `conductor.Task`."""

    def __init__(
        self, reception: _Reception, ranks: Ranks, number: int, room: torch.Tensor
    ) -> None:
        self._reception, self._room = reception, room
        self.connect = reception.connect
        self.ranks, self.number = ranks, number
        self.let_go = threading.Event()
        self.came: Any = None

    def void(self) -> bool:
        """See `Task`."""
        return self._reception.void()

    def perform(self, end: ProcessGroup) -> None:
        """See `Task`."""
        me = self._reception._work.call.rank
        do(end, Exchange([], [(1 - self.ranks.index(me), self._room)]))

    def done(self) -> None:
        """See `Task`."""
        self.let_go.set()
        self._reception.tell(protocol.OVER)
        self.came()

    def failed(self, text: str) -> None:
        """See `Task`."""
        self.let_go.set()
        if text and not self.void():
            self._reception.tell(protocol.BROKEN, text)


class _Giving:
    """Giving a message to a process group; see `conductor.Task`. The receiver says how it went."""

    def __init__(
        self,
        client: CoordinatorClient,
        connect: Connect,
        ranks: Ranks,
        number: int,
        message: tuple[int, torch.Tensor],
    ) -> None:
        self._client, self.connect = client, connect
        self.ranks, self.number = ranks, number
        self._ordinal, self._tensor = message

    def void(self) -> bool:
        """See `Task`."""
        worker = self._client.worker
        return worker.ended or self._ordinal < worker.resumed_at

    def perform(self, end: ProcessGroup) -> None:
        """See `Task`."""
        me = self._client.worker.worker_id
        do(end, Exchange([(1 - self.ranks.index(me), self._tensor)], []))

    def done(self) -> None:
        """See `Task`."""

    def failed(self, text: str) -> None:
        """See `Task`."""


def wire_view(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor's bytes."""
    return moves.as_bytes(tensor).reshape(-1).view(torch.uint8)


def _tensor_of(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _of(work: MessageWork) -> _Reception:
    found: _Reception = work.at_coordinator
    return found
