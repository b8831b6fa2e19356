"""joblib keeps its pool of processes, which have the variables of whoever has started them."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import own_variables


def _pool(module: ModuleType, patches: Patches) -> None:
    own_variables(module, patches, "_ReusablePoolExecutor")


def _arguments(module: ModuleType, patches: Patches) -> None:
    own_variables(module, patches, "MemmappingExecutor")


table.add(
    Row(
        state="joblib's pool of processes",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker starts its own, whose processes have its environment, so its rank. "
        "It ends with the script, or when it had nothing to do for some minutes.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_pool_of_joblib",
        on_import={
            "joblib.externals.loky.reusable_executor": _pool,
            "joblib.executor": _arguments,
        },
        library="joblib",
    )
)
