"""Tensors that cross: how autograd follows them from one rank to another, or is cut off.

`leave` sees what goes to another rank, arguments or results, before it is sent; `arrive` sees it
there, if that is on another node. Outside of a context a tensor is cut from its graph, and a leaf
keeps `requires_grad`; so it is with what a call gives that was made with gradients disabled. In a
context, with gradients enabled:

- within a node the tensor keeps its graph, with an identity in between that says from which rank
  to which it went (`Crossing`), so that each leaf can be assigned to its ranks;
- to another node it is sent without its graph, under a number; the sender keeps where the gradient
  enters its graph (`Send`), the receiver makes the tensor a leaf of its own (`Recv`). How the
  gradient comes back is in gradient_messages.py.

Only tensors in lists, tuples, dicts and dataclasses are followed. What is recorded is in the
context (contexts.py).
"""

from __future__ import annotations

from typing import Any

import torch

from ...isolation import shared_leaves
from ..containers import has_grad, swap
from ..node import Node, rank_on
from ..temporarily import temporarily
from . import contexts
from .contexts import Contexts, NodeContext, Recv, Send
from .gates import leaving, numbered

Tensor = torch.Tensor


class Crossing(torch.autograd.Function):
    """The identity, between two ranks; the same memory, no view, so it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, from_rank: int, to_rank: int, context: int) -> Tensor:
        """`from_rank`: the rank of what the tensor was made from; `context`: in which."""
        ctx.from_rank, ctx.to_rank, ctx.context = from_rank, to_rank, context
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None, None]:
        """The gradient as it is."""
        return grads[0], None, None, None


def _crossed(tensor: Tensor, from_rank: int, to_rank: int, context_id: int) -> Tensor:
    made: Tensor = shared_leaves.apply(Crossing, tensor, from_rank, to_rank, context_id)
    return made


class NodeAutograd:
    """Distributed autograd on one node; see `node.Autograd`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.contexts = Contexts(node)

    def current(self) -> NodeContext | None:
        """The calling thread's context on this node, if it is in one that has not ended."""
        return contexts.current(self.node)

    def running_in(self, context: NodeContext | None) -> temporarily:
        """Within it a context is the calling thread's current one."""
        return contexts.running_in(context)

    def context_of(self, id: int) -> NodeContext:
        """The context of that id, as this node knows it; made on first sight."""
        return self.contexts.get(id)

    def peer_lost(self, node: int) -> None:
        """Another node has died."""
        self.contexts.peer_lost(node)

    def close(self) -> None:
        """The session ends."""
        self.contexts.close()

    def leave(
        self,
        context: NodeContext | None,
        value: Any,
        to_rank: int,
        to_node: int,
        from_rank: int | None = None,
    ) -> tuple[Any, tuple[int, ...]]:
        """Something goes to another rank.

        Parameters
        ----------
        context
            The context in which it goes, None if in none.
        value
            What goes; it is not changed, containers with tensors in them are copied where need be.
        to_rank, to_node
            Where it goes.
        from_rank
            The rank that it belongs to; None: the calling thread's.

        Returns
        -------
        value, tracked
            What is to be sent; the numbers of the tensors in it that autograd follows to another
            node, 0 for each that it does not.
        """
        node = self.node
        same_node = to_node == node.id
        if context is not None and not same_node and to_node not in context.peers:
            with context.lock:
                context.peers.add(to_node)
        if not has_grad(value):
            return value, ()
        if context is None or context.closed or not torch.is_grad_enabled():
            return swap(value, _cut), ()
        if from_rank is None:
            from_rank = rank_on(node)
        if same_node:
            return _leave_within(context, value, from_rank, to_rank), ()
        return _leave_node(context, value, from_rank)

    def arrive(
        self,
        context: NodeContext | None,
        value: Any,
        from_rank: int,
        from_node: int,
        tracked: tuple[int, ...],
    ) -> Any:
        """Something has come from a rank of another node, with the numbers that `leave` gave."""
        if not tracked or context is None or context.closed:
            return value
        made: dict[int, Tensor] = {}
        left = iter(tracked)
        me: int | None = None

        def change(tensor: Tensor) -> Tensor:
            nonlocal me
            number = next(left, 0)
            if not number:
                return tensor
            if number not in made:
                leaf = tensor.detach().requires_grad_()
                context.enter_recv(Recv(leaf, from_node, number))
                if me is None:
                    me = rank_on(self.node)
                # as between threads what the callee gets is no leaf, and may be changed in place
                made[number] = _crossed(leaf, from_rank, me, context.id)
            return made[number]

        with torch.enable_grad():
            return swap(value, change)


def _cut(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and not tensor.is_leaf:
        return tensor.detach()
    return tensor


def _leave_within(context: NodeContext, value: Any, from_rank: int, to_rank: int) -> Any:
    if from_rank == to_rank:
        return value
    made: dict[int, Tensor] = {}  # the same tensor twice is the same tensor twice there

    def change(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = _crossed(tensor, from_rank, to_rank, context.id)
        return made[id(tensor)]

    return swap(value, change)


def _leave_node(context: NodeContext, value: Any, from_rank: int) -> tuple[Any, tuple[int, ...]]:
    made: dict[int, tuple[Tensor, int]] = {}
    numbers: list[int] = []

    def change(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            numbers.append(0)
            return tensor
        if id(tensor) not in made:
            # it stays at its place in the graph if the tensor is changed in place
            entry = leaving(tensor)
            made[id(tensor)] = tensor.detach(), context.enter_send(Send(entry, from_rank))
            numbered(entry, made[id(tensor)][1])
        sent, number = made[id(tensor)]
        numbers.append(number)
        return sent

    return swap(value, change), tuple(numbers)


Node.make_autograd = NodeAutograd
