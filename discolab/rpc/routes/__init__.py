"""How messages get from node to node of a session whose workers are in several processes.

A *node* is a process of the session: the controller's with worker 0, or another worker's. Between
nodes of one machine messages go over unix sockets, what is large in shared memory; between machines
over TCP, encrypted (`transport`). Addresses are handed round by a service of the session
(`service`). Above a `Router` nothing of this is seen.
"""

from __future__ import annotations

from ...runtime.link import LISTENERS
from ...runtime.worker import Worker
from .router import Later, Router, open_router
from .service import SERVICE, RpcService


def open_node(worker: Worker) -> None:
    """Have the node of this process open its router, as others use rpc; set by the layer above."""
    raise NotImplementedError("nobody has said what a node of rpc is")


LISTENERS[SERVICE] = lambda worker: open_node(worker)

__all__ = ["SERVICE", "Later", "Router", "RpcService", "open_node", "open_router"]
