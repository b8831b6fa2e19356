"""Where nodes are reached: their addresses, and the session's part, which hands them round.

The service has all nodes open their routers. Its `_lock` guards what it knows. It sends nothing
under the lock: node 0 is in this process, and may answer a message at once. So messages may
overtake each other, and nodes take them in any order.

A node has a number: at first its worker's rank. A worker that takes the place of a lost one is a
*new node*: its number is the one before and the number of workers, so that nothing of the old one
is taken for the new one's. The others are told first (``new``), and each says so (``known``); then
the new one, which has said that it is there (``ready``), hears all that it has missed.

To a node: ``("open", token, how, keys)``, where `how` is "local", "tcp" or "both";
``("at", node, address)``, ``("lost", node, exit reason)``, ``("frozen", node, why or "")``,
``("new", rank, node)``, ``("close",)``. From a node: ``("open",)``, ``("tcp",)``,
``("at", address)``, ``("known", node)``, ``("ready", whether it waits for the others no more)``.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ..runtime.interrupts import plain_lock
from ..runtime.services import SERVICES, Service
from ..transport.addresses import machine_id
from ..transport.handshake import Keys, new_token
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
    return f"{machine_id()}/{network}/{os.geteuid()}"


class RpcService(Service):
    """See the module.

    Parameters
    ----------
    exchange
        The session's connections to its workers: `num_workers`, `tell`, `exit_text`, `hosts`.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self._lock = plain_lock()
        self._token = new_token()
        self._keys: dict[str, str] = {}  # of all nodes, made if there is TCP
        self._route = os.environ.get(ROUTE, "")
        self._opened = self._tcp = self._closed = False
        self._nodes = list(range(exchange.num_workers))  # of each worker the latest one
        self._addresses: dict[int, Any] = {}  # these three by node
        self._lost: dict[int, str] = {}
        self._frozen: dict[int, str] = {}
        # new workers that were told nothing yet: the nodes that do not know of them yet
        self._waiting: dict[int, set[int]] = {}
        self._ready: set[int] = set()  # those of them that want to be told

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
            opening = self._opening()
            known = [("lost", *item) for item in self._lost.items()]
            known += [("frozen", *item) for item in self._frozen.items()]
        self._tell_all(opening)
        for value in known:
            self._tell_all(value, but=value[1])

    def _opening(self) -> tuple[Any, ...]:
        """Under the lock."""
        return "open", self._token, self._how(), self._keys

    def _only_local(self) -> bool:
        return HAVE_LOCAL and self._route != "tcp" and len(set(self._exchange.hosts)) < 2

    def _how(self) -> str:
        if self._route == "tcp" or not HAVE_LOCAL:
            return "tcp"
        return "both" if self._tcp else "local"

    def nodes(self) -> list[int]:
        """The number of each worker's node."""
        with self._lock:
            return list(self._nodes)

    # -- workers that take the place of lost ones -------------------------------------------------

    def replaced(self, rank: int, executed: int) -> None:
        """See `Service`. A worker's node that nobody has known is none, so its number is free."""
        with self._lock:
            if not self._opened:
                self._lost.pop(rank, None)
                self._waiting[rank] = set()
                return
            node = self._nodes[rank] = self._nodes[rank] + len(self._nodes)
            self._waiting[rank] = set(self._told()) - {rank}
        self._tell_all(("new", rank, node))

    @property
    def was_used(self) -> bool:
        """Whether nodes have opened their routers."""
        return self._opened

    def _known(self, teller: int, node: int | None) -> None:
        """A worker knows of a new node; None: it needs to know of none any more."""
        with self._lock:
            for rank, waiting in self._waiting.items():
                if node is None or node == self._nodes[rank]:
                    waiting.discard(teller)
        self._admit()

    def _admit(self, rank: int = -1) -> None:
        """Tell new workers what they have missed, if all others know of them, or that one."""
        told: list[tuple[int, Any]] = []
        with self._lock:
            for new in sorted(self._ready):
                if self._waiting[new] and new != rank:
                    continue
                self._ready.discard(new)
                del self._waiting[new]
                if self._opened:
                    values = [self._opening()]
                    for kind, of in (("at", self._addresses), ("lost", self._lost)):
                        values += [(kind, *item) for item in of.items()]
                    values += [("frozen", *item) for item in self._frozen.items()]
                    told += [(new, value) for value in values]
        for new, value in told:
            self._exchange.tell(new, SERVICE, value)

    # -- what comes -------------------------------------------------------------------------------

    def receive(self, rank: int, value: Any) -> None:
        kind, *rest = value
        if kind == "open":
            self.open()
        elif kind == "tcp":
            self.open(tcp=True)
        elif kind == "known":
            self._known(rank, rest[0])
        elif kind == "ready":
            with self._lock:
                if rank in self._waiting:
                    self._ready.add(rank)
            self._admit(rank if rest[0] else -1)
        elif kind == "at":
            with self._lock:
                node = self._nodes[rank]
                before = {} if node in self._addresses else dict(self._addresses)
                self._addresses[node] = rest[0]
            self._tell_all(("at", node, rest[0]), but=node)
            for other, address in before.items():
                self._exchange.tell(rank, SERVICE, ("at", other, address))

    def lost(self, rank: int) -> None:
        text = self._exchange.exit_text(rank)
        with self._lock:
            node = self._nodes[rank]
            self._addresses.pop(node, None)
            self._frozen.pop(node, None)
            self._lost[node] = text
            self._waiting.pop(rank, None)
            self._ready.discard(rank)
            opened = self._opened
        if opened:
            self._tell_all(("lost", node, text), but=node)
        self._known(rank, None)

    def frozen(self, rank: int, why: str) -> None:
        with self._lock:
            node = self._nodes[rank]
            self._frozen[node] = why
            opened = self._opened
        if opened:
            self._tell_all(("frozen", node, why), but=node)

    def close(self) -> None:
        with self._lock:
            opened, self._closed = self._opened, True
        if opened:
            self._exchange.tell(0, SERVICE, ("close",))

    def _told(self) -> list[int]:
        """The workers that live and hear what is said; under the lock."""
        return [
            rank
            for rank, node in enumerate(self._nodes)
            if node not in self._lost and rank not in self._waiting
        ]

    def _tell_all(self, value: Any, but: int = -1) -> None:
        with self._lock:
            ranks = [rank for rank in self._told() if self._nodes[rank] != but]
        for rank in ranks:
            self._exchange.tell(rank, SERVICE, value)


SERVICES[SERVICE] = RpcService
