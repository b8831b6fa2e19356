"""Calls between workers, references to what they have, and training across them.

On a worker the functions here act for it; on the controller the same are methods of `Session.rpc`:
``sess.rpc.rpc_sync(2, torch.add, args=(a, 1))``. docs/rpc.md tells it all.
"""

from __future__ import annotations

from ..runtime.session import Session
from . import autograd as autograd  # a module of its own: discolab.rpc.autograd
from .api import (
    SessionRpc,
    get_worker_info,
    remote,
    rpc_async,
    rpc_of,
    rpc_sync,
    stream,
)
from .errors import WorkerLostError
from .futures import Future, async_execution, wait_all
from .names import CONTROLLER, WorkerInfo
from .node import DEFAULT_TIMEOUT
from .optimizer import DistributedOptimizer
from .remote_module import RemoteModule
from .rref import RRef
from .streams import Stream

Session.above["rpc"] = rpc_of

__all__ = [
    "CONTROLLER",
    "DEFAULT_TIMEOUT",
    "DistributedOptimizer",
    "Future",
    "RRef",
    "RemoteModule",
    "SessionRpc",
    "Stream",
    "WorkerInfo",
    "WorkerLostError",
    "async_execution",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "stream",
    "wait_all",
]
