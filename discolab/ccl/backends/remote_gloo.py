"""The backend of workers in several processes, which move the tensors among themselves.

The coordinator says when all members are there and agree (ccl/coordinator). What is small goes to
it with the calls and comes back to all; what is large goes from member to member over a process
group of Gloo, on each worker's conductor (rendezvous/conductor.py). Either way the results are
those of `local`, bit by bit. Tensors on a GPU are copied to the host for it and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from ...runtime.errors import CollectiveError
from ...runtime.worker import Worker
from .. import memory
from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..call import Call, CallCounts, Signature, call_site, kind_of
from ..coordinator import protocol
from ..coordinator.collectives import Data
from ..coordinator.protocol import kind_out
from ..groups import Group, group_of
from ..pattern import CROSSWISE, Pattern
from ..reductions import combine
from ..rendezvous.client import CoordinatorClient, client_of
from ..rendezvous.conductor import Conductor, Connect, ProcessGroup, Ranks
from ..rendezvous.remote import RemoteWork
from ..rendezvous.remote_p2p_client import RemoteP2PClient
from ..rendezvous.store import GroupStore
from ..work import Finished, Work
from . import exchanges, gloo, steps
from .process_groups import STEP_SECONDS

LARGEST = 48 << 10  # bytes that go to one member: more do not fit in one datagram of a local line
LEAST = 1024  # bytes that one member may give, however many there are

_is_on_host, _size = attrgetter("is_cpu"), attrgetter("nbytes")


class RemoteGlooBackend(Backend):
    """See the module. Each worker has its own; `gloo` here, and what others build on it."""

    name = "gloo"

    def __init__(self, worker: Worker) -> None:
        self.client: CoordinatorClient = client_of(worker)
        self.conductor = Conductor(worker, self.name)
        self.connect: Connect = functools.partial(_connect, self.client)
        self._p2p = RemoteP2PClient(self.client, self.conductor, self.connect)
        self._counts = CallCounts()
        self.client.listen(protocol.CLOSE, self._close)

    # -- the operations ----------------------------------------------------------------------------

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        self._p2p.send(call, src, peer, tag)
        return Finished()

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        return self._p2p.recv(call, out, peer, tag)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        work = HostWork(self, call, pattern, srcs, outs)
        parts = (srcs, outs) if pattern.kind == CROSSWISE else None
        if len(call.group.ranks) == 1:
            self.join(work, b"", parts)
            work.alone()
            return work
        return self.join(work, work.given(), parts)

    def join(
        self, work: RemoteWork, data: Data, parts: tuple[Tensors, Tensors] | None = None
    ) -> RemoteWork:
        """Tell the coordinator of a call, with what the worker gives if that is small."""
        call = work.call
        call.number = self._counts.number(call)
        kinds = None if parts is None else [[kind_out(kind_of(t)) for t in part] for part in parts]
        self.client.tell(protocol.JOIN, work.seq, *protocol.call_out(call), kinds, data)
        return work

    def exchange(self, worker: Worker, about: str, text: str) -> list[str]:
        """Meet all workers, each with a text; the texts, by rank.

        Raises
        ------
        CollectiveError
            If it is `about` something else for one of them.
        """
        world = group_of(tuple(range(worker.num_workers)))
        signature = Signature(f"init_ccl({about})")
        call = Call("init_ccl", worker, world, signature, call_site(worker))
        work = _Exchange(self.client, self.conductor, self.connect, call)
        self.join(work, text.encode()).wait()
        return [bytes(text).decode() for text in work.texts]

    # -- the backend -------------------------------------------------------------------------------

    def admit(self, worker: Worker) -> None:
        self.client.tell(protocol.USE, self.name)

    def dismiss(self, worker: Worker) -> None:
        """See `Backend`. What is small goes through the coordinator still, whatever comes next."""
        self.client.tell(protocol.DISMISS)
        self.conductor.end()

    def forget(self, worker: Worker, group: Group) -> None:
        self.client.tell(protocol.FORGET, group.ranks, group.tag)

    def statistics(self) -> BackendStatistics:
        """See `Backend`; of the whole session. Asks the coordinator."""
        collectives, messages, waiting = self.client.ask(protocol.STATISTICS)
        return BackendStatistics(self.name, collectives, messages, tuple(waiting))

    def _close(self, ranks: Sequence[int], number: int) -> None:
        self.conductor.close(tuple(ranks), number)


class _Exchange(RemoteWork):
    """A collective of a few bytes."""

    texts: Sequence[bytes] = ()

    def absorb(self, given: Sequence[bytes]) -> None:
        self.texts = given


class HostWork(RemoteWork):
    """A collective through host memory.

    What a member gives through the coordinator are the bytes of its tensors, one after the other:
    the same for all, or a part for each member. What comes from all is reduced in the order of the
    ranks, as `local` does it.
    """

    def __init__(
        self,
        backend: RemoteGlooBackend,
        call: Call,
        pattern: Pattern,
        srcs: Tensors,
        outs: Tensors,
    ) -> None:
        self._pattern, self._srcs, self._outs = pattern, srcs, outs
        self._me = call.group.ranks.index(call.rank)
        if not all(map(_is_on_host, (*srcs, *outs))):
            self._stage()
        super().__init__(backend.client, backend.conductor, backend.connect, call)

    def _stage(self) -> None:
        """Work on copies on the host; what comes of it is copied to the accelerator by `adopt`."""
        outs = self._outs
        self._srcs = [src.cpu() for src in self._srcs]
        hosts = [out if out.is_cpu else torch.empty_like(out, device="cpu") for out in outs]
        self._outs = hosts

        def adopt() -> None:
            for out, host in zip(outs, hosts, strict=True):
                if not out.is_cpu:
                    memory.copy(out, host)

        self.adopt = adopt

    def given(self) -> Data:
        """What this member gives; None if that is too much to go through the coordinator."""
        pattern, srcs = self._pattern, self._srcs
        limit = LARGEST
        if pattern.same_for_all:
            limit = max(min(LEAST, LARGEST), LARGEST // pattern.members)
        if sum(map(_size, srcs)) > limit:
            return None
        if not srcs or pattern.giver not in (None, self._me):
            return b""
        if pattern.same_for_all and pattern.taker is None:
            return memory.data_of(srcs)
        parts = [b""] * pattern.members
        for to in pattern.takers:
            parts[to] = memory.data_of([srcs[k] for k in pattern.gives[to]])
        return tuple(parts)

    def absorb(self, given: Sequence[bytes]) -> None:
        pattern = self._pattern
        if not given or pattern.taker not in (None, self._me):
            return
        sources: dict[int, list[Tensor]] = {}
        for giver in pattern.givers:
            whole = torch.frombuffer(bytearray(given[giver] or b"\0"), dtype=torch.uint8)
            first = 0
            for place in pattern.takes[giver]:
                out = self._outs[place]
                part = whole[first : first + out.nbytes]
                sources.setdefault(place, []).append(memory.typed(part, out))
                first += out.nbytes
        for place, parts in sources.items():  # these are new memory: no output can disturb them
            if pattern.reduction is None:
                memory.copy(self._outs[place], parts[0])
            else:
                self._outs[place].copy_(combine(parts, pattern.reduction))

    def carry_out(self, end: ProcessGroup) -> None:
        exchanges.carry_out(end, self._program(exchanges.scratch), self.void)()

    def alone(self) -> None:
        """Do it at once, as there is no other member; the coordinator is only told."""
        try:
            with torch.inference_mode():
                steps.run(self._program(exchanges.new_room), lambda step: None)()
        except BaseException:
            self.end(CollectiveError(f"{self} failed"))
            raise
        self.end()

    def _program(self, room: exchanges.Room) -> steps.DirectSteps:
        return exchanges.program(self._pattern, self._me, self._srcs, self._outs, room)


def _connect(
    client: CoordinatorClient, ranks: Ranks, number: int, unwanted: Callable[[], bool]
) -> ProcessGroup:
    """This worker's end of a process group. Waits for the other members, which make theirs."""
    store = GroupStore(client, f"{number}/", STEP_SECONDS, unwanted)
    place = ranks.index(client.worker.worker_id)
    return gloo.connect(store, place, len(ranks), getattr(client.link, "host", gloo.LOOPBACK))
