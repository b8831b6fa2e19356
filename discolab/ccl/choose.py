"""Which backend a worker uses.

`Worker.shared["discolab.ccl"]` maps ranks to backends; each worker writes its own entry.
`Worker.shared["discolab.ccl.local"]` is the one `LocalBackend` of the session.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..runtime.errors import ArgumentError
from ..runtime.worker import Worker, current_worker
from .backend import Backend, BackendStatistics
from .local import LocalBackend
from .meetings import Meetings

BACKENDS = ("local",)
_NOT_YET = ("nccl", "gloo", "mpi")
_CHOSEN = "discolab.ccl"


def backend_of(worker: Worker) -> Backend:
    """The backend of a worker; the first collective chooses "auto" if nobody has."""
    chosen = worker.shared.get(_CHOSEN)
    backend = None if chosen is None else chosen.get(worker.worker_id)
    return cast(Backend, backend) if backend is not None else _choose(worker)


def backend_name() -> str:
    """The name of the calling worker's backend."""
    return backend_of(current_worker()).name


def statistics() -> BackendStatistics:
    """What the calling worker's backend holds: open collectives, messages on their way."""
    return backend_of(current_worker()).statistics()


def init(name: Any, device_ids: tuple[Any, ...]) -> None:
    """Choose the backend of the calling worker and, with `device_ids`, its GPU.

    Raises
    ------
    ArgumentError
        If there is no backend of that name or no such GPU.
    """
    worker = current_worker()
    if name in _NOT_YET:
        raise ArgumentError(
            f"init_ccl: {name!r} is not in this version; use 'auto' or {_backends()}"
        )
    if name != "auto" and name not in BACKENDS:
        raise ArgumentError(
            f"init_ccl: there is no backend {name!r}; there is {_backends()}, and 'auto' chooses"
        )
    if device_ids:
        _use_gpu(worker, device_ids)
    _choose(worker)


def _choose(worker: Worker) -> Backend:
    local = worker.shared.get("discolab.ccl.local")
    if local is None:
        new = LocalBackend(Meetings(worker.peers))
        local = worker.shared.setdefault("discolab.ccl.local", new)
    worker.shared.setdefault(_CHOSEN, {})[worker.worker_id] = local
    return cast(Backend, local)


def _use_gpu(worker: Worker, device_ids: tuple[Any, ...]) -> None:
    if len(device_ids) != worker.num_workers:
        raise ArgumentError(
            f"init_ccl got {len(device_ids)} device ids for {worker.num_workers} workers; give "
            "one for each, or none"
        )
    index, count = device_ids[worker.worker_id], torch.cuda.device_count()
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise ArgumentError(
            f"init_ccl: worker {worker.worker_id} can't use GPU {index!r}: torch sees {count} GPUs"
            + ("; give no device ids to stay on the CPU" if not count else "")
        )
    device = torch.device("cuda", index)
    if device != worker.device:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
        worker.device = device


def _backends() -> str:
    return " or ".join(repr(name) for name in BACKENDS)
