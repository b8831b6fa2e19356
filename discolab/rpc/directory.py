"""Where nodes are reached: their addresses, and the session's part, which hands them round.

The service has all nodes open their routers. Its `_lock` guards what it knows. It sends nothing
under the lock: node 0 is in this process, and may answer a message at once. So messages may
overtake each other, and nodes take them in any order.

To a node: ``("open", token, how, keys)``, where `how` is "local", "tcp" or "both";
``("at", node, address)``, ``("lost", node, exit reason)``, ``("frozen", node, why or "")``,
``("close",)``. From a node:
``("open",)``, ``("tcp",)``, ``("at", address)``.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ..runtime.interrupts import plain_lock
from ..runtime.restart import remarks
from ..runtime.services import SERVICES, Service
from ..transport.handshake import Keys, new_token
from ..transport.machine import machine
from ..transport.unix_sockets import HAVE_LOCAL

SERVICE = "rpc"
ROUTE = "DISCOLAB_RPC_ROUTE"  # "tcp": use no other one
_NETWORK = "/proc/self/ns/net"


class Address(NamedTuple):
    """Where a node is reached.

    Attributes
    ----------
    place
        Equal for nodes that can reach each other by unix sockets.
    name
        The address of its unix socket there; "" if it has none.
    endpoint
        Its TCP port; "" if it has none.
    gpus
        Equal for nodes of a place that can open each other's GPU memory; "": it can't.
    """

    place: str
    name: str = ""
    endpoint: str = ""
    gpus: str = ""


def address_of(value: Any) -> Address:
    """An address from a message.

    Raises
    ------
    ValueError
        If it is none.
    """
    fields = tuple(value)
    if len(fields) != 4 or not all(isinstance(field, str) for field in fields):
        raise ValueError(f"{value!r} is no address of a node")
    return Address(*fields)


def place_here() -> str:
    """The place of this process: machine, network namespace, user."""
    try:
        network = os.stat(_NETWORK).st_ino
    except OSError:
        network = 0
    return f"{machine()}/{network}/{os.geteuid()}"


class RpcService(Service):
    """See the module.

    Parameters
    ----------
    exchange
        The session's connections to its workers: `num_workers`, `tell`, `lost`, `obituary`,
        `hosts`.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self._lock = plain_lock()
        self._token = new_token()
        self._keys: dict[str, str] = {}  # of all nodes, made if there is TCP
        self._route = os.environ.get(ROUTE, "")
        self._opened = self._tcp = self._closed = False
        self._addresses: dict[int, Any] = {}
        self._frozen: dict[int, str] = {}  # the reader thread's
        self._cut_off: set[int] = set()  # workers that were restarted since

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
        for rank, why in tuple(self._frozen.items()):
            self._tell_all(("frozen", rank, why), but=rank)

    def _only_local(self) -> bool:
        return HAVE_LOCAL and self._route != "tcp" and len(set(self._exchange.hosts)) < 2

    def _how(self) -> str:
        if self._route == "tcp" or not HAVE_LOCAL:
            return "tcp"
        return "both" if self._tcp else "local"

    @property
    def was_used(self) -> bool:
        """Whether nodes have opened their routers."""
        return self._opened

    def replaced(self, rank: int, executed: int) -> None:
        """See `Service`. To the others a lost node stays lost: they may hold what it owned.

        So a node that is new to the others takes no part, unless none was there before.
        """
        with self._lock:
            if self._opened:
                self._cut_off.add(rank)

    def _cut(self, rank: int) -> None:
        """Have all others be lost to a node that the others have lost."""
        why = f"worker {rank} was restarted, and takes part in rpc again after %disco_restart"
        for node in range(self._exchange.num_workers):
            if node != rank:
                self._exchange.tell(rank, SERVICE, ("lost", node, why))

    def receive(self, rank: int, value: Any) -> None:
        """See `Service`."""
        if rank in self._cut_off:
            self._cut(rank)
            return
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
            self._tell_all(("lost", rank, self._exchange.exit_text(rank)), but=rank)

    def frozen(self, rank: int, why: str) -> None:
        """See `Service`."""
        self._frozen[rank] = why
        with self._lock:
            opened = self._opened
        if opened:
            self._tell_all(("frozen", rank, why), but=rank)

    def close(self) -> None:
        """See `Service`."""
        with self._lock:
            opened, self._closed = self._opened, True
        if opened:
            self._exchange.tell(0, SERVICE, ("close",))

    def _tell_all(self, value: Any, but: int = -1) -> None:
        lost = self._exchange.lost
        for rank in range(self._exchange.num_workers):
            if rank != but and rank not in lost and rank not in self._cut_off:
                self._exchange.tell(rank, SERVICE, value)


def _remark(session: Any) -> str:
    service = getattr(session, "services", {}).get(SERVICE)
    if isinstance(service, RpcService) and service.was_used:
        return "rpc: calls to this worker and from it fail until %disco_restart"
    return ""


SERVICES[SERVICE] = RpcService
remarks.append(_remark)
