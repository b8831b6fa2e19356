"""A node: one process of a session, in which some ranks live, and what is under way there.

On threads there is one node with everybody. Else node 0 has the controller and worker 0, node r has
worker r. Within a node calls pass by reference; to other nodes they go as messages. A node has what
all of rpc needs: where each rank lives, the tables of calls, threads that serve them, connections
to other nodes, the references. The parts above it (calls, streams, autograd) say in `HANDLERS` what
they do with messages of their kinds.

`lock` guards the pools, the fates of nodes, and what `references` has. Of `calls` and `serving`
single operations are used, which need no lock. The router's receiving thread calls `deliver` and
`peer_lost`, so whatever they call must be quick; any thread calls the rest.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..runtime.controller import check_timeout
from ..runtime.errors import DiscoError, SessionError, session_closed
from ..runtime.interrupts import reentrant_lock, shield
from ..runtime.worker import Worker, current_worker_or_none
from . import node_protocol
from .errors import WorkerLostError, restarted, session_over
from .housekeeping import PERIOD, Housekeeping
from .lending import Lent
from .names import CONTROLLER, WorkerInfo, name_of, rank_of
from .outcome import Outcome
from .pool import Chore, Pool
from .refs.records import Keepalive
from .refs.table import ReferenceTable
from .router import Router

DEFAULT_TIMEOUT = 60.0  # seconds, as in PyTorch RPC
UNSET = -1.0  # a timeout that says nothing, as None; PyTorch's programs write it
_OPEN = 10.0  # seconds that making a router may take
_RETRY = 0.25  # seconds between two interrupts of a call that goes on


class PendingCall(Protocol):
    """What a node knows of a call that is under way: here as the caller's, or served here."""

    caller: int
    callee: int
    at: int
    due: float | None
    settled: bool

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Say what came of it."""

    def fail(self, error: Any) -> None:
        """Settle it with an error, and keep nothing alive for it."""

    def abort(self, error: Any) -> None:
        """Give it up, with an error for whoever waits for it."""

    def end(self, why: str) -> None:
        """Have the callee end it."""

    def time_out(self) -> None:
        """End it: its deadline is over."""


class Autograd(Protocol):
    """What calls need of distributed autograd, on one node; see autograd/tensor_crossings.py.

    Attributes
    ----------
    contexts
        Its table of contexts.
    """

    contexts: Any

    def current(self) -> Any:
        """The calling thread's context, None if it is in none."""

    def running_in(self, context: Any) -> AbstractContextManager[None]:
        """Within it a context is the calling thread's current one."""

    def context_of(self, id: int) -> Any:
        """The context of that id, as this node knows it."""

    def leave(
        self,
        context: Any,
        value: Any,
        to_rank: int,
        to_node: int,
        from_rank: int | None = None,
    ) -> tuple[Any, tuple[int, ...]]:
        """What is to be sent for a value that goes to another rank, and its tracked tensors."""

    def arrive(
        self,
        context: Any,
        value: Any,
        from_rank: int,
        from_node: int,
        tracked: tuple[int, ...],
    ) -> Any:
        """What a value is that came from another node."""

    def peer_lost(self, node: int) -> None:
        """Another node has died."""

    def close(self) -> None:
        """The session ends."""


