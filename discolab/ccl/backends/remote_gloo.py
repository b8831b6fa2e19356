"""The backend of workers in several processes, which move the tensors among themselves.

The coordinator says when all members are there and agree (ccl/coordinator). What is small goes to
it with the calls and comes back to all; what is large goes from member to member over a process
group of Gloo, on each worker's conductor (rendezvous/conductor.py). Either way the results are
those of `local`, bit by bit. Tensors on a GPU are copied to the host for it and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ...runtime.worker import Worker
from .. import moves
from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..call import Call, kinds_of
from ..coordinator import protocol
from ..coordinator.collectives import Data
from ..groups import Group
from ..pattern import CROSSWISE, Pattern
from ..rendezvous.client import CoordinatorClient, client_of
from ..rendezvous.conductor import Conductor, Connect, ProcessGroup, Ranks
from ..rendezvous.remote import Job, RemoteWork
from ..rendezvous.remote_p2p_client import RemoteP2PClient
from ..rendezvous.store import GroupStore
from ..work import Finished, Work
from . import exchanges, gloo, inline, steps
from .process_groups import STEP_SECONDS

_Counts = dict[tuple[tuple[int, ...], str], int]


class RemoteGlooBackend(Backend):
    """See the module. Each worker has its own; `gloo` here, and what others build on it."""

    name = "gloo"

    def __init__(self, worker: Worker) -> None:
        self.client: CoordinatorClient = client_of(worker)
        self.conductor = Conductor(worker, self.name)
        self._connect: Connect = functools.partial(_connect, self.client)
        self._p2p = RemoteP2PClient(self.client, self.conductor, self._connect)
        self._counts: tuple[int, _Counts] = (-1, {})
        self.client.listen(protocol.CLOSE, self._close)

    # -- the operations ----------------------------------------------------------------------------

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        self._p2p.send(call, src, peer, tag)
        return Finished()

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        """See `Backend`."""
        return self._p2p.recv(call, out, peer, tag)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        """See `Backend`."""
        me = call.group.index(call.rank)
        job = HostJob(pattern, me, srcs, outs, self._connect)
        parts = (srcs, outs) if pattern.kind == CROSSWISE else None
        return self.join(call, job, inline.pack(pattern, me, srcs), parts)

    def join(
        self, call: Call, job: Job, data: Data, parts: tuple[Tensors, Tensors] | None = None
    ) -> Work:
        """Tell the coordinator of a call, with what the worker gives if that is small."""
        call.number = self._next_number(call)
        work = RemoteWork(self.client, self.conductor, call, job)
        alone = len(call.group) == 1
        self.client.tell(
            protocol.JOIN,
            work.seq,
            protocol.call_out(call),
            None if parts is None else tuple(_kinds(part) for part in parts),
            b"" if alone else data,
        )
        if alone:
            work.alone()
        return work

    def _next_number(self, call: Call) -> int:
        """How many collectives of this group the worker has called before in this command."""
        ordinal, counts = self._counts
        if ordinal != call.ordinal:
            counts = {}
            self._counts = (call.ordinal, counts)
        key = (call.group.ranks, call.group.tag)
        number = counts.get(key, 0)
        counts[key] = number + 1
        return number

    # -- the backend -------------------------------------------------------------------------------

    def admit(self, worker: Worker) -> None:
        """See `Backend`."""
        self.client.tell(protocol.USE, self.name)

    def dismiss(self, worker: Worker) -> None:
        """See `Backend`. What is small goes through the coordinator still, whatever comes next."""
        self.client.tell(protocol.DISMISS)
        self.conductor.end()

    def forget(self, worker: Worker, group: Group) -> None:
        """See `Backend`."""
        self.client.tell(protocol.FORGET, group.ranks, group.tag)

    def statistics(self) -> BackendStatistics:
        """See `Backend`; of the whole session. Asks the coordinator."""
        collectives, messages, waiting = self.client.ask(protocol.STATISTICS)
        return BackendStatistics(self.name, collectives, messages, tuple(waiting))

    def _close(self, ranks: Sequence[int], number: int) -> None:
        self.conductor.close(tuple(ranks), number)


class HostJob(Job):
    """A collective through host memory."""

    def __init__(
        self, pattern: Pattern, me: int, srcs: Tensors, outs: Tensors, connect: Connect
    ) -> None:
        self.connect = connect
        self._pattern, self._me, self._outs = pattern, me, outs
        self._staged = [
            (out, torch.empty_like(out, device="cpu")) for out in outs if not out.is_cpu
        ]
        staged = {id(out): host for out, host in self._staged}
        self._hosts = [staged.get(id(out), out) for out in outs]
        self._srcs = [src if src.is_cpu else src.cpu() for src in srcs]

    def absorb(self, given: Sequence[bytes]) -> None:
        """See `Job`."""
        inline.unpack(self._pattern, self._me, given, self._hosts)

    def carry_out(self, end: ProcessGroup, void: Callable[[], bool]) -> None:
        """See `Job`."""
        exchanges.carry_out(end, self._program(exchanges.scratch), void)()

    def alone(self) -> None:
        """See `Job`."""
        steps.run(self._program(exchanges.new_room), lambda step: None)()  # nobody to exchange with

    def _program(self, room: exchanges.Room) -> steps.DirectSteps:
        return exchanges.program(self._pattern, self._me, self._srcs, self._hosts, room)

    def adopt(self) -> None:
        """See `Job`."""
        for out, host in self._staged:
            moves.as_bytes(out).copy_(moves.as_bytes(host))


def _kinds(tensors: Tensors) -> tuple[protocol.WireKind, ...]:
    return tuple(map(protocol.kind_out, kinds_of(tensors)))


def _connect(
    client: CoordinatorClient, ranks: Ranks, number: int, unwanted: Callable[[], bool]
) -> ProcessGroup:
    """This worker's end of a process group. Waits for the other members, who make theirs."""
    store = GroupStore(client, f"{number}/", STEP_SECONDS, unwanted)
    place = ranks.index(client.worker.worker_id)
    return gloo.connect(store, place, len(ranks), getattr(client.link, "host", gloo.LOOPBACK))
