"""Contexts of distributed autograd on one node, by their ids; which one is current; how they end.

`Contexts.lock` guards the table; it may be held while a context's lock is taken, never the other
way round. The current context is a thread's own.

When a context ends, each node tells those to which it has sent something in it. What comes late for
a context that has ended finds its id among the last ones that did.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import here
from ..outcome import whole
from ..within import within
from .records import NODES, Context, NodeContext

if TYPE_CHECKING:
    from ..node import Node
    from .passes import Run

_REMEMBERED = 4096  # ids of contexts that have ended

_numbers = itertools.count(1)  # of all sessions of this process, so that none has another's id
_local = threading.local()


class Contexts:
    """The contexts of a node, by id."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lock = threading.Lock()
        self.table: dict[int, NodeContext] = {}
        self._over: OrderedDict[int, None] = OrderedDict()

    def create(self) -> NodeContext:
        """A new context."""
        made = NodeContext(self.node, next(_numbers) * NODES + self.node.id)
        with self.lock:
            self.table[made.id] = made
        return made

    def get(self, id: int) -> NodeContext:
        """The one of that id; made on first sight. One that has ended is closed."""
        found = self.table.get(id)
        if found is not None:
            return found
        with self.lock:
            found = self.table.get(id)
            if found is None:
                found = NodeContext(self.node, id)
                if id in self._over or id % NODES == self.node.id:  # ours are all known
                    found.closed = True
                else:
                    self.table[id] = found
        return found

    def is_open(self, id: int) -> bool:
        """Whether there is one of that id; asks the node that would have made it, if need be."""
        found = self.table.get(id)
        if found is not None:
            return not found.closed
        creator = id % NODES
        node = self.node
        if creator == node.id or id in self._over or id < NODES or creator in node.lost:
            return False
        if all(node.node_of(rank) != creator for rank in range(node.num_workers)):
            return False
        with running_in(None):
            return bool(node.ask_node(creator, is_open_here, id).wait())

    def joined(self, id: int) -> NodeContext:
        """As `get`, for who has the id from elsewhere than a call in that context."""
        known = id in self.table
        found = self.get(id)
        if not known and not found.closed:
            self.node.post(found.creator, "autograd.join", id)
        return found

    def look(self, id: int) -> NodeContext:
        """As `get`, but what is not known is not entered."""
        found = self.table.get(id)
        if found is None:
            found = NodeContext(self.node, id)
            found.closed = id in self._over or id % NODES == self.node.id
        return found

    def drop(self, id: int, teller: int) -> None:
        """A context has ended: let go of it, and tell those who may have it of us."""
        with whole():  # or some would never hear of it
            self._drop(id, teller)

    def _drop(self, id: int, teller: int) -> None:
        with self.lock:
            found = self.table.pop(id, None)
            self._over[id] = None
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        if found is None:
            return
        with found.lock:
            found.closed = True
            peers = found.peers - {teller, self.node.id}
            much = bool(found.sends or found.recvs or found.gradients or found.runs)
        for peer in peers:
            if peer not in self.node.lost:
                self.node.post(peer, "autograd.drop", id)
        if much and teller != self.node.id:  # to free it is not for the receiving thread
            self.node.on_pool(found.clear)
        else:
            found.clear()

    def close(self) -> None:
        """The session ends: let go of all, and tell nobody."""
        with self.lock:
            left = list(self.table.values())
            self.table.clear()
        for context in left:
            context.clear()

    # -- what other nodes say, on the receiving thread ------------------------------------------

    def on_drop(self, sender: int, content: tuple[Any, ...]) -> None:
        """A context has ended."""
        self.drop(content[0], sender)

    def on_join(self, sender: int, content: tuple[Any, ...]) -> None:
        """A node has a context of ours without a call in it."""
        found = self.table.get(content[0])
        if found is not None:
            with found.lock:
                found.peers.add(sender)
                closed = found.closed
        if found is None or closed:
            self.node.post(sender, "autograd.drop", content[0])

    def on_gradient(self, _: int, content: tuple[Any, ...]) -> None:
        """The gradient of a send of ours."""
        id, key, number, grad = content
        run = self._run(id, key)
        if run is not None:
            run.gradient_came(number, grad)

    def on_end(self, _: int, content: tuple[Any, ...]) -> None:
        """A backward is over: "" if it is complete, else why it is not."""
        id, key, why = content
        run = self._run(id, key)
        if run is not None:
            run.end(why)

    def _run(self, id: int, key: Any) -> Run | None:
        found = self.table.get(id)
        return None if found is None else found.runs.get(tuple(key))

    def on_lost(self, lost: int) -> None:
        """A node has died: its contexts have ended, and its backwards."""
        for id, context in list(self.table.items()):
            if context.creator == lost:
                self.drop(id, lost)
                continue
            with context.lock:
                runs = [run for key, run in context.runs.items() if key[0] == lost]
            for run in runs:
                run.end(f"node {lost}, which ran this backward, has died")


def attach(node: Node) -> None:
    """Give a node its contexts, and its part in ending them and in backward."""
    contexts = node.autograd = Contexts(node)
    node.handlers["autograd.drop"] = contexts.on_drop
    node.handlers["autograd.join"] = contexts.on_join
    node.handlers["autograd.gradient"] = contexts.on_gradient
    node.handlers["autograd.end"] = contexts.on_end
    node.on_lost.append(contexts.on_lost)


def context_of(node: Node, id: int) -> NodeContext:
    """What a node knows of the context of that id; made on first sight."""
    contexts: Contexts = node.autograd
    found = contexts.table.get(id)
    return found if found is not None else contexts.get(id)


def is_open_here(id: int) -> bool:
    """Whether this node has made such a context, and it has not ended."""
    contexts: Contexts = here.current_node().autograd
    return id % NODES == contexts.node.id and contexts.is_open(id)


# -- the current one ---------------------------------------------------------------------------


def current(node: Node | None = None) -> NodeContext | None:
    """The calling thread's context, if there is one that has not ended, and of that node."""
    found: NodeContext | None = getattr(_local, "context", None)
    if found is None or found.closed or (node is not None and found.node is not node):
        return None
    return found


def running_in(context: NodeContext | None) -> within:
    """Within it a context is the calling thread's current one; None: there is none."""
    return within(_local, "context", context)


class Scope:
    """``with`` this, a new context is the calling thread's, and ends with the block."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._entered: list[tuple[NodeContext, within]] = []

    def __enter__(self) -> Context:
        made = self._node.autograd.create()
        block = running_in(made)
        block.__enter__()
        self._entered.append((made, block))
        return Context(made.id)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        made, block = self._entered.pop()
        block.__exit__(kind, exc, trace)
        self._node.autograd.drop(made.id, self._node.id)
