"""The names that every cell is given, known too wherever the debugger works something out.

A function of an imported module has no `rank` of its own; a condition may speak of it all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import ccl, rpc
from ..runtime.worker import Worker, current_worker_or_none

_OWN = ("rank", "world_size", "device", "worker", "ccl", "torch", "dist", "rpc")
_AS_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

FUNCTIONS: dict[str, Any] = {}
"""Functions of the debugger's own; their modules, which are above this one, enter them."""
WORKER_NAMES = (*_OWN, "disco_assert")
GIVEN = frozenset((*WORKER_NAMES, *_AS_TORCHRUN))


def given_names(worker: Worker) -> dict[str, Any]:
    """Name -> value, for the cells of a worker."""
    rank, size = worker.worker_id, worker.num_workers
    values = (rank, size, worker.device, worker, ccl, torch, torch.distributed, rpc)
    named: dict[str, Any] = dict(zip(_OWN, values, strict=True))
    return {
        **named,
        **FUNCTIONS,
        "RANK": rank,
        "LOCAL_RANK": worker.local_worker_id,
        "WORLD_SIZE": size,
    }


def given_here() -> dict[str, Any]:
    """The same for the worker whose thread this is; nothing elsewhere."""
    worker = current_worker_or_none()
    return {} if worker is None else given_names(worker)
