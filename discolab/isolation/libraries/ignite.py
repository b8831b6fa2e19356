"""ignite keeps who it is, its rank among them, in one variable, which the first call sets."""

from __future__ import annotations

from types import FunctionType, ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import own_variables

_VARIABLES = {"_model", "_need_to_sync"}


def _own_model(module: ModuleType, patches: Patches) -> None:
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and _VARIABLES & {*value.__code__.co_names}
    ]
    own_variables(module, patches, *names)


table.add(
    Row(
        state="the rank and the model of computation of `ignite.distributed`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker is its own rank, also for ignite's metrics, handlers and loaders.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_ignite_is_its_own_rank",
        on_import={"ignite.distributed.utils": _own_model},
        library="ignite",
    )
)
