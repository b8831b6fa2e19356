"""jax keeps its configuration for the process; its contexts are each thread's."""

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


def _update_over(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def update_alike(self: Any, name: str, val: Any) -> None:
        worker = current_worker_or_none()
        holder = self._value_holders.get(name)
        if worker is None or not shares_process(worker) or holder is None or holder.value == val:
            update(self, name, val)
            return
        raise SessionError(
            f"jax.config.update({name!r}, {val!r}) on worker {worker.worker_id} would hold for all "
            "workers, which are threads of one process: set it in the notebook, use jax's context "
            "for it, as in `with jax.enable_x64(True)`, or engine='processes' (--engine processes)"
        )

    return update_alike


def _config(module: ModuleType, patches: Patches) -> None:
    patches.replace(module.Config, "update", _update_over)


table.add(
    Row(
        state="`jax.config.update`",
        treatment=Treatment.REFUSED,
        meaning="Others would compute with one worker's setting. Set it in the notebook, use jax's "
        "contexts (`with jax.enable_x64(True)`), which are the calling thread's, or "
        "`--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_configure_jax_for_all",
        on_import={"jax._src.config": _config},
        library="jax",
    )
)
