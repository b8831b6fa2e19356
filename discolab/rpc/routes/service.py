"""The session's part: it has all nodes open, and hands their addresses round.

`_lock` guards what is known. Nothing is said to a node under it: node 0 is in this process, and
what it is told may make it say something itself. So words may overtake each other, and nodes take
them in any order.

Words to a node: ``("open", token, how, keys)``, where `how` is "local", "tcp" or "both";
``("at", node, address)``, ``("lost", node, obituary)``, ``("close",)``. Words of a node:
``("open",)``, ``("tcp",)``, ``("at", address)``.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from ...runtime.link import SERVICES, Service
from ...transport.handshake import Keys, new_token
from ...transport.local import HAVE_LOCAL

SERVICE = "rpc"
ROUTE = "DISCOLAB_RPC_ROUTE"  # "tcp": use no other one


class RpcService(Service):
    """See the module.

    Parameters
    ----------
    exchange
        The session's lines to its workers: `num_workers`, `tell`, `lost`, `obituary`, `hosts`.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self._lock = threading.Lock()
        self._token = new_token()
        self._keys: dict[str, str] = {}  # of all nodes, made if there is TCP
        self._route = os.environ.get(ROUTE, "")
        self._opened = self._tcp = self._closed = False
        self._addresses: dict[int, Any] = {}

    def open(self, tcp: bool = False) -> None:
        """Have all nodes open, with a TCP port if that is wanted; any thread. Node 0 is open then.

        That has no effect where it was done before.
        """
        with self._lock:
            tcp = tcp or self._tcp or not self._only_local()
            if self._closed or (self._opened and tcp == self._tcp):
                return
            self._opened, self._tcp = True, tcp
            if tcp and not self._keys:
                self._keys = Keys.fresh().as_dict()
        self._tell_all(("open", self._token, self._how(), self._keys))
        for rank in tuple(self._exchange.lost):
            self.lost(rank)

    def _only_local(self) -> bool:
        return HAVE_LOCAL and self._route != "tcp" and len(set(self._exchange.hosts)) < 2

    def _how(self) -> str:
        if self._route == "tcp" or not HAVE_LOCAL:
            return "tcp"
        return "both" if self._tcp else "local"

    def receive(self, rank: int, value: Any) -> None:
        """See `Service`."""
        if value[0] == "open":
            self.open()
        elif value[0] == "tcp":
            self.open(tcp=True)
        elif value[0] == "at":
            with self._lock:
                before = {} if rank in self._addresses else dict(self._addresses)
                self._addresses[rank] = value[1]
            self._tell_all(("at", rank, value[1]), but=rank)
            for node, address in before.items():
                self._exchange.tell(rank, SERVICE, ("at", node, address))

    def lost(self, rank: int) -> None:
        """See `Service`."""
        with self._lock:
            self._addresses.pop(rank, None)
            opened = self._opened
        if opened:
            self._tell_all(("lost", rank, self._exchange.obituary(rank)), but=rank)

    def close(self) -> None:
        """See `Service`."""
        with self._lock:
            opened, self._closed = self._opened, True
        if opened:
            self._exchange.tell(0, SERVICE, ("close",))

    def _tell_all(self, value: Any, but: int = -1) -> None:
        lost = self._exchange.lost
        for rank in range(self._exchange.num_workers):
            if rank != but and rank not in lost:
                self._exchange.tell(rank, SERVICE, value)


SERVICES[SERVICE] = RpcService
