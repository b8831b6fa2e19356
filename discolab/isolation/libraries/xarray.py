"""xarray keeps its options in a dictionary, which `set_options` changes and restores."""

from __future__ import annotations

import functools
from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import DictOfWorkers


def _options(module: ModuleType, patches: Patches) -> None:
    own = functools.partial(DictOfWorkers, "options of xarray")
    patches.replace(module, "OPTIONS", own, everywhere=True)


table.add(
    Row(
        state="options of xarray",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets with `set_options`, also as a context, is its own; for all "
        "else it sees the notebook's. Accessors that are registered are shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_options_of_xarray",
        on_import={"xarray.core.options": _options},
        library="xarray",
    )
)
