"""Where the calling thread is, and the node of its process: made on first use, ended with it.

A server thread is bound to its place (node.py). A worker's own thread, and threads that it started,
are known by `current_worker`; everything else is the controller. A node lies in its workers'
`shared`; `_making` guards the making.
"""

from __future__ import annotations

import threading
from typing import Any

from ..runtime.errors import SessionError, session_closed
from ..runtime.interrupts import shield
from ..runtime.restart import at_replaced, at_restart
from ..runtime.services import LISTENERS
from ..runtime.session import Session, open_sessions
from ..runtime.worker import Worker, at_leave, current_worker, current_worker_or_none
from .directory import SERVICE, RpcService
from .names import CONTROLLER
from .node import Node, Place, bound_place
from .router import open_router

NODE = "discolab.rpc.node"  # where in a worker's `shared` its node is
_NODES = "discolab.rpc.nodes"  # and, of one that has a lost one's place, the nodes' numbers
_OPENED = "discolab.rpc.opened"  # and an event: it was told of the others
_ADMITTED_WITHIN = 5.0  # seconds in which the others are to know of a new node

_making = threading.RLock()  # to be open tells the session's service, which may ask for node 0


def place_here() -> Place:
    """Where the calling thread is.

    Raises
    ------
    SessionError
        On the controller, unless exactly one session is open.
    """
    place = bound_place()
    if place is not None:
        return place
    worker = current_worker_or_none()
    if worker is not None:
        return Place(node_of_worker(worker), worker.worker_id)
    sessions = open_sessions()
    if len(sessions) != 1:
        many = f"{len(sessions)} sessions are open" if sessions else "no session is open"
        raise SessionError(
            f"on the controller, discolab.rpc means the one open session, and {many}: "
            "use the session's own, as in sess.rpc.rpc_sync(…)"
        )
    return Place(node_of_session(sessions[0]), CONTROLLER)


def current_node() -> Node:
    """The node of the calling thread; raises as `place_here`."""
    return place_here().node


def node_of_worker(worker: Worker) -> Node:
    """The node of a worker's process; made where there is none."""
    node: Node | None = worker.shared.get(NODE)
    if node is not None and (node.alone or node.router is not None):
        return node
    with shield(), _making:  # or half a node would get what is for the one made in its place
        node = worker.shared.get(NODE)
        if node is None:
            alone = len(worker.peers) == worker.num_workers
            nodes = [0] * worker.num_workers if alone else worker.shared.get(_NODES)
            node = Node(worker.worker_id, worker.peers, nodes or range(worker.num_workers))
            worker.shared[NODE] = node
            if not alone:
                try:
                    node.router = open_router(
                        worker,
                        node.deliver,
                        node.peer_lost,
                        node.peer_frozen,
                        node.peer_replaced,
                        node.id,
                    )
                except BaseException:
                    del worker.shared[NODE]
                    raise
                node.opened.set()
    return node


def node_of_session(session: Session) -> Node:
    """The node of the controller's process.

    Raises
    ------
    SessionClosedError
    """
    if session.closed:
        raise session_closed()
    node = node_of_worker(session.workers_here()[0])
    if session.timeout is not None:
        node.default_timeouts[CONTROLLER] = session.timeout
    return node


def _worker_left(worker: Worker) -> None:
    """A worker ends; on its own thread. Where another takes its place, the session is not over."""
    node: Node | None = worker.shared.get(NODE)
    if node is None or (worker.gives_way and node.alone):
        return
    if worker.gives_way and node.router is not None:  # others are to hear that it is lost
        node.router.close()
    node.worker_left(worker.worker_id)


def _worker_replaced(worker: Worker) -> None:
    node: Node | None = worker.shared.get(NODE)
    if node is not None:
        node.worker_replaced(worker)


def _open(worker: Worker) -> None:
    """Others use rpc: this node has to be there."""
    node_of_worker(worker)
    opened = worker.shared.get(_OPENED)
    if opened is not None:
        opened.set()


def _for_new_worker(session: Session) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """What a worker process does first that takes the place of a lost one."""
    service = getattr(session, "services", {}).get(SERVICE)
    if not isinstance(service, RpcService):
        return []
    return [("to take part in rpc", _take_part, (service.nodes(), service.was_used))]


def _take_part(nodes: list[int], wait: bool) -> None:
    """Be known as a new node, before anything is called here, or from here (a worker function)."""
    worker = current_worker()
    if worker.link is None:
        return
    worker.shared[_NODES] = nodes
    opened = worker.shared[_OPENED] = threading.Event()
    worker.link.tell(SERVICE, ("ready", False))
    if wait and not opened.wait(_ADMITTED_WITHIN):  # one of them is stopped, or holds the GIL
        worker.link.tell(SERVICE, ("ready", True))


LISTENERS[SERVICE] = _open
at_leave.append(_worker_left)
at_replaced.append(_worker_replaced)
at_restart.append(_for_new_worker)
