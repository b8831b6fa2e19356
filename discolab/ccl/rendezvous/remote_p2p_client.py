"""Messages between workers in several processes, as one of them sends and receives them.

What is sent is copied at once. Something small goes to the coordinator with the message; the copy
of something large stays here, and goes over a process group when the coordinator says that somebody
receives it.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import memory
from ..backends.exchanges import do
from ..backends.steps import Exchange
from ..board.p2p_queue import Message
from ..call import DONE, Call, reception_title
from ..coordinator import protocol
from ..coordinator.protocol import Like
from .client import CoordinatorClient
from .conductor import Conductor, Connect, ProcessGroup, Task
from .p2p_client import MessageWork, P2PClient, Route
from .remote import RemoteWait, error_of

LARGEST = 16_384  # bytes of a message that goes through the coordinator


class RemoteP2PClient(P2PClient):
    """The messages of one worker.

    `_kept` holds what was sent and not received, by the number of the message; the worker adds to
    it, and the link's thread takes from it.
    """

    def __init__(self, client: CoordinatorClient, conductor: Conductor, connect: Connect) -> None:
        super().__init__()
        self.client, self.conductor, self.connect = client, conductor, connect
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}
        client.listen(protocol.GIVE, self._give)
        client.listen(protocol.DROP, self._drop)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, call: Call, src: torch.Tensor, peer: int, tag: str) -> None:
        """Send a copy."""
        number = self.client.next_number()
        data = memory.data_of([src]) if src.nbytes <= LARGEST else None
        if data is None:
            copy = memory.packed([src], torch.device("cpu")).cpu()
            cut = call.worker.resumed_at
            for old in [n for n, (ordinal, _) in self._kept.copy().items() if ordinal < cut]:
                self._kept.pop(old, None)
            self._kept[number] = call.ordinal, copy
        self.client.tell(
            protocol.SEND, number, protocol.call_out(call), peer, tag, call.direct, data
        )
        call.close(DONE)

    def _drop(self, number: int) -> None:
        """The coordinator has said that nobody will receive a message."""
        self._kept.pop(number, None)

    def _give(self, number: int, receiver: int, handle: int) -> None:
        """The coordinator has said that a message is received; the receiver says how it went."""
        kept = self._kept.pop(number, None)
        if kept is None:
            return
        ordinal, tensor = kept
        worker = self.client.worker
        ranks, peer = _pair(worker.worker_id, receiver)

        def void() -> bool:
            return worker.ended or ordinal < worker.resumed_at

        def perform(end: ProcessGroup) -> None:
            do(end, Exchange([(peer, tensor)], []))

        self.conductor.submit(Task(ranks, handle, self.connect, void, perform))

    # -- receiving ---------------------------------------------------------------------------------

    def recv(self, call: Call, out: torch.Tensor, peer: int | None, tag: str) -> MessageWork:
        """Line up for the next message of that route."""
        work = super().recv(call, out, peer, tag)
        assert isinstance(work, RemoteMessageWork)
        work.tell(protocol.RECV, protocol.call_out(call), peer, tag)
        return work

    def _work(self, route: Route, call: Call, out: torch.Tensor) -> MessageWork:
        return RemoteMessageWork(self, route, call, out)


class RemoteMessageWork(RemoteWait, MessageWork):
    """One reception, of which the coordinator knows."""

    def __init__(
        self, client: RemoteP2PClient, route: Route, call: Call, out: torch.Tensor
    ) -> None:
        MessageWork.__init__(self, client, route, call, out)
        self._received: list[tuple[int, Message]] = []
        self._refused: list[Exception] = []
        RemoteWait.__init__(self, client.client, client.conductor, client.connect, call)

    def receive(self, word: str, *rest: Any) -> None:
        if word == protocol.MESSAGE:
            sender, kind, site, data = rest
            self._take(sender, kind, site, torch.frombuffer(bytearray(data or b"\0"), dtype=_BYTE))
        elif word == protocol.FETCH:
            self._fetch(*rest)
        else:
            error = error_of(word, rest)
            assert error is not None
            self._refused.append(error)
        self.call.worker.wake()

    def _fetch(self, sender: int, kind: Any, site: Any, handle: int) -> None:
        """Have the conductor take the message from a process group."""
        like = Like.of(kind)
        data = memory.as_bytes(torch.empty(like.shape, dtype=like.dtype))
        ranks, peer = _pair(self.call.rank, sender)

        def perform(end: ProcessGroup) -> None:
            do(end, Exchange([], [(peer, data)]))

        def done() -> None:
            self._take(sender, kind, site, data)

        self._submit(ranks, handle, perform, done)

    def _take(self, sender: int, kind: Any, site: Any, data: torch.Tensor) -> None:
        """The message has come; `data` are its bytes, if it is what the worker wants."""
        like = Like.of(kind)
        tensor: Any = like
        if self.call.signature.takes(like.dtype, like.shape):
            tensor = memory.typed(data[: self._out.nbytes], self._out)
        self._received.append((sender, Message(tensor, 0, protocol.site_in(site))))
        self._client.leave(self.seq)
        self.call.worker.wake()

    # -- on the worker's thread ------------------------------------------------------------------

    def next_message(self, timeout: float | None) -> tuple[int, Message]:
        self.tell(protocol.TAKE, timeout is not None)
        self._await(self._is_over, lambda: True, timeout, self._client.check)
        if self._received:
            return self._received.pop()
        raise self._refused.pop()

    def _is_over(self) -> bool:
        return bool(self._received or self._refused)

    def is_there(self, ahead: int) -> bool:
        return bool(self._client.ask(protocol.PEEK, self.seq, ahead, what=str(self)))

    def gone(self) -> None:
        self.tell(protocol.LEFT, "gone")
        self._client.leave(self.seq)

    def _leave(self, exc: BaseException) -> None:
        super()._leave(exc)
        self._client.leave(self.seq)

    def __str__(self) -> str:
        return reception_title(self.call, self.route[0], self.route[2])


_BYTE = torch.uint8


def _pair(me: int, other: int) -> tuple[tuple[int, int], int]:
    """The ranks of the process group of two workers, and the other one's place in it."""
    return (min(me, other), max(me, other)), int(other > me)
