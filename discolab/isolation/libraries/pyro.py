"""pyro keeps its handlers and its parameters for the process: models would sample in each other."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..own_objects import own_list, own_object
from ..patches import Patches
from ..table import Row, Treatment


def _runtime(module: ModuleType, patches: Patches) -> None:
    own_list(module, "_PYRO_STACK", patches)
    for name in ("_PYRO_PARAM_STORE", "_DIM_ALLOCATOR", "_ENUM_ALLOCATOR"):
        thing = getattr(module, name)
        own_object(thing, f"pyro {name}", type(thing), patches)


table.add(
    Row(
        state="pyro's handlers, its store of parameters and its plates' dimensions",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker traces, conditions and trains with its own. `pyro.settings` and "
        "`enable_validation` are shared: set them in the notebook, or alike on all workers.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_pyro_infers_for_itself",
        on_import={"pyro.poutine.runtime": _runtime},
        library="pyro",
    )
)
