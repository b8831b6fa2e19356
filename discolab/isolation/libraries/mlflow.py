"""mlflow keeps where runs are written, and the experiment, in variables of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import own_variables, owning_variables


def _tracking(module: ModuleType, patches: Patches) -> None:
    own_variables(module, patches, "set_tracking_uri", "get_tracking_uri", "is_tracking_uri_set")

    def use_over(plain: Callable[[str], Any]) -> Any:
        @contextmanager
        def use_tracking_uri(uri: str) -> Iterator[None]:
            before = module.get_tracking_uri() if module.is_tracking_uri_set() else None
            module.set_tracking_uri(uri)
            try:
                yield
            finally:
                module.set_tracking_uri(before)

        return use_tracking_uri

    patches.replace(module, "_use_tracking_uri", use_over, everywhere=True)


table.add(
    Row(
        state="mlflow's `set_tracking_uri`, `set_registry_uri`, `set_experiment`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; runs that it begins are its own. A script's "
        "end forgets what it has set.",
        test="tests/isolation/test_libraries.py::test_each_worker_writes_runs_of_mlflow",
        on_import={
            "mlflow.tracking._tracking_service.utils": _tracking,
            "mlflow.tracking._model_registry.utils": owning_variables(
                "set_registry_uri", "_get_registry_uri_from_context"
            ),
            "mlflow.tracking.fluent": owning_variables(
                "set_experiment", "start_run", "_get_experiment_id"
            ),
        },
        library="mlflow",
    )
)
