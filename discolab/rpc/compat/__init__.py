"""`torch.distributed.rpc` in the workers of a session: PyTorch's names, signatures and meanings.

A program that was written for PyTorch RPC runs on workers with its import lines changed:

    import discolab.rpc.compat as rpc                   # import torch.distributed.rpc as rpc
    import discolab.rpc.compat.autograd as dist_autograd  # torch.distributed.autograd
    from discolab.rpc.compat import DistributedOptimizer  # torch.distributed.optim
    from discolab.rpc.compat import RemoteModule          # torch.distributed.nn

Each worker calls `init_rpc`, and from then on has the name that it gave; `shutdown` waits for all.
Calls, futures, references and contexts are those of `discolab.rpc`, with all that they do besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import api
from ..futures import Future
from ..names import WorkerInfo
from ..node import UNSET
from ..optimizer import DistributedOptimizer
from ..remote_module import RemoteModule
from ..rref import RRef
from . import autograd, functions
from .members import (
    get_rpc_timeout,
    init_rpc,
    member_here,
    shutdown,
)
from .options import BackendType, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "DistributedOptimizer",
    "PyRRef",
    "RRef",
    "RemoteModule",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "autograd",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

PyRRef = RRef


def is_available() -> bool:
    """Whether there is RPC: always."""
    return True


def rpc_sync(
    to: int | str | WorkerInfo,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Any:
    """Run ``func(*args, **kwargs)`` on a worker, and wait for what it returns.

    Parameters
    ----------
    timeout
        Seconds, 0 for no limit; -1 means that of `init_rpc`.

    Raises
    ------
    RuntimeError
        Before `init_rpc`, if there is no such worker, if it has died, or at the deadline; else
        what `func` has raised.
    """
    member_here()
    return api.rpc_sync(to, func, _positional(args), kwargs or None, timeout)


def rpc_async(
    to: int | str | WorkerInfo,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> Future:
    """As `rpc_sync`, without waiting: a future of what the function returns."""
    member_here()
    return api.rpc_async(to, func, _positional(args), kwargs or None, timeout)


def remote(
    to: int | str | WorkerInfo,
    func: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET,
) -> RRef:
    """As `rpc_async`, but the result stays there: a reference to it, at once."""
    member_here()
    return api.remote(to, func, _positional(args), kwargs or None, timeout)


def _positional(args: Any) -> Any:
    """PyTorch takes whatever can be unpacked, as a tensor of several."""
    return tuple(args) if isinstance(args, torch.Tensor | torch.Size) else args


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and rank of the worker of that name; None: of the caller."""
    member_here()
    return api.get_worker_info(worker_name)
