"""Autograd functions may be given leaves that other threads of the process use. No state.

The gradient of a leaf is accumulated by a node of the graph that torch makes when somebody needs
it, under a lock of that leaf. It takes the GIL in there (seen in torch 2.13). Operations come
without the GIL, but ``Function.apply`` asks for the node with it. So if two threads do these two
at the same moment, each has what the other waits for, and the whole process stands for ever.
Workers that are threads, and threads that serve calls, have leaves in common.

`apply` is for discolab's own functions; the row does the same for those of the program. An
``apply`` that was looked up before the first session (``relu = MyReLU.apply`` in a module) is
torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import Function

from . import table
from .patches import Patches
from .table import Row, Treatment


def apply(function: type[Function], *args: Any) -> Any:
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


def _install(patches: Patches) -> None:
    """Have ``Function.apply`` find the nodes of leaves made."""
    before = vars(Function)["apply"]

    @functools.wraps(before.__func__)
    def apply_safely(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        nodes = leaf_nodes(args)
        result = before.__func__(cls, *args, **kwargs)
        del nodes
        return result

    ours = classmethod(apply_safely)
    Function.apply = ours  # type: ignore[method-assign, assignment]

    def put_back() -> None:
        if vars(Function)["apply"] is ours:
            Function.apply = before  # type: ignore[method-assign]

    patches.at_undo(put_back)


table.add(
    Row(
        state="the lock of a leaf's gradient node",
        treatment=Treatment.SHARED,
        meaning="Threads may apply autograd functions to one leaf at a time; without this row two "
        "of them could bring the process to a stand.",
        test="tests/isolation/test_shared_leaves.py::"
        "test_those_that_share_a_leaf_do_not_wait_for_each_other",
        install=_install,
    )
)
