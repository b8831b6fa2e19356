"""The coordinator: a session's service at which workers in several processes meet.

It has the board and the ledger that workers of one address space share (board/), and remote peers
of the workers in place of their peers; so what can't complete is found by the same rules and told
in the same words. `board.lock` guards all of it. Words to workers are sent under that lock, so that
all hear of the collectives in one order, in which they do them. The coordinator never waits for a
worker.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ...runtime.errors import CollectiveAborted
from ...runtime.services import Service, WorkerState
from ..board import diagnosis
from ..board.handles import GroupHandle, GroupHandles
from ..board.ledger import Ledger
from ..board.peers import LocalPeer, RemotePeer
from ..board.rendezvous import RUNNING, Board, PendingCollective, Reception, Wait
from . import protocol
from .collectives import Collectives
from .p2p_matching import Messages
from .protocol import SERVICE
from .stall_detector import StallDetector
from .store import KeyValueStore

_LOOKS_AT_STATISTICS = 5  # until all have ended the command in which something failed


class Coordinator(Service):
    """See the module.

    Parameters
    ----------
    connections
        The session's, to its workers: `num_workers`, `workers_here`, `tell`, `ask_states`,
        `sent`, `lost`.

    Attributes
    ----------
    peers
        What is known of the workers, by rank.
    """

    def __init__(self, connections: Any) -> None:
        self._connections, self._tell = connections, connections.tell
        self.board = Board()
        self.ledger = Ledger()
        self.peers: dict[int, Any] = {}
        here = connections.workers_here()
        for rank in range(connections.num_workers):
            if rank in here:
                self.peers[rank] = LocalPeer(here[rank], self.peers)
            else:
                self.peers[rank] = RemotePeer(rank, self.peers, self._counter(rank))
        self._stores = {
            "store": KeyValueStore(self._answer),
            "groups": KeyValueStore(self._answer),
        }
        self.handles = GroupHandles(self._close_group)
        parts = (self.board, self.peers, self.ledger, self.handles, self._tell)
        self._collectives, self._messages = Collectives(*parts), Messages(*parts)
        self._stalls = StallDetector(self.board, self.peers, self._tell)
        self._port = 0
        self.board.on_fail = self._failed
        messages, collectives = self._messages, self._collectives
        self._do: dict[str, Callable[..., None]] = {
            protocol.JOIN: collectives.join,
            protocol.WAIT: collectives.wait,
            protocol.OVER: self._over,
            protocol.BROKEN: self._broke,
            protocol.LEFT: self._left,
            protocol.LATE: self._late,
            protocol.POLL: self._poll,
            protocol.SEND: messages.send,
            protocol.RECV: messages.recv,
            protocol.TAKE: messages.take,
            protocol.PEEK: self._peek,
            protocol.STORE: self._store,
            protocol.STATISTICS: self._statistics,
            protocol.HELLO: self._hello,
            protocol.FORGET: self._forget,
            protocol.DISMISS: self._dismiss,
            protocol.USE: self._use,
        }

    # -- as a service ------------------------------------------------------------------------------

    def receive(self, rank: int, value: Any) -> None:
        kind, executed, resumed_at, *rest = value
        if kind == protocol.LOOK:
            self.look()
            return
        board, stalls = self.board, self._stalls
        with board.lock:
            self.peers[rank].note(executed, resumed_at)
            if resumed_at > board.cut:
                self._cut(rank)
            self._do[kind](rank, *rest)
            if board.waiting:
                stalls.wanted()
            ask = stalls.to_ask() if stalls.asking else None
        if ask:
            self._ask(ask)

    def state(self, rank: int, state: WorkerState) -> None:
        with self.board.lock:
            self.peers[rank].update(state)
            if state.resumed_at > self.board.cut:
                self._cut(rank)
            self._stalls.answered(rank)
            ask = self._stalls.to_ask()
        self._ask(ask)

    def lost(self, rank: int) -> None:
        with self.board.lock:
            self.peers[rank].lost(bool(self._connections.lost.get(rank, "died")))
            self._collectives.lost(rank)
            self._messages.lost(rank)
            for store in self._stores.values():
                store.lost(rank)
            self.handles.leave(rank)
            diagnosis.abandon(self.board, self.peers[rank])
            self.board.sweep(self.peers)
            self._stalls.answered(rank)
            ask = self._stalls.to_ask()
        self._ask(ask)

    def replaced(self, rank: int, executed: int) -> None:
        """See `Service`; process groups with that worker were dropped when it was lost."""
        with self.board.lock:
            self._collectives.replaced(rank)
            self._messages.replaced(rank)
            peer = RemotePeer(rank, self.peers, self._counter(rank), joined_at=executed)
            peer.resumed_at = self.board.cut
            self.peers[rank] = peer
            self.board.replaced(rank)
            self.board.sweep(self.peers)

    def next_look(self) -> float | None:
        with self.board.lock:
            dues = [self._stalls.due(), self._collectives.due()]
            if self._stores["store"].askers:
                dues += self._askers_due()
        return min(filter(None, dues), default=None)

    def look(self) -> None:
        """See `Service`; also on the thread of worker 0, while that waits."""
        now = time.monotonic()
        with self.board.lock:
            self._stalls.look(now)
            self._collectives.look(now)
            if any(due <= now for due in self._askers_due()):
                self._look_at_askers(now)
            ask = self._stalls.to_ask()
        self._ask(ask)

    def close(self) -> None:
        """See `Service`."""

    def refresh(self, seconds: float) -> None:
        """Have all workers say what they do; waits for that, but not longer than so many seconds.

        From then on each of `peers` has as `waiting_for` what it waits for here.
        """
        came = threading.Event()
        with self.board.lock:
            self._stalls.inquire(self.peers, time.monotonic(), came.set)
            ask = self._stalls.to_ask()
        self._ask(ask)
        came.wait(seconds)
        with self.board.lock:
            for rank, peer in self.peers.items():
                peer.waiting_for = self.board.waiting.get(rank)

    # -- inside ------------------------------------------------------------------------------------

    def _close_group(self, handle: GroupHandle) -> None:
        """The process group is not used any more; forget how its members have found each other."""
        self._stores["groups"].forget(f"{handle.number}/")
        for rank in handle.ranks:
            self._tell(rank, SERVICE, (protocol.CLOSE, 0, handle.ranks, handle.number))

    def _answer(self, rank: int, ticket: int, value: Any) -> None:
        self._tell(rank, SERVICE, (protocol.ANSWER, ticket, value))

    def _counter(self, rank: int) -> Callable[[], int]:
        return lambda: int(self._connections.sent.get(rank, 0))

    def _ask(self, ranks: list[int]) -> None:
        """Ask workers what they are doing; without the lock."""
        if ranks:
            self._connections.ask_states(ranks)

    def _failed(self, wait: Wait) -> None:
        if isinstance(wait, PendingCollective):
            self._collectives.report(wait)
        elif isinstance(wait, Reception):
            self._messages.report(wait)

    def _cut(self, rank: int) -> None:
        """An interrupt has ended everything that is from before it, on all workers."""
        peer = self.peers[rank]
        self._collectives.cut(peer.resumed_at)
        self._messages.cut(peer.resumed_at)
        self.board.refresh(peer)

    # -- what workers say --------------------------------------------------------------------------

    def _over(self, rank: int, seq: int) -> None:
        self._collectives.over(rank, seq)
        self._messages.over(rank, seq)

    def _broke(self, rank: int, seq: int, text: str) -> None:
        self._collectives.broken(rank, seq, text)
        self._messages.broken(rank, seq, text)

    def _left(self, rank: int, seq: int, why: str) -> None:
        self._collectives.left(rank, seq, why)
        self._messages.left(rank, seq, why)
        for store in self._stores.values():
            store.leave(rank, seq)

    def _wait_of(self, rank: int, seq: int) -> Wait | None:
        return self._collectives.collective_of(rank, seq) or self._messages.reception_of(rank, seq)

    def _late(self, rank: int, seq: int, timeout: float) -> None:
        """At a worker's deadline, tell it which members are missing, unless none is."""

        def give_up() -> None:
            wait = self._wait_of(rank, seq)
            if wait is None or wait.settled() or _is_running(wait):
                return
            text = diagnosis.gave_up(self.board, wait, self.peers[rank], timeout)
            self._tell(rank, SERVICE, (protocol.LATE, seq, text))
            if isinstance(wait, Reception):
                self.board.rest(rank, wait)  # it may be waited for once more
                return
            why = f"{wait}: worker {rank} gave up after {timeout:g} s"
            self.board.fail(wait, CollectiveAborted, why)

        wait = self._wait_of(rank, seq)
        if wait is not None and not _is_running(wait):
            missing = wait.senders if isinstance(wait, Reception) else wait.missing()
            self._stalls.inquire(missing, time.monotonic(), give_up)

    def _poll(self, rank: int, seq: int, timeout: float | None) -> None:
        """A worker polls a collective: check whether it can complete; `timeout` once it is late."""

        def judge() -> None:
            collective, peer = self._collectives.collective_of(rank, seq), self.peers[rank]
            if collective is not None:
                diagnosis.fail(self.board, diagnosis.poll(self.board, collective, peer, timeout))

        collective = self._collectives.collective_of(rank, seq)
        if collective is not None and not _is_running(collective):
            self._stalls.inquire(collective.missing(), time.monotonic(), judge)

    def _peek(self, rank: int, ticket: int, seq: int, ahead: int) -> None:
        self._answer(rank, ticket, self._messages.available(rank, seq, ahead))

    def _store(
        self, rank: int, ticket: int, ordinal: int, store: str, what: str, *args: Any
    ) -> None:
        self._stores[store].ask(rank, ticket, ordinal, what, *args)

    def _hello(self, rank: int, ticket: int) -> None:
        """What a program may ask of its place: a port that was free, the same for all; how many
        workers are on this machine, which of the machines it is, and how many there are.
        """
        if not self._port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]
        hosts = list(getattr(self._connections, "hosts", ())) or [""] * len(self.peers)
        machines = list(dict.fromkeys(hosts))
        place = machines.index(hosts[rank])
        self._answer(rank, ticket, (self._port, hosts.count(hosts[rank]), place, len(machines)))

    def _forget(self, rank: int, ranks: tuple[int, ...], tag: str) -> None:
        self.handles.forget(ranks, tag)

    def _use(self, rank: int, backend: str) -> None:
        self.peers[rank].backend = backend

    def _dismiss(self, rank: int) -> None:
        self.handles.leave(rank)

    def _statistics(self, rank: int, ticket: int, looks: int = 0) -> None:
        """What is on the board once nobody is late any more."""

        def count() -> None:
            board, peer = self.board, self.peers[rank]
            diagnosis.abandon(board, peer)
            board.sweep(self.peers)
            if board.failed and looks < _LOOKS_AT_STATISTICS:
                self._statistics(rank, ticket, looks + 1)
                return
            self._answer(rank, ticket, board.summary())

        self._stalls.inquire(self.peers, time.monotonic(), count)

    # -- workers that wait for keys ----------------------------------------------------------------

    def _askers_due(self) -> list[float]:
        """When to look at workers that wait for a key of torch's store."""
        askers = self._stores["store"].askers
        since = [asker.since for asker in askers if asker.ordinal >= 0]
        return [max(min(since), self._asked_at) + diagnosis.SECOND_LOOK] if since else []

    _asked_at = 0.0

    def _look_at_askers(self, now: float) -> None:
        self._asked_at = now + diagnosis.SECOND_LOOK

        def judge() -> None:
            for asker in self._stores["store"].hopeless(self.peers):
                self._answer(asker.rank, asker.ticket, None)

        self._stalls.inquire(self.peers, now, judge)


def _is_running(wait: Wait) -> bool:
    return isinstance(wait, PendingCollective) and wait.state is RUNNING
