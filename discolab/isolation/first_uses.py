"""What torch changes in its own classes when they are used for the first time in the process.

Some first uses take two steps: look whether a class is changed already, then change it. A process
does that once. Workers that run one program do it all at the same moment, and a class that two of
them find unchanged is changed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from . import table
from .patches import Patches
from .table import Row, Treatment
from .turns import Exclusive, in_turn


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
