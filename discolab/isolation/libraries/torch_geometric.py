"""torch_geometric keeps switches, what is registered, and code that it has written for layers.

For each class of layers it writes a module, by the name of the class: two scripts, or two workers,
with a class of one name would run the code that was written for whichever has come first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import table
from ..imports import import_turn
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import (
    OF_SCRIPT,
    own_value,
    owning_dicts,
    owning_variables,
)

Function = Callable[..., Any]

_CODE = f"{OF_SCRIPT}code of torch_geometric"
_of_workers: weakref.WeakSet[ModuleType] = weakref.WeakSet()  # modules of such code


def _layers(module: ModuleType, patches: Patches) -> None:
    def set_over(set_templates: Function) -> Function:
        @functools.wraps(set_templates)
        def set_in_turn(*args: Any, **kwargs: Any) -> None:
            with import_turn.taken("code of a layer of torch_geometric", by_all=True):
                set_templates(*args, **kwargs)

        return set_in_turn

    def make_over(make: Function) -> Function:
        @functools.wraps(make)
        def make_own(module_name: str, *args: Any, **kwargs: Any) -> ModuleType:
            own: dict[str, ModuleType] | None = own_value(_CODE, dict)
            if own is not None and module_name in own:
                return own[module_name]
            if own is not None or sys.modules.get(module_name) in _of_workers:
                sys.modules.pop(module_name, None)
            made: ModuleType = make(module_name, *args, **kwargs)
            if own is not None:
                own[module_name] = made
                _of_workers.add(made)
            return made

        return make_own

    patches.replace(module.MessagePassing, "_set_jittable_templates", set_over)
    patches.replace(module, "module_from_template", make_over)


def _registered(module: ModuleType, patches: Patches) -> None:
    owning_dicts(*(name for name in vars(module) if name.endswith("_dict")))(module, patches)


table.add(
    Row(
        state="torch_geometric's `set_debug`, `set_experimental_mode`, `set_home_dir`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set. "
        "`torch_geometric.backend` is shared (how it computes, not what), and so is GraphGym's "
        "`cfg`: set it alike on all workers.",
        test="tests/isolation/test_libraries.py::test_each_worker_switches_torch_geometric",
        on_import={
            "torch_geometric.debug": owning_dicts("__debug_flag__"),
            "torch_geometric.experimental": owning_dicts("__experimental_flag__"),
            "torch_geometric.home": owning_variables("get_home_dir", "set_home_dir"),
        },
        library="torch_geometric",
    )
)
table.add(
    Row(
        state="what is registered with torch_geometric's GraphGym (`register_layer` and its like)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker gets what it has registered, until its script ends. What a module "
        "registers when it is imported, and the notebook, is there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_with_torch_geometric",
        on_import={"torch_geometric.graphgym.register": _registered},
        library="torch_geometric",
    )
)
table.add(
    Row(
        state="code that torch_geometric writes for a class of layers",
        treatment=Treatment.PER_WORKER,
        meaning="It is written for the worker's own class, and anew for each script; one layer "
        "after the other.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_layers_of_torch_geometric",
        on_import={"torch_geometric.nn.conv.message_passing": _layers},
        library="torch_geometric",
    )
)
