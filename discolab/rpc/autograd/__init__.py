"""Distributed autograd: one backward through tensors that went from rank to rank.

    with rpc.autograd.context() as ctx:
        h = rpc.rpc_sync(1, first_half, args=(x,))      # the graph goes on in worker 1
        loss = rpc.rpc_sync(2, second_half, args=(h,)).sum()
        rpc.autograd.backward(ctx, [loss])
        gradients = rpc.autograd.get_gradients(ctx)      # of this rank's own leaves
        optimizer.step(ctx)                              # of all ranks that have parameters

Calls that are made in a context carry it on, so that it is the current one where they run too.
Gradients belong to the context, never to `Tensor.grad`, and to the rank that used the leaf; a
parameter that two ranks of one process use has a part of its gradient on each. Several backwards
in one context add up. Hooks on tensors and on nodes of the graph run; what waits for gradients to
be accumulated (`register_post_accumulate_grad_hook`, DistributedDataParallel) does not, since
nothing is. Not recorded: calls made with gradients disabled, and tensors in objects other than
lists, tuples, dicts and dataclasses.

In one process (threads) autograd sees the whole graph, and a backward is one call of
`torch.autograd.grad`. Between processes each one runs its part, see driver.py and passes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.errors import ArgumentError, SessionError
from .. import here
from . import contexts
from .contexts import Scope
from .driver import run_backward
from .records import Context, NodeContext, over
from .roots import check_roots

if TYPE_CHECKING:
    from ..node import Node

__all__ = [
    "Bound",
    "Context",
    "backward",
    "backward_at",
    "context",
    "context_for",
    "current_context",
    "get_gradients",
]

Tensor = torch.Tensor


def context() -> Scope:
    """``with context() as ctx``: calls within it are recorded for a backward.

    At the end of the block all ranks let go of it.
    """
    return Scope(here.current_node())


def current_context() -> Context | None:
    """The context in which the calling thread is, None if it is in none."""
    found = contexts.current()
    return None if found is None else Context(found.id)


def backward(
    context: Context | int | None, roots: Sequence[Tensor], retain_graph: bool = False
) -> None:
    """Compute the gradients of scalars with respect to all leaves, on whatever rank they are.

    Parameters
    ----------
    context
        Or its id; None: the current one.
    roots
        Tensors of one element that are here, and require grad.
    retain_graph
        Whether another backward of this context will go through the same graph.

    Raises
    ------
    ArgumentError
        If a root is no such tensor.
    SessionError
        If the context is over, there is none, or its graph was used up.
    WorkerError
        If it failed on another rank. The context's gradients are as before.
    WorkerLostError
        If a worker that takes part has died.
    WaitTimeoutError
        If it takes longer than calls may (the node's default timeout).
    """
    place = here.place_here()
    _backward(place.node, place.rank, context, roots, retain_graph)


def get_gradients(context: Context | int | None) -> dict[Tensor, Tensor]:
    """The gradients of this rank's leaves: leaf -> gradient.

    The tensors are the context's own: what is changed in place, such as by clipping, an optimizer
    will find so.

    Parameters
    ----------
    context
        Or its id; None: the current one.

    Raises
    ------
    SessionError
        If the context is over.
    """
    place = here.place_here()
    return _get_gradients(place.node, place.rank, context)


def backward_at(rref: Any, context: Context | int | None, retain_graph: bool) -> None:
    """`RRef.backward`: a `backward` from its value, on its owner."""
    context = context_for(rref.node, context)
    if rref.is_owner():
        _backward(rref.node, rref.owner_rank, context, [rref.local_value()], retain_graph)
    else:
        from ..calls import PLAIN

        node: Node = rref.node
        given = rref, context, bool(retain_graph)
        rank = here.rank_on(node)
        node.start(PLAIN, rank, rref.owner_rank, _backward_here, given).wait_and_take()


def _backward_here(rref: Any, context: Context, retain_graph: bool) -> None:
    backward(context, [rref.local_value()], retain_graph)


def context_for(node: Node, context: Context | int | None) -> Context:
    """The context that is meant; None: the current one.

    Raises
    ------
    ArgumentError, SessionError
        If there is none, or it is over.
    """
    return Context(_look_up(node, context, False).id)


class Bound:
    """The same functions for one session, on its controller: ``sess.rpc.autograd``."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def context(self) -> Scope:
        """See `autograd.context`."""
        return Scope(self._node)

    def current_context(self) -> Context | None:
        """See `autograd.current_context`."""
        found = contexts.current(self._node)
        return None if found is None else Context(found.id)

    def backward(
        self,
        context: Context | int | None,
        roots: Sequence[Tensor],
        retain_graph: bool = False,
    ) -> None:
        """See `autograd.backward`."""
        _backward(self._node, here.rank_on(self._node), context, roots, retain_graph)

    def get_gradients(self, context: Context | int | None) -> dict[Tensor, Tensor]:
        """See `autograd.get_gradients`."""
        return _get_gradients(self._node, here.rank_on(self._node), context)


def _backward(node: Node, rank: int, context: Any, roots: Any, retain_graph: bool) -> None:
    found = _look_up(node, context, True)
    run_backward(node, rank, found, check_roots(roots), bool(retain_graph))


def _get_gradients(node: Node, rank: int, context: Any) -> dict[Tensor, Tensor]:
    return _look_up(node, context, False).gradients_of(rank)


def _look_up(node: Node, context: Any, join: bool) -> NodeContext:
    if context is None:
        found = contexts.current(node)
        if found is None:
            raise _no_context()
        return found
    id = _id(context)
    known: contexts.Contexts = node.autograd
    if not known.is_open(id):
        raise over(Context(id))
    found = known.joined(id) if join else known.look(id)
    if found.closed:
        raise over(Context(id))
    return found


def _id(context: Any) -> int:
    if isinstance(context, Context):
        return context.id
    if type(context) is int and context > 0:
        return context
    raise ArgumentError(
        f"what rpc.autograd.context() gives is needed, or its id, got {context!r:.80}"
    )


def _no_context() -> SessionError:
    return SessionError("no context: do this inside of `with rpc.autograd.context() as ctx:`")
