"""fairscale keeps groups of model parallelism, and what it wraps with, for the process."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..own_globals import own_class_attributes, owning_globals
from ..patches import Patches
from ..table import Row, Treatment


def _wrapping(module: ModuleType, patches: Patches) -> None:
    names = module.ConfigAutoWrap.__annotations__
    own_class_attributes(module, "ConfigAutoWrap", patches, *names)


table.add(
    Row(
        state="groups of `fairscale.nn.model_parallel`, and fairscale's `enable_wrap`, `auto_wrap`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker initializes model parallelism for itself, and wraps with what its own "
        "`enable_wrap` was given.",
        test="tests/isolation/test_libraries.py::test_each_worker_of_fairscale_has_its_own_groups",
        on_import={
            "fairscale.nn.model_parallel.initialize": owning_globals(),
            "fairscale.nn.model_parallel.random": owning_globals("_CUDA_RNG_STATE_TRACKER"),
            "fairscale.nn.wrap.auto_wrap": _wrapping,
        },
        library="fairscale",
    )
)
