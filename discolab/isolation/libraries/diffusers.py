"""diffusers keeps in a class which kernel attention uses."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import own_class_variables


def _attention(module: ModuleType, patches: Patches) -> None:
    registry = module._AttentionBackendRegistry
    own_class_variables(registry, patches, "set_active_backend", "_active_backend")


table.add(
    Row(
        state="diffusers' `attention_backend`, `set_attention_backend`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that sets none has the notebook's.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_an_attention_of_diffusers",
        on_import={"diffusers.models.attention_dispatch": _attention},
        library="diffusers",
    )
)
