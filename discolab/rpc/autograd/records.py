"""What one node keeps of a context of distributed autograd.

A context is made on one node and spreads with the calls that are made in it. `NodeContext.lock`
guards the fields of one; `closed` is also read without it.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...runtime.errors import SessionError
from ...runtime.serialize import register_plain

if TYPE_CHECKING:
    from ..node import Node
    from .passes import Run

Tensor = torch.Tensor
Gradients = dict[int, dict[Tensor, Tensor]]  # rank -> leaf -> gradient

NODES = 1 << 20  # ids are number * NODES + node


class Context:
    """A context of distributed autograd, as programs see it: its id, the same on all ranks.

    May be passed to any rank; the id alone will do as well.
    """

    __slots__ = ("id",)

    def __init__(self, id: int) -> None:
        self.id = id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and other.id == self.id

    def __hash__(self) -> int:
        return hash((Context, self.id))

    def __repr__(self) -> str:
        return f"<autograd context {self.id // NODES} of node {self.id % NODES}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Context, (self.id,)


register_plain(Context, lambda context: (context.id,), Context)


class Send(NamedTuple):
    """A tensor that went to another node: where its gradient enters the graph here."""

    entry: Tensor  # see gates.py
    rank: int  # that sent it


class Recv(NamedTuple):
    """A tensor that came from another node: a leaf of the graph here."""

    leaf: Tensor
    node: int
    number: int  # of the send there


class NodeContext:
    """One context on one node.

    Attributes
    ----------
    closed
        Whether it has ended; nothing is kept from then on.
    peers
        Nodes that were sent something in it.
    sends
        By their numbers, which are this node's.
    used
        Numbers of those that a backward has used up.
    recvs
        By ``id(leaf)``.
    gradients
        What backwards have found, by rank.
    runs
        Backwards under way here, by their ids.
    """

    def __init__(self, node: Node, id: int) -> None:
        self.node = node
        self.id = id
        self.lock = threading.RLock()
        self.closed = False
        self.peers: set[int] = set()
        self.sends: dict[int, Send] = {}
        self.used: set[int] = set()
        self.recvs: dict[int, Recv] = {}
        self.gradients: Gradients = {}
        self.runs: dict[tuple[int, int], Run] = {}
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return repr(Context(self.id))

    @property
    def creator(self) -> int:
        """The node that has made it."""
        return self.id % NODES

    def enter_send(self, send: Send) -> int:
        """Keep a tensor that goes to another node; its number."""
        with self.lock:
            number = next(self._numbers)
            if not self.closed:
                self.sends[number] = send
            return number

    def enter_recv(self, recv: Recv) -> None:
        """Keep a tensor that came from another node."""
        with self.lock:
            if not self.closed:
                self.recvs[id(recv.leaf)] = recv

    def add(self, found: Gradients) -> None:
        """Add what a backward has found; under the lock."""
        for rank, grads in found.items():
            mine = self.gradients.setdefault(rank, {})
            for leaf, grad in grads.items():
                before = mine.get(leaf)
                mine[leaf] = grad if before is None else before + grad

    def gradients_of(self, rank: int) -> dict[Tensor, Tensor]:
        """Those of the leaves that belong to a rank."""
        with self.lock:
            for run in self.runs.values():
                run.keep()
            return dict(self.gradients.get(rank, {}))

    def clear(self) -> None:
        """Let go of everything; it has ended."""
        with self.lock:
            self.closed = True
            runs = list(self.runs.values())
            self.runs = {}
            self.sends, self.recvs, self.gradients = {}, {}, {}
            self.used = set()
        for run in runs:
            run.end("the context has ended")


def over(context: object) -> SessionError:
    """The error for a context that has ended."""
    return SessionError(
        f"{context!r} is over, of another session, or never was: use a context inside of its "
        "`with rpc.autograd.context() as ctx:`"
    )
