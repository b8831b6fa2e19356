"""diffusers keeps in a class which kernel attention uses."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .. import table
from ..own import OwnSetting
from ..patches import Patches
from ..table import Row, Treatment

_own: OwnSetting[Any] = OwnSetting("diffusers attention backend")


class _Backend:
    """The class's variable: a worker's own, or the notebook's."""

    def __init__(self, notebooks: Any) -> None:
        self.notebooks = notebooks

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return _own.get(lambda: self.notebooks)


def _attention(module: ModuleType, patches: Patches) -> None:
    registry = module._AttentionBackendRegistry
    variable = _Backend(registry._active_backend)
    plain = vars(registry)["set_active_backend"]

    def set_active_backend(_cls: Any, backend: Any) -> None:
        if not _own.set(backend):
            variable.notebooks = backend

    def put_back() -> None:
        registry._active_backend = variable.notebooks
        registry.set_active_backend = plain

    registry._active_backend = variable
    registry.set_active_backend = classmethod(set_active_backend)
    patches.at_undo(put_back)


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
