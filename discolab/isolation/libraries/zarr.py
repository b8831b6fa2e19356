"""zarr keeps its configuration in a tree of dictionaries, which `zarr.config.set` changes."""

from __future__ import annotations

import copy
from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import DictOfWorkers

_NAME = "configuration of zarr"


def _configuration(module: ModuleType, patches: Patches) -> None:
    shared = module.config.config
    own = DictOfWorkers(_NAME, shared, lambda: copy.deepcopy(shared))
    patches.replace(module.config, "config", lambda _: own)


table.add(
    Row(
        state="`zarr.config`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; what it sets, also as a context, is its own, "
        "until its script ends. Codecs that are registered are shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_configuration_of_zarr",
        on_import={"zarr.core.config": _configuration},
        library="zarr",
    )
)
