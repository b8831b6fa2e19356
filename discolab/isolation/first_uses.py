"""What torch changes in its own classes when they are used for the first time in the process.

Some first uses take two steps: look whether a class is changed already, then change it. A process
does that once. Workers that run one program do it all at the same moment, and a class that two of
them find unchanged is changed twice.

`torch.ops` makes an operator's object when it is asked for it first. Two threads make two, of which
it keeps the later one; C++ code keeps the first that it is given, as if it lived for ever. Where
that is the other one, modes are given an operator that is none of `torch.ops`, then memory that
was freed. `_makes` guards `torch.ops`, and what is in it, while an object is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from ..runtime.interrupts import reentrant_lock
from . import table
from .patches import Patches
from .table import Row, Treatment
from .turns import Exclusive, in_turn

_makes = reentrant_lock()


def _make_once(make: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """For a `__getattr__` that keeps what it makes as an attribute."""

    @functools.wraps(make)
    def find_or_make(self: Any, name: str) -> Any:
        if name.startswith("__"):
            return make(self, name)
        with _makes:
            made = vars(self).get(name)
            return make(self, name) if made is None else made

    return find_or_make


def _install_operators(patches: Patches) -> None:
    for owner in (torch._ops._Ops, torch._ops._OpNamespace, torch._ops.OpOverloadPacket):
        patches.replace(owner, "__getattr__", _make_once)


def _renew_lock() -> None:
    """In a forked child: another thread may have held it."""
    global _makes
    _makes = reentrant_lock()


table.at_child.append(_renew_lock)
table.add(
    Row(
        state="operators of `torch.ops` at their first use",
        treatment=Treatment.IN_TURNS,
        meaning="An operator is one object for all threads. Two that used it first at the same "
        "moment had two, of which a `TorchDispatchMode` was given either, and torch freed one that "
        "it still used.",
        test="tests/isolation/test_first_uses.py::test_an_operator_is_one_object",
        install=_install_operators,
        in_own_process=True,
    )
)


def _listed(kinds: Any) -> Any:
    return kinds if isinstance(kinds, Iterable) else [kinds]


def _quantized(*names: str) -> Callable[[ModuleType, Patches], None]:
    """Quantized linear layers have the list of what they are made from, which they make of it."""

    def change(module: ModuleType, patches: Patches) -> None:
        for name in names:
            patches.replace(getattr(module, name), "_FLOAT_MODULE", _listed)

    return change


table.add(
    Row(
        state="classes of optimizers, and of quantized linear layers, at their first use",
        treatment=Treatment.IN_TURNS,
        meaning="torch wraps `step` of an optimizer's class when the first one is made; workers "
        "that do so at the same time would wrap it twice, and call its hooks twice.",
        test="tests/isolation/test_first_uses.py::test_hooks_of_an_optimizer_are_called_once",
        on_import={
            "torch.optim.optimizer": in_turn(
                Exclusive("prepare"), "an optimizer's class", "Optimizer._patch_step_function"
            ),
            "torch.ao.nn.intrinsic.quantized.modules.linear_relu": _quantized(
                "LinearReLU", "LinearLeakyReLU", "LinearTanh"
            ),
        },
    )
)
