"""tensordict keeps modes of `with` statements for the process, such as whether policies draw.

Of two workers within such a statement the first to leave would end it for the other, and the last
would leave it on for all.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .. import table
from ..imports import worker_unless_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT, own_variables

_KEY = f"{OF_SCRIPT}modes of tensordict"


def _modes(module: ModuleType, patches: Patches) -> None:
    """Each mode is an object that is there once, as a variable of a module."""

    def get(mode: Any) -> Any:
        worker = worker_unless_importing()
        own = {} if worker is None else worker.process_state.get(_KEY, {})
        return own.get(mode, vars(mode).get("_mode"))

    def set_(mode: Any, value: Any) -> None:
        worker = worker_unless_importing()
        if worker is None:
            vars(mode)["_mode"] = value
        else:
            worker.process_state.setdefault(_KEY, {})[mode] = value

    def inherit(own: dict[Any, Any]) -> None:
        for mode, value in own.items():
            vars(mode)["_mode"] = value

    patches.add(module._ContextManager, "_mode", property(get, set_))
    table.inherits(_KEY, inherit)


def _options(module: ModuleType, patches: Patches) -> None:
    """Those that are variables; who writes and who reads them stands in the same module."""
    names = ("lazy_legacy", "list_to_stack", "capture_non_tensor_stack")
    setters = [name for name in vars(module) if name.lstrip("_") in {f"set_{n}" for n in names}]
    own_variables(module, patches, *names, *setters)


table.add(
    Row(
        state="modes of tensordict (`set_interaction_type`, `set_composite_lp_aggregate`, "
        "`set_skip_existing`, `set_list_to_stack` and their like)",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets, also as a context, is its own; for all else it sees the "
        "notebook's. So `set_exploration_type` of torchrl is each worker's, too.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_modes_of_tensordict",
        on_import={"tensordict.utils": _modes, "tensordict._utils_options": _options},
        library="tensordict",
    )
)
