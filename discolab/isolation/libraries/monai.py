"""MONAI keeps its seed, and whether it tracks metadata, in variables of modules."""

from __future__ import annotations

from .. import table
from ..table import Row, Treatment
from ..worker_local import owning_variables

table.add(
    Row(
        state="MONAI's `set_track_meta` and `set_determinism`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set. The "
        "switches of cuDNN that `set_determinism` sets are changed by all workers together.",
        test="tests/isolation/test_libraries.py::test_each_worker_switches_monai",
        on_import={
            "monai.data.meta_obj": owning_variables("set_track_meta", "get_track_meta"),
            "monai.utils.misc": owning_variables("set_determinism", "get_seed"),
        },
        library="monai",
    )
)
