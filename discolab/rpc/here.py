"""Where the calling thread is: on which node, and as which rank. A thread-local for callees.

A worker's own thread, and threads that it started, are told by `current_worker`; everything else
is the controller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..engines.hooks import open_sessions
from ..runtime.errors import SessionError
from ..runtime.session import Session
from ..runtime.worker import Worker, current_worker_or_none
from .names import CONTROLLER

if TYPE_CHECKING:
    from .node import Node

_local = threading.local()


class Resolvers:
    """Find the node of a worker or of a session; nodes.py, which makes nodes, sets them."""

    of_worker: Callable[[Worker], Node]
    of_session: Callable[[Session], Node]


resolvers = Resolvers()


class Place(NamedTuple):
    """A node and a rank of it."""

    node: Node
    rank: int


def bind_place(place: Place | None) -> None:
    """Say where the calling thread is."""
    _local.place = place


def bound_place() -> Place | None:
    """Where the calling thread is, if it was said."""
    return getattr(_local, "place", None)


def rank_on(node: Node) -> int:
    """As which rank of `node` the calling thread runs; the controller if it is no worker of it."""
    found: Place | None = getattr(_local, "place", None)
    if found is not None and found.node is node:
        return found.rank
    worker = current_worker_or_none()
    if worker is not None and node.workers.get(worker.worker_id) is worker:
        return worker.worker_id
    return CONTROLLER if node.id == 0 else node.id


def place_here() -> Place:
    """Where the calling thread is.

    Raises
    ------
    SessionError
        On the controller, unless exactly one session is open.
    """
    found: Place | None = getattr(_local, "place", None)
    if found is not None:
        return found
    worker = current_worker_or_none()
    if worker is not None:
        return Place(resolvers.of_worker(worker), worker.worker_id)
    sessions = open_sessions()
    if len(sessions) != 1:
        many = f"{len(sessions)} sessions are open" if sessions else "no session is open"
        raise SessionError(
            f"on the controller, discolab.rpc means the one open session, and {many}: "
            "use the session's own, as in sess.rpc.rpc_sync(…)"
        )
    return Place(resolvers.of_session(sessions[0]), CONTROLLER)


def current_node() -> Node:
    """The node of the calling thread; raises as `place_here`."""
    return place_here().node


def current_rank() -> int:
    """The rank as which the calling thread runs; raises as `place_here`."""
    return place_here().rank
