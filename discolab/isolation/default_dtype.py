"""torch's default dtype, of which a process has one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment


def _warn(set_default: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.set_default_dtype` that says on a worker whom it concerns."""

    @functools.wraps(set_default)
    def set_for_all(dtype: Any, /) -> None:
        if current_worker_or_none() is not None and dtype is not torch.get_default_dtype():
            warnings.warn(
                "the default dtype belongs to the process: this sets it for all workers and for "
                "the notebook. dtype= and module.to(dtype) are the worker's own",
                stacklevel=2,
            )
        set_default(dtype)

    return set_for_all


def _install(patches: Patches) -> None:
    patches.replace(torch, "set_default_dtype", _warn)


table.add(
    Row(
        state="the default dtype",
        treatment=Treatment.SHARED,
        meaning="Set for all workers and the notebook, with a warning.",
        test="tests/ccl/test_dist_limits.py",
        install=_install,
    )
)
