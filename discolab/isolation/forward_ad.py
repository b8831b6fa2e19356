"""Forward-mode AD, of which a process has one level: threads take turns.

torch has one level of dual tensors in C++, and counts nested `torch.func.jvp` in a global variable.
So from its outermost entry to its exit a thread has both to itself, and the tracing of programs
too: `linearize` traces, and traced programs may be derived.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad

from . import table
from .patches import Patches
from .table import Row, Treatment
from .tracing import tracing


def _clean_up() -> None:
    """Leave the levels in which an interrupt has ended a command."""
    transforms: Any = torch._functorch.eager_transforms
    transforms.JVP_NESTING = 0
    while forward_ad._current_level >= 0:
        torch._C._exit_dual_level(level=forward_ad._current_level)
        forward_ad._current_level -= 1


tracing.clean_ups.append(_clean_up)


def _entering(enter: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(enter)
    def enter_alone() -> Any:
        tracing.enter("a program by forward-mode AD")
        try:
            return enter()
        except BaseException:
            tracing.leave()
            raise

    return enter_alone


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def leave_to_others(*args: Any, **kwargs: Any) -> Any:
        if not tracing.is_held_here():  # the entry has failed, and what is there is another's
            return None
        try:
            return leave(*args, **kwargs)
        finally:
            tracing.leave()

    return leave_to_others


def _in_level(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another thread's level is none for this one."""

    @functools.wraps(function)
    def in_level_here(*args: Any, level: int | None = None, **kwargs: Any) -> Any:
        if level is None and not tracing.is_held_here():
            level = -1  # with which torch refuses to make a dual tensor, and has none to unpack
        return function(*args, level=level, **kwargs)

    return in_level_here


def _levels(module: ModuleType, patches: Patches) -> None:
    patches.replace(module, "enter_dual_level", _entering)
    patches.replace(module, "exit_dual_level", _leaving)
    patches.replace(module, "make_dual", _in_level)
    patches.replace(module, "unpack_dual", _in_level)  # which torch does to print a tensor


def _nesting(module: ModuleType, patches: Patches) -> None:
    patches.replace(module, "enter_jvp_nesting", _entering)
    patches.replace(module, "exit_jvp_nesting", _leaving)


table.add(
    Row(
        state="forward-mode AD",
        treatment=Treatment.IN_TURNS,
        meaning="`torch.func.jvp`, `jacfwd`, `hessian`, `linearize` and `dual_level` run on one "
        "thread at a time, the notebook's included; so a function that is differentiated so must "
        "not call collectives, and is told.",
        test="tests/isolation/test_forward_ad.py::test_derivatives_are_right_on_all_workers",
        on_import={
            "torch.autograd.forward_ad": _levels,
            "torch._functorch.eager_transforms": _nesting,
        },
    )
)
