"""datasets keeps in variables of modules whether it caches and whether it shows progress."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.worker import Worker
from .. import table
from ..imports import worker_unless_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT

# by module: who asks, the value that one switch sets, and the one that the other does
_SWITCHES = {
    "datasets.fingerprint": (
        "is_caching_enabled",
        {"enable_caching": True, "disable_caching": False},
    ),
    "datasets.utils.tqdm": (
        "are_progress_bars_disabled",
        {
            "enable_progress_bars": False,
            "enable_progress_bar": False,
            "disable_progress_bars": True,
            "disable_progress_bar": True,
        },
    ),
}


def _key(module: str) -> str:
    return f"{OF_SCRIPT}{_SWITCHES[module][0]} of {module}"


def _own_switch(module: ModuleType, patches: Patches) -> None:
    key = _key(module.__name__)
    getter, setters = _SWITCHES[module.__name__]

    def get_over(get: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(get)
        def get_own() -> bool:
            worker = worker_unless_importing()
            own = None if worker is None else worker.process_state.get(key)
            return get() if own is None else bool(own)

        return get_own

    def set_over(set_: Callable[[], None], value: bool) -> Callable[[], None]:
        @functools.wraps(set_)
        def set_own() -> None:
            worker = worker_unless_importing()
            if worker is None:
                set_()
            else:
                worker.process_state[key] = value

        return set_own

    patches.replace(module, getter, get_over, everywhere=True)
    for name, value in setters.items():
        if hasattr(module, name):
            patches.replace(module, name, functools.partial(set_over, value=value), everywhere=True)


def _in_child(worker: Worker) -> None:
    for name, (_, setters) in _SWITCHES.items():
        own, module = worker.process_state.get(_key(name)), sys.modules.get(name)
        for setter, value in setters.items():
            if value == own and hasattr(module, setter):
                set_: Any = getattr(module, setter)
                set_()


table.add(
    Row(
        state="`datasets.disable_caching`, `datasets.disable_progress_bars`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker that sets none has the notebook's; a script's end forgets what it has "
        "set. `datasets.config` is shared, and so are types of features that are registered.",
        test="tests/isolation/test_libraries.py::test_each_worker_switches_datasets",
        on_import=dict.fromkeys(_SWITCHES, _own_switch),
        in_child=_in_child,
        library="datasets",
    )
)
