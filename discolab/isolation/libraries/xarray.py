"""xarray keeps its options in a dictionary, which `set_options` changes and restores."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from ...runtime.worker import Worker
from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT, DictOfWorkers

_MODULE, _NAME = "xarray.core.options", "options of xarray"


def _options(module: ModuleType, patches: Patches) -> None:
    own = functools.partial(DictOfWorkers, _NAME)
    patches.replace(module, "OPTIONS", own, everywhere=True)


def _in_child(worker: Worker) -> None:
    own = worker.process_state.get(f"{OF_SCRIPT}{_NAME}")
    if own:
        vars(sys.modules[_MODULE])["OPTIONS"].update(own)


table.add(
    Row(
        state="options of xarray",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets with `set_options`, also as a context, is its own; for all "
        "else it sees the notebook's. Accessors that are registered are shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_options_of_xarray",
        on_import={_MODULE: _options},
        in_child=_in_child,
        library="xarray",
    )
)
