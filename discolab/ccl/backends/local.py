"""The backend for workers of one address space: a collective reads its members' own tensors.

Members meet on a board (rendezvous/local.py); the last one does the operation for all, in the order
of the ranks, from every member's source into every member's output. Nothing is staged. A large one
is shared with members that wait. On CUDA it is launched on the last one's streams, which wait for
the others' by events; peer copies between GPUs are torch's.

Messages are copied at `send`, which therefore never waits, whatever their size.

The `LocalBackend` of a session is in `Worker.shared`; its board's lock guards its state.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.worker import Worker
from ..backend import Backend, BackendStatistics, Tensor, Tensors
from ..board.rendezvous import Chunks, Contribution, PendingCollective
from ..call import Call
from ..pattern import Pattern
from ..rendezvous.local import LocalRendezvous
from ..rendezvous.p2p_client import LocalP2PClient
from ..work import Finished, Work
from .jobs import perform


class LocalBackend(Backend):
    """Collectives through shared memory; CPU, or any CUDA devices of the process."""

    name = "local"

    def __init__(self, rendezvous: LocalRendezvous) -> None:
        self.rendezvous = rendezvous
        self._p2p = LocalP2PClient(rendezvous)

    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:

        def execute(
            _collective: PendingCollective, contributions: Sequence[Contribution]
        ) -> Chunks | None:
            if not pattern.count:
                return None  # a barrier is over once all are there
            return perform(pattern.jobs(contributions), pattern.reduction)

        return self.rendezvous.start(call, srcs, outs, execute)

    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """See `Backend`. Copies at once and never waits."""
        self._p2p.send(call, src, peer, tag)
        return Finished()

    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        return self._p2p.recv(call, out, peer, tag)

    def replaced(self, worker: Worker) -> None:
        self.rendezvous.replaced(worker)

    def statistics(self) -> BackendStatistics:
        return self.rendezvous.statistics(self.name)
