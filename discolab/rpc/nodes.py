"""The node of a process and session: made on first use, by whoever comes first; ended with it.

A node lies in its workers' `shared`. `_making` guards the making.
"""

from __future__ import annotations

import threading

from ..engines import hooks
from ..runtime.errors import session_closed
from ..runtime.session import Session
from ..runtime.worker import Worker
from . import routes
from .here import resolvers
from .node import Node
from .outcome import whole
from .routes import open_router

NODE = "discolab.rpc.node"  # where in a worker's `shared` its node is


def node_of_worker(worker: Worker) -> Node:
    """The node of a worker's process; made where there is none."""
    found: Node | None = worker.shared.get(NODE)
    if found is not None and (found.alone or found.mail.router is not None):
        return found
    with whole(), _making:  # or half a node would hear what is for the one made in its place
        found = worker.shared.get(NODE)
        if found is None:
            alone = worker.link is None
            workers = worker.peers if alone else {worker.worker_id: worker}
            found = Node(worker.worker_id if not alone else 0, workers, worker.num_workers)
            worker.shared[NODE] = found
            if not alone:
                try:
                    mail = found.mail
                    mail.router = open_router(worker, mail.deliver, found.peer_lost)
                except BaseException:
                    del worker.shared[NODE]
                    raise
                mail.opened.set()
    return found


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
        node.controller_timeout = session.timeout
    return node


def _open(worker: Worker) -> None:
    """Others use rpc: this node has to be there."""
    node_of_worker(worker)


def _left(worker: Worker) -> None:
    """A worker ends; on its own thread."""
    found: Node | None = worker.shared.get(NODE)
    if found is not None:
        found.worker_left(worker.worker_id)


_making = threading.RLock()  # to be open tells the session's service, which may ask for node 0
routes.open_node = _open
resolvers.of_worker, resolvers.of_session = node_of_worker, node_of_session
hooks.at_leave(_left)
