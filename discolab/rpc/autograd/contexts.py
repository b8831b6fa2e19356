"""Contexts of distributed autograd: what a node keeps of each, which is current, how they end.

A context is made on one node and spreads with the calls that are made in it. `Contexts.lock`
guards a node's table; it may be held while a context's lock is taken, never the other way round.
The current context is a thread's own.

When a context ends, each node tells those to which it has sent something in it. What comes late for
a context that has ended finds its id among the last ones that did.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...runtime.errors import SessionError
from ...runtime.interrupts import plain_lock, reentrant_lock, shield
from ...runtime.serialize import register_plain
from .. import node_protocol
from ..context import current_node
from ..futures import ask_node
from ..node import HANDLERS, Node
from ..temporarily import temporarily

Tensor = torch.Tensor
Gradients = dict[int, dict[Tensor, Tensor]]  # rank -> leaf -> gradient

_REMEMBERED = 4096  # ids of contexts that have ended
NODES = 1 << 20  # ids are number * NODES + number of the node

_numbers = itertools.count(1)  # of all sessions of this process, so that none has another's id
_local = threading.local()


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


class Run(Protocol):
    """A backward under way on one node; see node_backward.py."""

    def keep(self) -> None:
        """Add what it has found to the context's gradients, if all is here; under its lock."""

    def gradient_received(self, number: int, grad: Tensor | None) -> None:
        """The gradient of a send is here, None if it has none."""

    def end(self, why: str) -> None:
        """It is over on all nodes: "", it is complete, or why it is not."""


class NodeContext:
    """One context on one node; `lock` guards the fields, `closed` is also read without it.

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
        self.lock = reentrant_lock()
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

    def add(self, gradients: Gradients) -> None:
        """Add what a backward has found; under the lock."""
        for rank, grads in gradients.items():
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
        """Release everything: the context has ended."""
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


class Contexts:
    """The contexts of a node, by id."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lock = plain_lock()
        self.table: dict[int, NodeContext] = {}
        self._over: OrderedDict[int, None] = OrderedDict()

    def create(self) -> NodeContext:
        """A new context."""
        made = NodeContext(self.node, next(_numbers) * NODES + self.node.id)
        with self.lock:
            self.table[made.id] = made
        return made

    def get(self, id: int, *, enter: bool = True) -> NodeContext:
        """The context of that id; one that has ended is closed, one not known yet is entered."""
        context = self.table.get(id)
        if context is None:
            with self.lock:
                context = self.table.get(id)
                if context is None:
                    context = NodeContext(self.node, id)
                    if id in self._over or id % NODES == self.node.id:  # ours are all known
                        context.closed = True
                    elif enter:
                        self.table[id] = context
        return context

    def is_open(self, id: int) -> bool:
        """Whether there is one of that id; asks the node that would have made it if necessary."""
        context = self.table.get(id)
        if context is not None:
            return not context.closed
        creator = id % NODES
        node = self.node
        if creator == node.id or id in self._over or id < NODES:
            return False
        if not node.is_current(creator):
            return False
        with running_in(None):
            return bool(ask_node(node, creator, is_open_here, id).wait())

    def joined(self, id: int) -> NodeContext:
        """As `get`, where the id came by another way than a call in that context."""
        known = id in self.table
        context = self.get(id)
        if not known and not context.closed:
            self.node.notify(context.creator, node_protocol.CONTEXT_JOINED, id)
        return context

    def drop(self, id: int, teller: int) -> None:
        """A context has ended: release it, and notify the nodes that may have it from this one."""
        with shield():  # or some would never hear of it
            self._drop(id, teller)

    def _drop(self, id: int, teller: int) -> None:
        with self.lock:
            context = self.table.pop(id, None)
            self._over[id] = None
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        if context is None:
            return
        with context.lock:
            context.closed = True
            peers = context.peers - {teller, self.node.id}
            much = bool(context.sends or context.recvs or context.gradients or context.runs)
        for peer in peers:
            if peer not in self.node.lost:
                self.node.notify(peer, node_protocol.CONTEXT_OVER, id)
        if much and teller != self.node.id:  # the receiving thread is not to free it
            self.node.on_pool(context.clear)
        else:
            context.clear()

    def close(self) -> None:
        """The session ends: clear all contexts, without a message."""
        with self.lock:
            left = list(self.table.values())
            self.table.clear()
        for context in left:
            context.clear()

    # -- what other nodes say, on the receiving thread ------------------------------------------

    def joined_elsewhere(self, sender: int, id: int) -> None:
        """A node has a context of ours without a call in it."""
        context = self.table.get(id)
        if context is not None:
            with context.lock:
                context.peers.add(sender)
                closed = context.closed
        if context is None or closed:
            self.node.notify(sender, node_protocol.CONTEXT_OVER, id)

    def run(self, id: int, key: Sequence[int]) -> Run | None:
        """A backward that is under way here."""
        context = self.table.get(id)
        return None if context is None else context.runs.get((key[0], key[1]))

    def peer_lost(self, lost: int) -> None:
        """A node has died: its contexts have ended, and its backwards."""
        for id, context in self.table.copy().items():
            if context.creator == lost:
                self.drop(id, lost)
                continue
            with context.lock:
                runs = [run for key, run in context.runs.items() if key[0] == lost]
            for run in runs:
                run.end(f"node {lost}, which ran this backward, has died")


def is_open_here(id: int) -> bool:
    """Whether this node has made such a context, and it has not ended."""
    contexts: Contexts = current_node().autograd.contexts
    return id % NODES == contexts.node.id and contexts.is_open(id)


# -- what other nodes say, on the receiving thread --------------------------------------------


def _receive_over(node: Node, sender: int, message: tuple[Any, ...], _: Any) -> None:
    node.autograd.contexts.drop(message[1], sender)


def _receive_joined(node: Node, sender: int, message: tuple[Any, ...], _: Any) -> None:
    node.autograd.contexts.joined_elsewhere(sender, message[1])


HANDLERS[node_protocol.CONTEXT_OVER] = _receive_over
HANDLERS[node_protocol.CONTEXT_JOINED] = _receive_joined


# -- the current one ---------------------------------------------------------------------------


def current(node: Node | None = None) -> NodeContext | None:
    """The calling thread's context, if there is one that has not ended, and of that node."""
    context: NodeContext | None = getattr(_local, "context", None)
    if context is None or context.closed or (node is not None and context.node is not node):
        return None
    return context


def running_in(context: NodeContext | None) -> temporarily:
    """Within it a context is the calling thread's current one; None: there is none."""
    return temporarily(_local, "context", context)


class Scope:
    """``with`` this, a new context is the calling thread's, and ends with the block."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._entered: list[tuple[NodeContext, temporarily]] = []

    def __enter__(self) -> Context:
        made = self._node.autograd.contexts.create()
        block = running_in(made)
        block.__enter__()
        self._entered.append((made, block))
        return Context(made.id)

    def __exit__(self, *exc: Any) -> None:
        made, block = self._entered.pop()
        block.__exit__(*exc)
        self._node.autograd.contexts.drop(made.id, self._node.id)
