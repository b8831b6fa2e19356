"""How a gradient crosses processes: the messages of a backward, sent and received. No state.

A tensor that came from another node came under a number. When the backward (node_backward.py) has
its whole gradient, `send_gradient` sends that back under the same number; there the receiving
thread gives it to the `Run` of that backward, which waits for it. The node that runs a backward
tells the others that it is over (`send_over`).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import node_protocol
from ..node import HANDLERS, Node
from .contexts import NodeContext, Recv

Tensor = torch.Tensor
Key = tuple[int, int]  # of a backward: the node that runs it, its number there


def send_gradient(context: NodeContext, key: Key, recv: Recv, grad: Tensor | None) -> None:
    """Send the gradient of a tensor to the node that it came from; None if it has none."""
    context.node.notify(recv.node, node_protocol.GRADIENT, context.id, key, recv.number, grad)


def _receive_gradient(node: Node, _: int, message: tuple[Any, ...], __: Any) -> None:
    _, id, key, number, grad = message
    run = node.autograd.contexts.run(id, key)
    if run is not None:
        run.gradient_received(number, node_protocol.open_values(node, grad))


def send_over(context: NodeContext, key: Key, to: int, why: str) -> None:
    """Tell a node that a backward is over: "", it is complete, or why it is not."""
    context.node.notify(to, node_protocol.BACKWARD_OVER, context.id, key, why)


def _receive_over(node: Node, _: int, message: tuple[Any, ...], __: Any) -> None:
    _, id, key, why = message
    run = node.autograd.contexts.run(id, key)
    if run is not None:
        run.end(why)


HANDLERS[node_protocol.GRADIENT] = _receive_gradient
HANDLERS[node_protocol.BACKWARD_OVER] = _receive_over
