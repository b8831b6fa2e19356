"""Where gradients from other nodes enter a graph while a backward is under way.

A backward at a node is one call of autograd, so that each node of the graph runs once, with its
whole gradient. Gradients that come from elsewhere may depend on some that this very call gives. So
a tensor that goes to another node gets a `Leaving`, which brings its gradient in, and a backward
puts a `Gate` before those of each level, which waits for their gradients. A gate is run only when
there is nothing else to do: what a thread of autograd takes next is what has the highest sequence
number of what is ready, gates have 0, nothing else that is walked has it (`make_room`), and each
gate is made ready by the one of the level before.

What is being given is the calling thread's own; all of a backward here runs on one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...isolation import shared_leaves
from ..temporarily import temporarily

Tensor = torch.Tensor
Arrived = MutableMapping[int, Tensor | None]  # by the number of the send

_local = threading.local()


class Leaving(torch.autograd.Function):
    """A tensor goes to another node; where its gradient comes back in."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Something small instead of the tensor, which need not be kept for it."""
        ctx.set_materialize_grads(False)
        ctx.device = tensor.device
        ctx.number = 0
        return torch.empty((), device=tensor.device, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """What has come for it."""
        grad = _local.arrived.pop(ctx.number, None)
        return None if grad is None else grad.to(ctx.device)


class Gate(torch.autograd.Function):
    """Waits before what lies behind it."""

    @staticmethod
    def forward(ctx: Any, wait: Callable[[], None], *behind: Tensor) -> Tensor:
        """One thing by which all of them can be reached."""
        ctx.set_materialize_grads(False)
        ctx.wait = wait
        ctx.count = len(behind)
        return torch.empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Nothing but wait: a `Leaving` knows its gradient itself."""
        ctx.wait()
        return (None,) * (1 + ctx.count)


_gate: Callable[..., Tensor] = Gate.apply


def leaving(tensor: Tensor) -> Tensor:
    """What stands for a tensor that goes to another node; see `numbered`."""
    entry: Tensor = shared_leaves.apply(Leaving, tensor)
    return entry


def numbered(entry: Tensor, number: int) -> None:
    """Say under which number the gradient of it comes."""
    node: Any = entry.grad_fn
    node.number = number


def gates(levels: Sequence[tuple[Callable[[], None], Sequence[Tensor]]]) -> GradientEdge | None:
    """The edge to start from, so that levels are entered in their order.

    Parameters
    ----------
    levels
        Of each: what waits for its gradients, and what stands for its tensors (`leaving`).
    """
    before: list[Tensor] = []
    with torch.enable_grad():
        for wait, entries in reversed(levels):
            made = _gate(wait, *before, *entries)
            node: Any = made.grad_fn
            node._set_sequence_nr(0)
            before = [made]
    return get_gradient_edge(before[0]) if before else None


def make_room(node: Node) -> None:
    """Gates alone have the sequence number 0."""
    entry: Any = node
    if not entry._sequence_nr():
        entry._set_sequence_nr(1)


def giving(arrived: Arrived) -> temporarily:
    """Within it a backward on this thread finds its gradients there."""
    return temporarily(_local, "arrived", arrived)
