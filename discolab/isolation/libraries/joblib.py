"""joblib keeps its pool of processes, which have the variables of whoever has started them."""

from __future__ import annotations

from .. import table
from ..table import Row, Treatment
from ..worker_local import owning_variables

table.add(
    Row(
        state="joblib's pool of processes",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker starts its own, whose processes have its environment, so its rank. "
        "It ends with the script, or when it had nothing to do for some minutes.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_pool_of_joblib",
        on_import={
            "joblib.externals.loky.reusable_executor": owning_variables("_ReusablePoolExecutor"),
            "joblib.executor": owning_variables("MemmappingExecutor"),
        },
        library="joblib",
    )
)
