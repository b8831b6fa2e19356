"""Sending and receiving between workers: in order here, and, in one process, by the board's queue.

`P2PClient._pending` holds, for each pair and tag, the receptions that were started and not yet
waited for, in order; each belongs to the receiver's thread alone, so it needs no lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import torch

from ...runtime.errors import CollectiveAborted, CollectiveError, WaitTimeoutError
from ...runtime.worker import Worker
from .. import memory
from ..board import diagnosis
from ..board.p2p_queue import Message, failed_in
from ..board.rendezvous import Reception
from ..call import DONE, Call, kind
from ..work import CallWork
from .local import LocalRendezvous

Route = tuple[int | None, int, str]  # sender (None: any), receiver, tag


class P2PClient(ABC):
    """What some workers receive, in the order in which they began to, wherever it comes from."""

    def __init__(self) -> None:
        self._pending: dict[Route, deque[MessageWork]] = {}

    @abstractmethod
    def _work(self, route: Route, call: Call, out: torch.Tensor) -> MessageWork:
        """A reception."""

    def recv(self, call: Call, out: torch.Tensor, peer: int | None, tag: str) -> MessageWork:
        """Line up for the next message of that route."""
        route = (peer, call.rank, tag)
        line = self._line(route, call.worker)
        work = self._work(route, call, out)
        line.append(work)
        return work

    def _line(self, route: Route, worker: Worker) -> deque[MessageWork]:
        """The receptions in line, but for those whose call failed, may have, or was interrupted.

        And but for those of a worker that was lost, in whose place this one is.
        """
        line = self._pending.setdefault(route, deque())
        for work in line.copy():
            call, ordinal = work.call, work.call.ordinal
            over = ordinal < worker.resumed_at or failed_in(worker, ordinal) is not False
            if over or call.worker is not worker:
                line.remove(work)
                work.gone()
        return line

    def complete(self, work: MessageWork, timeout: float | None) -> None:
        """Serve the line up to `work`."""
        line = self._line(work.route, work.call.worker)
        if work not in line:
            raise CollectiveError(
                f"{work.call.signature} was started in a call that has failed or was stopped; "
                "nothing is received for it any more"
            )
        while not work.over:
            first = line[0]
            try:
                first.fill(*first.next_message(timeout))
            except WaitTimeoutError as exc:
                first = work  # one that gave up leaves the line, those before it stay there
                work.end(exc)
                work.gone()
                raise
            except BaseException as exc:
                left = CollectiveAborted(f"{first.call.signature} was left: {type(exc).__name__}")
                first.end(exc if isinstance(exc, Exception) else left)
                raise
            else:
                first.end(None)
            finally:
                if first in line:
                    line.remove(first)

    def available(self, work: MessageWork) -> bool:
        """Whether the line up to `work` can be served, or fails, without waiting."""
        line = self._line(work.route, work.call.worker)
        return work not in line or work.is_there(list(line).index(work) + 1)


class MessageWork(CallWork):
    """One reception. Those of one route are served in the order in which they were started."""

    def __init__(self, client: P2PClient, route: Route, call: Call, out: torch.Tensor) -> None:
        super().__init__(call)
        self._p2p, self.route, self._out = client, route, out
        self.sender: int | None = None

    @abstractmethod
    def next_message(self, timeout: float | None) -> tuple[int, Message]:
        """Wait for the message for the first reception in line; its sender, and the message."""

    @abstractmethod
    def is_there(self, ahead: int) -> bool:
        """Whether so many messages have come, the last of them for this one, or none can come."""

    def gone(self) -> None:
        """Nothing is to be received for it any more."""

    def complete(self, timeout: float | None) -> None:
        self._p2p.complete(self, timeout)

    def done(self) -> bool:
        """See `Work`; on the worker's own thread it receives what has come."""
        if not self.over and self._p2p.available(self):
            try:
                self.wait()
            except CollectiveError:
                pass  # `wait` tells it
        return self.over

    def fill(self, sender: int, message: Message) -> None:
        """Copy a message to where it belongs.

        Raises
        ------
        CollectiveError
            If it has another shape or dtype.
        """
        self.sender = sender
        got, out = message.tensor, self._out
        if not self.call.signature.takes(got.dtype, tuple(got.shape)):
            raise CollectiveError(
                f"recv{self.call.signature.of} on worker {self.call.rank}"
                f"{diagnosis.where(self.call.site)}: worker {self.sender} sent "
                f"{kind(got.dtype, got.shape)}{diagnosis.where(message.site)}; shape and dtype "
                "must be the same (the message is used up)"
            )
        memory.wait_for(message.events, (got, out))
        with torch.inference_mode():
            memory.copy(out, got.view(out.shape))
        memory.keep(got)


class LocalP2PClient(P2PClient):
    """Messages between the workers of one address space."""

    def __init__(self, rendezvous: LocalRendezvous) -> None:
        super().__init__()
        self.rendezvous = rendezvous

    def send(self, call: Call, src: torch.Tensor, peer: int, tag: str) -> None:
        """Put a copy of `src` in the message queue."""
        worker, board = call.worker, self.rendezvous.board
        copy = memory.copy_of(src)
        message = Message(copy, call.ordinal, call.site, memory.record([copy]), call.direct)
        with board.lock:
            board.refresh(worker)
            board.messages.put((worker.worker_id, peer, tag), message, worker.peers)
        worker.peers[peer].wake()
        call.close(DONE)

    def _work(self, route: Route, call: Call, out: torch.Tensor) -> MessageWork:
        return LocalMessageWork(self, route, call, out)


class LocalMessageWork(MessageWork):
    """One reception, from the board."""

    def __init__(self, client: LocalP2PClient, route: Route, call: Call, out: torch.Tensor) -> None:
        super().__init__(client, route, call, out)
        self._rendezvous = client.rendezvous
        sender, receiver, tag = route
        senders = call.group.ranks if sender is None else (sender,)
        self._pairs = [(rank, receiver, tag) for rank in senders if rank != receiver]

    def is_there(self, ahead: int) -> bool:
        worker, board = self.call.worker, self._rendezvous.board
        with board.lock:
            board.refresh(worker)
            board.messages.purge(worker.peers)
            if sum(board.messages.count(pair) for pair in self._pairs) >= ahead:
                return True
            wait = Reception(board.messages, self._pairs, self.call)
            return diagnosis.lost(board, wait, worker) is not None

    def next_message(self, timeout: float | None) -> tuple[int, Message]:
        rendezvous, worker = self._rendezvous, self.call.worker
        board = rendezvous.board
        while True:
            with board.lock:
                board.refresh(worker)
                for pair in self._pairs:
                    message = board.messages.take(pair, worker.executed, worker.peers)
                    if message is not None:
                        return pair[0], message
                patient = timeout is not None
                wait = Reception(board.messages, self._pairs, self.call, patient)
                verdict = diagnosis.lost(board, wait, worker)
                if not diagnosis.fail(board, verdict):
                    board.waiting[worker.worker_id] = wait
            try:
                if wait.error is None:
                    rendezvous.wait(wait, worker, timeout)
            finally:
                rendezvous.rest(wait, worker.worker_id)
            if wait.error is not None:
                raise wait.error[0](wait.error[1])
