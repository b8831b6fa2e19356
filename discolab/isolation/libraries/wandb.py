"""wandb keeps the run that has begun last in variables of its module, and begins no second one.

Without this the workers would log to the run of whichever has come first.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

from ...runtime.worker import Worker, current_worker_or_none
from .. import table
from ..imports import worker_unless_importing
from ..patches import ModuleWithProperties, Patches
from ..programs import call_at_end
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT

_NAMES = f"{OF_SCRIPT}variables of wandb"
_RUNS = f"{OF_SCRIPT}runs of wandb"


def _variable(name: str) -> property:
    """One that `wandb.init` sets: a worker has the notebook's until it begins a run."""

    def get(module: Any) -> Any:
        worker = worker_unless_importing()
        own = {} if worker is None else worker.process_state.get(_NAMES, {})
        return own[name] if name in own else vars(module)[name]

    def set_(module: Any, value: Any) -> None:
        worker = worker_unless_importing()
        own = vars(module) if worker is None else worker.process_state.setdefault(_NAMES, {})
        own[name] = value

    return property(get, set_)


def _own_variables(module: ModuleType, patches: Patches) -> None:
    names = inspect.signature(sys.modules["wandb.sdk.lib.module"].set_global).parameters
    there = {name: _variable(name) for name in names if name in vars(module)}
    patches.change_class(module, type("WandbOfWorkers", (ModuleWithProperties,), there))
    table.inherits(_NAMES, vars(module).update)


def _own_runs(module: ModuleType, patches: Patches) -> None:
    def get(setup: Any) -> list[Any]:
        worker = current_worker_or_none()
        runs: list[Any] = vars(setup)["_active_runs"]
        if worker is not None:
            if _RUNS not in worker.process_state:
                worker.process_state[_RUNS] = []
                call_at_end(worker, functools.partial(_finish, worker))
            runs = worker.process_state[_RUNS]
        return runs

    def set_(setup: Any, runs: list[Any]) -> None:
        vars(setup)["_active_runs"] = runs

    patches.add(module._WandbSetup, "_active_runs", property(get, set_))


def _finish(worker: Worker) -> None:
    """As at the end of a process: runs that nobody has finished are."""
    for run in tuple(worker.process_state.get(_RUNS, ())):
        run.finish()


table.add(
    Row(
        state="the run of wandb (`wandb.init`, `wandb.log`, `wandb.run`, `wandb.config`)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker begins and logs to a run of its own, which is finished at the end of "
        "its script or of the session. The process that writes and sends them is one for all, and "
        "so are `wandb.setup` and `wandb.login`.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_run_of_wandb",
        on_import={"wandb": _own_variables, "wandb.sdk.wandb_setup": _own_runs},
        leave=_finish,
        library="wandb",
    )
)
