"""pandas keeps its options in a tree of dictionaries, which `option_context` changes and restores.

Of two workers within it at once the last that leaves would restore what the other one had set.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ...runtime.worker import Worker
from .. import table
from ..imports import worker_unless_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT

_KEY = f"{OF_SCRIPT}pandas options"


class _Section(dict[str, Any]):
    """A dictionary with options: a worker reads what it has set, else what is there for all."""

    def __init__(self, path: str, shared: dict[str, Any]) -> None:
        super().__init__(shared)
        self.path = path

    def __getitem__(self, name: str) -> Any:
        worker = worker_unless_importing()
        own = None if worker is None else worker.process_state.get(_KEY)
        key = f"{self.path}{name}"
        return own[key] if own and key in own else super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        worker = worker_unless_importing()
        if worker is None or name not in self:
            super().__setitem__(name, value)
        else:
            worker.process_state.setdefault(_KEY, {})[f"{self.path}{name}"] = value

    def plain(self) -> dict[str, Any]:
        """The options that are there for all."""
        return {n: v.plain() if isinstance(v, _Section) else v for n, v in self.items()}


def _section(path: str, options: dict[str, Any]) -> _Section:
    return _Section(
        path,
        {
            name: _section(f"{path}{name}.", value) if isinstance(value, dict) else value
            for name, value in options.items()
        },
    )


def _own_options(module: ModuleType, patches: Patches) -> None:
    # modules of pandas have the outermost dictionary under names of their own: it stays
    shared = module._config.config._global_config
    shared.update(_section("", shared))

    def put_back() -> None:
        shared.update({n: v.plain() for n, v in shared.items() if isinstance(v, _Section)})

    patches.at_undo(put_back)


def _in_child(worker: Worker) -> None:
    module: Any = sys.modules.get("pandas")
    for key, value in worker.process_state.get(_KEY, {}).items():
        module.set_option(key, value)


table.add(
    Row(
        state="options of pandas",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets, also by `option_context`, is its own; for all else it sees "
        "the notebook's. Accessors that are registered are shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_options_of_pandas",
        on_import={"pandas": _own_options},
        in_child=_in_child,
        library="pandas",
    )
)
