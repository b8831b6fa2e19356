"""Collectives between workers: worker functions with a group, and the backends that do them.

    from discolab import ccl
    total = ccl.all_reduce(x)                      # within my group
    whole = ccl.all_gather(x, group="world")       # among all workers

Importing this package registers Disco's ``runtime.disco.*`` collectives, which
`Session.allreduce` and its like call by name.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import disco as _disco  # registers runtime.disco.*
from . import distributed as _distributed  # has torch.distributed work in worker threads
from .backend import Backend, BackendStatistics
from .call import Call, set_timeout
from .checks import GradientWarning
from .choose import backend_name, statistics
from .groups import Group, group, new_group, world
from .ops import (
    all_gather,
    all_gather_coalesced,
    all_gather_list,
    all_reduce,
    all_reduce_,
    all_reduce_coalesced,
    all_to_all,
    barrier,
    broadcast,
    broadcast_,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_coalesced,
    scatter,
)
from .p2p import (
    irecv,
    isend,
    recv,
    recv_from_prev_group,
    recv_from_worker,
    send,
    send_to_next_group,
    send_to_worker,
)
from .work import Work

if TYPE_CHECKING:
    from . import autograd


def __getattr__(name: str) -> Any:
    """`autograd` is imported when it is first used."""
    if name == "autograd":
        return importlib.import_module(".autograd", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Backend",
    "BackendStatistics",
    "Call",
    "GradientWarning",
    "Group",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_list",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_to_all",
    "autograd",
    "backend_name",
    "barrier",
    "broadcast",
    "broadcast_",
    "gather",
    "group",
    "irecv",
    "isend",
    "new_group",
    "recv",
    "recv_from_prev_group",
    "recv_from_worker",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "scatter",
    "send",
    "send_to_next_group",
    "send_to_worker",
    "set_timeout",
    "statistics",
    "world",
]

del _disco, _distributed
