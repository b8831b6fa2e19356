"""The interface of a backend, which carries out the collectives that users call.

`ops.py`, `p2p.py` and `disco.py` check every argument that can be checked on the calling
worker, allocate the results, and hand plain strided tensors without autograd history to a
`Backend`. A backend starts the operation and gives a `Work`, which ends well or raises, ends
when the worker is interrupted, and does not hang where it can be seen that a member never comes.

A `Backend` object may be shared by the workers of one address space; it owns its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..runtime.worker import Worker
from .call import Call
from .groups import Group
from .pattern import LIKE_BY_LIKE, Pattern
from .work import Work

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


class Backend(ABC):
    """Moves tensors between workers.

    All tensors come in lists, so that several of them can go in one operation ("coalesced"):
    k is their number, n that of the members. ``outs`` never require grad; they may be strided,
    and may be the sources themselves. Roots and peers are ranks.
    """

    name: str
    devices_only = False
    """Whether it is for tensors on the workers' devices, and others go another way."""

    @abstractmethod
    def start(self, call: Call, pattern: Pattern, srcs: Tensors, outs: Tensors) -> Work:
        """Start this member's part of a collective; the pattern says what goes where."""

    def barrier(self, call: Call) -> Work:
        """Over once every member has called it: a collective that moves nothing."""
        return self.start(call, Pattern(LIKE_BY_LIKE, len(call.group), 0), (), ())

    @abstractmethod
    def send(self, call: Call, src: Tensor, peer: int, tag: str) -> Work:
        """Send `src`; in order between two workers with one tag."""

    @abstractmethod
    def recv(self, call: Call, out: Tensor, peer: int | None, tag: str) -> Work:
        """Fill `out` with the next tensor that `peer` (None: any member) sends here.

        Its shape and dtype must be those of `out`. The result of the `Work` is the sender's rank
        until somebody sets another.
        """

    def admit(self, worker: Worker) -> None:  # noqa: B027 - most have nothing to do
        """`worker` begins to use this backend."""

    def dismiss(self, worker: Worker) -> None:  # noqa: B027
        """`worker` uses this backend no more: free what it held for it; never waits."""

    def replaced(self, worker: Worker) -> None:  # noqa: B027
        """`worker` has the place of one that was lost: end what waits for that; never waits."""

    def forget(self, worker: Worker, group: Group) -> None:  # noqa: B027
        """`worker` will not use a group again: free what only that has held; never waits."""

    def statistics(self) -> BackendStatistics:
        """Counts for tests and displays; never waits."""
        return BackendStatistics(self.name, 0, 0, ())


@dataclass(frozen=True, slots=True)
class BackendStatistics:
    """What a backend holds at this moment.

    Attributes
    ----------
    backend
        Its name.
    collectives, messages
        Collectives that some members have joined and that are not over, and tensors that
        were sent and not received.
    waiting
        One line for each of them.
    """

    backend: str
    collectives: int
    messages: int
    waiting: tuple[str, ...]
