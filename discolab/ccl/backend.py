"""What a backend is: the one interface between the collectives that users call and who does them.

`ops.py`, `p2p.py` and `disco.py` check every argument that can be checked on the calling
worker, allocate the results, and hand plain strided tensors without autograd history to a
`Backend`. A backend moves the data. It must either fill `out` or raise, must end when the
worker is interrupted, and must not hang where it can see that a member never comes.

A `Backend` object may be shared by the workers of one address space; it owns its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import CodeType

import torch

from ..runtime.worker import Worker
from .groups import Group

Site = tuple[CodeType | str, int]  # code object or file name, and line
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one collective by one worker: what every method of a backend gets.

    Attributes
    ----------
    name
        As the user wrote it: ``"all_reduce"``.
    worker
        Who calls; always the thread on which the backend runs.
    group
        The members; `worker` is one of them. For send and recv: all workers.
    timeout
        Seconds to wait for the others, None for no limit.
    site
        Where the user's code called.
    """

    name: str
    worker: Worker
    group: Group
    timeout: float | None
    site: Site | None


class Backend(ABC):
    """Moves tensors between workers.

    Shapes below are for n members. ``out`` never requires grad; it may be strided, and it
    may be the source itself. Roots and peers are ranks.
    """

    name: str

    @abstractmethod
    def all_reduce(self, call: Call, src: Tensor, out: Tensor, reduction: str) -> None:
        """Reduce the members' `src` into everybody's `out`, of the same shape and dtype."""

    @abstractmethod
    def reduce(
        self, call: Call, src: Tensor, out: Tensor | None, reduction: str, root: int
    ) -> None:
        """As `all_reduce` for `root` alone; the others have no `out`."""

    @abstractmethod
    def all_gather(self, call: Call, src: Tensor, out: Tensor) -> None:
        """Put the members' `src` one after the other into `out` (n times the first size)."""

    @abstractmethod
    def reduce_scatter(self, call: Call, src: Tensor, out: Tensor, reduction: str) -> None:
        """Reduce; the i-th member keeps the i-th of n equal parts along the first dimension."""

    @abstractmethod
    def broadcast(self, call: Call, src: Tensor | None, out: Tensor, root: int) -> None:
        """Copy `src` of `root` into everybody's `out`; the others have no `src`."""

    @abstractmethod
    def scatter(self, call: Call, src: Tensor | None, out: Tensor, root: int) -> None:
        """Cut `src` of `root` along its first dimension, the i-th part for the i-th member."""

    @abstractmethod
    def gather(self, call: Call, src: Tensor, out: Tensor | None, root: int) -> None:
        """As `all_gather` for `root` alone; the others have no `out`."""

    @abstractmethod
    def barrier(self, call: Call) -> None:
        """Return once every member has called it."""

    @abstractmethod
    def send(self, call: Call, src: Tensor, peer: int) -> None:
        """Send a copy of `src`; in order between two workers."""

    @abstractmethod
    def recv(self, call: Call, out: Tensor, peer: int) -> None:
        """Wait for the next tensor that `peer` sends here, of the shape and dtype of `out`."""

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