class Node:
    """See the module.

    Parameters
    ----------
    rank
        Of the worker; 0 in the controller's process.
    workers
        Those of this process, by rank.
    nodes
        On which node each worker lives, by rank.

    Attributes
    ----------
    id
        The number of this node; see directory.py.
    default_timeouts
        By rank, the seconds for calls that say nothing; None: no limit. Others' have
        `DEFAULT_TIMEOUT`.
    names
        What ranks are called if a program has named them (compat/).
    calls
        Those that were made here and are under way, by their numbers.
    failed
        Calls that have failed, with weak references to the callers that may still ask for it.
    serving
        Those of other nodes that are under way here, by the node and its number.
    lost
        What became of nodes that have died.
    frozen
        Of nodes that are shown not to run, how; they may come back.
    router
        The connections to other nodes; None where there are none.
    opened
        Set once there is a router.
    """

    make_autograd: ClassVar[Callable[[Node], Autograd]]  # autograd/ sets it

    def __init__(self, rank: int, workers: Mapping[int, Worker], nodes: Sequence[int]) -> None:
        self.rank = rank
        self.id = id = nodes[rank]
        self.num_workers = num_workers = len(nodes)
        self._nodes = [*nodes, nodes[0]]  # the last one, [-1], is the controller's
        self.workers = dict(workers)
        self.alone = len(workers) == num_workers
        self.lock = reentrant_lock()
        self.closed = False
        self.default_timeouts: dict[int, float | None] = {}
        self.names: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.frozen: dict[int, str] = {}
        self.calls: dict[int, PendingCall] = {}
        self.failed: deque[tuple[weakref.ref[Any], Outcome]] = deque()
        self.serving: dict[tuple[int, int], PendingCall] = {}
        self.numbers = itertools.count(1)  # of calls
        self.router: Router | None = None
        self.opened = threading.Event()
        self.housekeeping = Housekeeping(
            f"{id}", self._add_threads, (PERIOD, self._tidy), (_RETRY, self._retry_interrupts)
        )
        self.references = ReferenceTable(
            id,
            self._nodes,
            self.lock,
            lambda to, message: self.notify(to, node_protocol.REFERENCES, message),
            self.housekeeping.begin,
        )
        self._pools: dict[int, Pool] = {}
        self._left: set[int] = set()
        self._clock = next(iter(self.workers.values())).clock  # stands while a program is paused
        self._pid = os.getpid()
        self.autograd: Autograd = Node.make_autograd(self)

    # -- facts -------------------------------------------------------------------------------

    def node_of(self, rank: int) -> int:
        """On which node a rank lives; of a worker that was replaced, the latest one."""
        return self._nodes[rank]

    def is_here(self, rank: int) -> bool:
        """Whether a rank lives on this node."""
        return self._nodes[rank] == self.id

    def is_current(self, node: int) -> bool:
        """Whether a worker lives on a node, as far as is known: it was not replaced, nor lost."""
        return node in self._nodes and node not in self.lost

    def describe(self, node: int) -> str:
        """Whose node that is."""
        return f"worker {node % self.num_workers}"

    def rank_of(self, to: Any) -> int:
        """The rank that a caller means; raises an `UnknownWorkerError`."""
        return rank_of(to, self.num_workers, self.names)

    def info_of(self, rank: int) -> WorkerInfo:
        """Name and rank."""
        return WorkerInfo(self.names.get(rank) or name_of(rank), rank)

    def ranks(self) -> list[int]:
        """The ranks that live here."""
        return ([CONTROLLER] if self.rank == 0 else []) + sorted(self.workers)

    def now(self) -> float:
        """The time by which calls run out, in seconds."""
        return self._clock.now()

    def seconds(self, timeout: Any, rank: int) -> float | None:
        """The time limit that the caller of a rank means, None for no limit.

        Raises
        ------
        ArgumentError
            If it is no number of seconds.
        """
        if timeout is None or timeout == UNSET:
            return self.default_timeouts.get(rank, DEFAULT_TIMEOUT)
        seconds = check_timeout(timeout)
        return None if not seconds or math.isinf(seconds) else seconds

    def check_open(self) -> None:
        """Raise if nothing can be called any more."""
        if self.closed:
            raise session_closed()
        if self._pid != os.getpid():
            raise SessionError(
                f"this process was forked from process {self._pid}, whose session it is: it can't "
                "call its workers"
            )

    def is_over(self, rank: int) -> bool:
        """Whether a worker of this node has ended, or the session."""
        return self.closed or rank in self._left

    def debug_info(self, rank: int) -> dict[str, int]:
        """Counts of what is under way as seen from a rank that lives here."""
        pool = self._pools.get(rank)
        owned = [value for value in list(self.references.values.values()) if value.owner == rank]
        return {
            "calls_waiting": sum(call.caller == rank for call in list(self.calls.values())),
            "calls_running": len(pool.running()) if pool is not None else 0,
            "threads": pool.threads if pool is not None else 0,
            "values_owned": len(owned),
            "references_held": self.references.count_held(),
        }

    # -- threads that serve calls ------------------------------------------------------------

    def pool(self, rank: int) -> Pool:
        """The threads that serve calls to a rank that lives here."""
        pool = self._pools.get(rank)
        if pool is None:
            with shield(), self.lock:
                pool = self._pools.get(rank)
                if pool is None:
                    place = Place(self, rank)
                    pool = Pool(
                        self.workers.get(rank),
                        f"{self.id}-{rank}" if rank >= 0 else "controller",
                        max(1, torch.get_num_threads()),
                        lambda: bind_place(place),
                        self.housekeeping.notify,
                        self.alone,
                    )
                    pool.closed = self.closed or rank in self._left
                    self._pools[rank] = pool
                    self.housekeeping.begin()
        return pool

    def on_pool(self, func: Callable[..., Any], *args: Any) -> None:
        """Run a function on a server thread of this node; what it raises is shown as a fault."""
        self.pool(self.ranks()[-1]).submit(Chore(func, *args))

    def _add_threads(self) -> bool:
        """Start threads for calls that have waited for long; whether any wait still."""
        waiting = [pool.add_thread() for pool in list(self._pools.values())]
        return any(waiting)

    def _retry_interrupts(self) -> None:
        """Interrupt calls once more that were ended and go on."""
        for pool in list(self._pools.values()):
            pool.retry_interrupts()

    def _tidy(self) -> None:
        """See to dropped references, and to deadlines that no thread of a caller waits for."""
        self.references.drain()
        now = self.now()
        for call in list(self.calls.values()):
            if call.due is not None and now > call.due and not call.settled:
                call.time_out()
        self._log_unheard()

    def _log_unheard(self) -> None:
        """Log the failures that nobody has asked for and nobody can any more."""
        failed = self.failed
        for _ in range(len(failed)):
            try:
                asker, call = failed.popleft()
            except IndexError:  # another thread was faster
                return
            if asker() is None or self.closed:
                call.log_unheard()
            elif not call.heard:
                failed.append((asker, call))

    # -- messages ----------------------------------------------------------------------------

    def send(self, to: int, message: tuple[Any, ...], lent: Lent | None = None) -> None:
        """Send a message to another node; raises if something in it can't be sent.

        Parameters
        ----------
        lent
            If its tensors may be copied after this returns; see lending.py.
        """
        if self.router is None:
            self.check_open()
            raise SessionError("this node has no way to others")
        forks: list[Any] = [] if lent is None else lent.forks
        with shield():  # the message is sent whole, or nothing of it
            try:
                packed = node_protocol.pack(self, to, message, forks, self.router.same_gpus(to))
            except BaseException:
                self.references.undo(forks)
                raise
            self.router.send(to, packed, lent)

    def notify(self, to: int, *message: Any) -> None:
        """Send a message without an answer to a node, which may be this one.

        After the session's end, or to a dead node, this does nothing.
        """
        if to == self.id:
            HANDLERS[message[0]](self, to, message, None)
        elif not self.closed and to not in self.lost:
            self.send(to, message)

    def deliver(self, sender: int, body: Any, frames: Sequence[Any]) -> None:
        """Take in a message of another node; on the receiving thread."""
        self._wait_until_open()
        message, keepalive = node_protocol.unpack(self, sender, body, frames)
        HANDLERS[message[0]](self, sender, message, keepalive)

    def _wait_until_open(self) -> None:
        """Wait while this node is being made, if a message was faster; on the receiving thread."""
        if self.router is None:
            self.opened.wait(_OPEN)

    def flush_output(self) -> None:
        """Send what was printed here before what is sent next."""
        for worker in self.workers.values():
            worker.flush_output()

    # -- deaths and the end ------------------------------------------------------------------

    def peer_lost(self, node: int, reason: str) -> None:
        """Another node has died, and all that it sent was delivered; on the receiving thread."""
        if self.closed or node in self.lost:
            return
        self._wait_until_open()
        self.lost[node] = reason
        error = self.lost_error(node)
        for call in list(self.calls.values()):
            if call.at == node:
                call.fail(error)
        for (sender, _), served in self.serving.copy().items():
            if sender == node:
                served.end(f"{self.describe(node)}, which called it, has died")
        self.references.lost(node)
        self.autograd.peer_lost(node)

    def peer_replaced(self, rank: int, node: int) -> None:
        """Another worker has the place of one that was lost, and is a new node; any thread.

        Whatever refers to the old one has lost it.
        """
        if node > self._nodes[rank]:
            self.references.met(node)
            self._nodes[rank] = node

    def peer_frozen(self, node: int, why: str) -> None:
        """Another node is shown not to run; "": it has come back. On the receiving thread.

        What waits for it ends, as a plain call does and as at a deadline; so do calls until then.
        """
        if not why:
            self.frozen.pop(node, None)
            return
        self.frozen[node] = why
        for call in list(self.calls.values()):
            if call.at == node and not call.settled:
                call.abort(self._frozen_error(node))

    def _frozen_error(self, node: int) -> DiscoError:
        return DiscoError(
            f"{self.describe(node)} {self.frozen[node]}. It can be called again if it comes back"
        )

    def lost_error(self, node: int) -> WorkerLostError:
        """What is raised for a node that has died, or in whose worker's place there is another."""
        why = self.lost.get(node, f"{self.describe(node)} was restarted")
        gone = "Calls to it, and what it owned, are gone"
        if node not in self._nodes:
            gone += ". Another worker has its place, and can be called"
        return WorkerLostError(f"{why}\n{gone}")

    def check_answers(self, node: int) -> None:
        """Raise if a node has died, or is frozen."""
        if node in self.lost:
            raise self.lost_error(node)
        if node in self.frozen:
            raise self._frozen_error(node)

    def worker_left(self, rank: int) -> None:
        """A worker of this node has ended."""
        with self.lock:
            self._left.add(rank)
            last = self._left >= set(self.workers)
            pool = self._pools.get(rank)
        error = session_over()
        for call in list(self.calls.values()):
            if call.callee == rank or call.caller == rank:
                call.settle(None, error)
        if pool is not None:
            pool.close()
        if last:
            self.close()

    def worker_replaced(self, worker: Worker) -> None:
        """A new worker thread has a lost one's place: calls to the lost one, and by it, are over.

        What it owned is in this process, and stays.
        """
        rank = worker.worker_id
        with self.lock:
            self.workers[rank] = worker
            self._left.discard(rank)
            pool = self._pools.pop(rank, None)
        error = restarted(rank)
        for call in list(self.calls.values()):
            if rank in (call.callee, call.caller):
                call.fail(error)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """The session ends: so does all that is under way."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            pools = list(self._pools.values())
        self.housekeeping.end()
        error = session_over()
        for call in list(self.calls.values()):
            call.settle(None, error)
        self.calls.clear()
        self._log_unheard()
        for pool in pools:
            pool.close()
        if self.router is not None:
            self.router.close()
        self.autograd.close()
        self.references.clear(error)


Handler = Callable[[Node, int, tuple[Any, ...], Keepalive | None], None]
HANDLERS: dict[int, Handler] = {
    node_protocol.REFERENCES: lambda node, sender, message, _: node.references.message_received(
        sender, message[1]
    )
}
"""By the kind of a message: what is done with one, given its sender and what holds the references
in it until they are opened. Called on the receiving thread."""


# -- where a thread is ---------------------------------------------------------------------------


class Place(NamedTuple):
    """A node and a rank of it."""

    node: Node
    rank: int


_local = threading.local()  # `place` of a server thread, and of others that act for a rank


def bind_place(place: Place | None) -> None:
    """Say where the calling thread is."""
    _local.place = place


def bound_place() -> Place | None:
    """Where the calling thread is, if it was said."""
    return getattr(_local, "place", None)


def rank_on(node: Node) -> int:
    """As which rank of `node` the calling thread runs; the controller if it is no worker of it."""
    place = bound_place()
    if place is not None and place.node is node:
        return place.rank
    worker = current_worker_or_none()
    if worker is not None and node.workers.get(worker.worker_id) is worker:
        return worker.worker_id
    return CONTROLLER if node.rank == 0 else node.rank
