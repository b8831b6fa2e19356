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
`torch.autograd.grad`. Between processes each one runs its part (driver.py,
node_backward.py) and sends gradients to others (gradient_messages.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...runtime.errors import ArgumentError, SessionError
from ..calls import call_sync
from ..context import place_here
from ..node import Node, Place, rank_on
from .contexts import Context, Contexts, NodeContext, Scope, current, over
from .driver import run_backward

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


class Bound:
    """The functions of this module, as methods.

    Parameters
    ----------
    node
        For which they act, such as the controller's: ``sess.rpc.autograd``; None: for the calling
        thread's.
    """

    def __init__(self, node: Node | None = None) -> None:
        self._node = node

    def _place(self) -> Place:
        node = self._node
        return place_here() if node is None else Place(node, rank_on(node))

    def context(self) -> Scope:
        """``with context() as ctx``: calls within it are recorded for a backward.

        At the end of the block all ranks let go of it.
        """
        return Scope(self._place().node)

    def current_context(self) -> Context | None:
        """The context in which the calling thread is, None if it is in none."""
        context = current(self._node)
        return None if context is None else Context(context.id)

    def backward(
        self,
        context: Context | int | None,
        roots: Sequence[Tensor],
        retain_graph: bool = False,
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
        _backward(*self._place(), context, roots, retain_graph)

    def get_gradients(self, context: Context | int | None) -> dict[Tensor, Tensor]:
        """The gradients of this rank's leaves: leaf -> gradient.

        The tensors are the context's own: what is changed in place, such as by clipping, an
        optimizer will find so.

        Parameters
        ----------
        context
            Or its id; None: the current one.

        Raises
        ------
        SessionError
            If the context is over.
        """
        node, rank = self._place()
        return _look_up(node, context, False).gradients_of(rank)

    def __reduce__(self) -> str:
        return "HERE"  # so that a function of these can be called by rpc


HERE = Bound()
context, current_context = HERE.context, HERE.current_context
backward, get_gradients = HERE.backward, HERE.get_gradients


def backward_at(rref: Any, context: Context | int | None, retain_graph: bool) -> None:
    """`RRef.backward`: a `backward` from its value, on its owner."""
    node: Node = rref.node
    context = context_for(node, context)
    if rref.is_owner():
        _backward(node, rref.owner_rank, context, [rref.local_value()], retain_graph)
    else:
        given = rref, context, bool(retain_graph)
        at = rref.ref[0]
        call_sync(node, rank_on(node), rref.owner_rank, _backward_here, given, at=at)


def _backward_here(rref: Any, context: Context, retain_graph: bool) -> None:
    backward(context, [rref.local_value()], retain_graph)


def _backward(node: Node, rank: int, context: Any, roots: Any, retain_graph: bool) -> None:
    context_here = _look_up(node, context, True)
    run_backward(node, rank, context_here, _check_roots(roots), bool(retain_graph))


def _check_roots(roots: Any) -> list[Tensor]:
    """The roots of a backward, or why they can't be.

    Raises
    ------
    ArgumentError
    """
    if isinstance(roots, Tensor):
        roots = [roots]
    if not isinstance(roots, Sequence) or isinstance(roots, str) or not roots:
        raise ArgumentError(f"backward: roots is a list of tensors, [loss], got {roots!r:.80}")
    for i, root in enumerate(roots):
        what = f"backward: root {i}"
        if not isinstance(root, Tensor):
            raise ArgumentError(f"{what} is no tensor but a {type(root).__name__}")
        if not root.requires_grad:
            raise ArgumentError(
                f"{what} does not require grad: it depends on no parameter, or came here outside "
                "of the context, which cuts tensors from their graph"
            )
        if root.numel() != 1:
            raise ArgumentError(
                f"{what} has shape {list(root.shape)}: a backward starts from scalars, "
                "give loss.sum() or loss.mean()"
            )
        if root.is_complex():
            raise ArgumentError(f"{what} is complex: a backward starts from real scalars")
    return list(roots)


def context_for(node: Node, context: Context | int | None) -> Context:
    """The context that is meant; None: the current one.

    Raises
    ------
    ArgumentError, SessionError
        If there is none, or it is over.
    """
    return Context(_look_up(node, context, False).id)


def _look_up(node: Node, context: Any, join: bool) -> NodeContext:
    if context is None:
        context_here = current(node)
        if context_here is None:
            raise _no_context()
        return context_here
    id = _id(context)
    known: Contexts = node.autograd.contexts
    if not known.is_open(id):
        raise over(Context(id))
    context_here = known.joined(id) if join else known.get(id, enter=False)
    if context_here.closed:
        raise over(Context(id))
    return context_here


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
