"""joblib keeps its pool of processes, which have the variables of whoever has started them."""

from __future__ import annotations

from .. import table
from ..table import Row, Treatment
from ..thread_state import of_libraries, settings_in
from ..worker_local import owning_dicts, owning_variables

of_libraries["joblib.parallel"] = settings_in("_backend")

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
table.add(
    Row(
        state="`joblib.register_parallel_backend`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker computes with the backend that it has registered, until its script "
        "ends. `make_default=True` is for all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_a_backend_of_joblib",
        on_import={"joblib.parallel": owning_dicts("BACKENDS")},
        library="joblib",
    )
)
