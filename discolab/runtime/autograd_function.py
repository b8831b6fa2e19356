"""Apply an autograd function to tensors that other threads of the process may use too. No state.

The gradient of a leaf is accumulated by a node of the graph that torch makes when somebody needs
it, under a lock of that leaf. It takes the GIL in there (seen in torch 2.13). Operations come
without the GIL, but ``Function.apply`` asks for the node with it. So if two threads do these two
at the same moment, each has what the other waits for, and the whole process stands for ever.
Workers that are threads, and threads that serve calls, have leaves in common; hence `apply`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``; the leaves among `args` may be in use on other threads."""
    nodes = leaf_nodes(args)
    result = function.apply(*args)
    del nodes
    return result


def leaf_nodes(args: Iterable[Any]) -> list[torch.Tensor]:
    """Make the nodes of the leaves among `args` by an operation; they last as long as the result.

    As they are there, whoever has the lock of one of these leaves does not wait for the GIL.
    """
    leaves = [
        arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad and arg.is_leaf
    ]
    if not leaves or torch._C._are_functorch_transforms_active():
        return []
    with torch.enable_grad():  # `Function.apply` asks for the node without it too
        return [_of(leaf) for leaf in leaves]


def _of(leaf: torch.Tensor) -> torch.Tensor:
    """What an operation that has a gradient makes of a leaf; a sparse one has no views."""
    if leaf.layout is torch.strided:
        return leaf.view_as(leaf)
    return leaf.clone()
