"""dask keeps its configuration in a tree of dictionaries, which `dask.config.set` changes."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

from ...runtime.worker import Worker
from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT, DictOfWorkers

_NAME = "configuration of dask"


def _configuration(module: ModuleType, patches: Patches) -> None:
    shared = module.config
    own = DictOfWorkers(_NAME, shared, lambda: copy.deepcopy(shared))
    for name in ("config", "global_config"):
        patches.replace(module, name, lambda _: own, everywhere=True)


def _in_child(worker: Worker) -> None:
    own = worker.process_state.get(f"{OF_SCRIPT}{_NAME}")
    if own is not None:
        config: Any = vars(sys.modules["dask.config"])["config"]
        config.clear()
        config.update(own)


table.add(
    Row(
        state="`dask.config`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; what it sets, also as a context, is its own, "
        "until its script ends. Callbacks that are registered (`ProgressBar`) are shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_configuration_of_dask",
        on_import={"dask.config": _configuration},
        in_child=_in_child,
        library="dask",
    )
)
