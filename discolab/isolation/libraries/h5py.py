"""h5py keeps its configuration in an object of C code, which `h5py.get_config` gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.errors import SessionError
from ...runtime.worker import current_worker_or_none
from .. import table
from ..patches import Patches, shares_process
from ..table import Row, Treatment
from ..worker_local import OwnSetting


class _Configuration:
    """h5py's, with an order of keys for each worker."""

    def __init__(self, shared: Any, order: OwnSetting[bool]) -> None:
        vars(self).update(_shared=shared, _order=order)

    def __getattr__(self, name: str) -> Any:
        shared = vars(self)["_shared"]
        if name == "track_order":
            return vars(self)["_order"].get(lambda: shared.track_order)
        return getattr(shared, name)

    def __setattr__(self, name: str, value: Any) -> None:
        shared, worker = vars(self)["_shared"], current_worker_or_none()
        if name == "track_order" and vars(self)["_order"].set(bool(value)):
            return
        shared_by_all = worker is not None and shares_process(worker)
        if shared_by_all and getattr(shared, name) != value:
            raise SessionError(
                f"h5py.get_config().{name} = {value!r}: files of all workers would be written with "
                "it. Set it in the notebook, or start the session with engine='processes' "
                "(%disco_session --engine processes)"
            )
        setattr(shared, name, value)


def _configure(module: ModuleType, patches: Patches) -> None:
    order: OwnSetting[bool] = OwnSetting("h5py's track_order")

    def over(get: Callable[[], Any]) -> Callable[[], Any]:
        own = _Configuration(get(), order)
        return functools.wraps(get)(lambda: own)

    patches.replace(module, "get_config", over, everywhere=True)


table.add(
    Row(
        state="`h5py.get_config`",
        treatment=Treatment.PER_WORKER,
        meaning="`track_order` is each worker's, until its script ends. To change `complex_names` "
        "or another one on a worker is an error: set it in the notebook, or use "
        "`--engine processes`.",
        test="tests/isolation/test_libraries.py::test_each_worker_orders_the_keys_of_h5py",
        on_import={"h5py.h5": _configure},
        library="h5py",
    )
)
