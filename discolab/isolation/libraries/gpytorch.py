"""gpytorch, linear_operator and botorch keep settings in classes, also of `with` statements."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import own_class_variables

_VARIABLES = {
    "_set_state": ("_state",),
    "_set_num_probe_vectors": ("_num_probe_vectors",),
    "_set_value": (
        "_global_value",
        "_global_float_value",
        "_global_double_value",
        "_global_half_value",
    ),
}


def _settings(module: ModuleType, patches: Patches) -> None:
    for kind in tuple(vars(module).values()):
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        for setter, variables in _VARIABLES.items():
            names = [name for name in variables if hasattr(kind, name)]
            if names and hasattr(kind, setter):
                own_class_variables(kind, patches, setter, *names)


table.add(
    Row(
        state="settings of gpytorch, linear_operator and botorch",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets, also as a context, is its own; for all else it sees the "
        "notebook's.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_settings_of_gpytorch",
        on_import={
            f"{library}.settings": _settings
            for library in ("linear_operator", "gpytorch", "botorch")
        },
        library="gpytorch",
    )
)
