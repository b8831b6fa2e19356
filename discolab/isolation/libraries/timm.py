"""timm keeps switches of its layers in variables, and the models by their names in a dictionary."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import own_variables, owning_dicts, owning_variables

_SWITCHES = {
    "timm.layers.fast_norm": owning_variables("set_fast_norm", "is_fast_norm"),
    "timm.data.readers.img_extensions": owning_variables(
        "_set_extensions",
        "is_img_extension",
        "get_img_extensions",
        "set_img_extensions",
        "add_img_extensions",
        "del_img_extensions",
    ),
}


def _config(module: ModuleType, patches: Patches) -> None:
    own_variables(module, patches, *(name for name in module.__all__ if hasattr(module, name)))


table.add(
    Row(
        state="timm's `set_fused_attn`, `set_layer_config`, `set_exportable`, `set_fast_norm`, "
        "`set_img_extensions` and their like",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set.",
        test="tests/isolation/test_libraries.py::test_each_worker_switches_timm",
        on_import={"timm.layers.config": _config, **_SWITCHES},
        library="timm",
    )
)
table.add(
    Row(
        state="`timm.models.register_model`",
        treatment=Treatment.PER_WORKER,
        meaning="`create_model` calls the function that the worker has registered. What a module "
        "registers when it is imported, and the notebook, is there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_a_model_of_timm",
        on_import={"timm.models._registry": owning_dicts("_model_entrypoints")},
        library="timm",
    )
)
