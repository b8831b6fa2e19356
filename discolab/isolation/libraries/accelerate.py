"""accelerate keeps what it knows of ranks and groups in one dictionary of each class."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .. import table
from ..own import PerWorker
from ..patches import Patches
from ..table import Row, Treatment


def _own(shared: dict[str, Any]) -> PerWorker[dict[str, Any]]:
    return PerWorker(shared, dict)


def _state(module: ModuleType, patches: Patches) -> None:
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        patches.replace(getattr(module, name), "_shared_state", _own)


table.add(
    Row(
        state="accelerate's `PartialState`, `AcceleratorState`, `GradientState`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker is its own rank, also in the `Trainer` of transformers.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_accelerate_is_its_own_rank",
        on_import={"accelerate.state": _state},
        library="accelerate",
    )
)
