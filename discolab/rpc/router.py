"""The router of a node: sends messages to other nodes of the session, and receives theirs.

The receiving thread owns the ports and `_leaving`, and alone speaks to the session's service, whose
messages come to it by the event loop. A peer's lock guards what waits for it, and the sending on
its connection; no other lock is taken under it. `_start` guards the making of the sender thread.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..runtime.errors import DiscoError
from ..runtime.interrupts import plain_lock
from ..runtime.serialize import Message
from ..runtime.worker import Worker, bind_thread
from ..transport.addresses import endpoint_of
from ..transport.connection import Connection, Port
from ..transport.frame import FrameError, unpack
from ..transport.handshake import Keys
from ..transport.loop import EventLoop
from ..transport.unix_sockets import HAVE_LOCAL, LocalPort
from .channels import gpus_here
from .directory import SERVICE, Address, address_of, place_here

LATER = 1 << 20  # bytes of frames from which on a message may be packed on the sender thread
_REST = 1.0  # seconds between two looks where nothing is due
_JOIN = 2.0  # seconds that the threads may take to end

Deliver = Callable[[int, Any, list[Any]], None]
Lost = Callable[[int, str], None]
Replaced = Callable[[int, int], None]
_routers: weakref.WeakSet[Router] = weakref.WeakSet()


class Later(Protocol):
    """Watches a large message while the sender thread packs it; called on that thread."""

    def check(self) -> str:
        """After the copy was made: "" or why it is not what was to be sent."""

    def failed(self, text: str) -> None:
        """The message is not sent, and why."""


class _Peer:
    """Another node. `lock` guards `connection`, `waiting`, `gone`, and the sending."""

    __slots__ = ("connection", "gone", "lock", "same_gpus", "waiting")

    def __init__(self) -> None:
        self.lock = plain_lock()
        self.connection: Connection | None = None
        self.waiting: deque[Message] = deque()  # until the connection is known
        self.gone = False
        self.same_gpus = False

    def close(self) -> bool:
        """Send nothing any more; False if that was so before."""
        with self.lock:
            if self.gone:
                return False
            self.gone = True
            self.waiting.clear()
            if self.connection is not None:
                self.connection.close()
            return True


class Router:
    """See the module; made by `open_router`.

    Parameters
    ----------
    node
        The number of this one.
    count
        How many there are at a time.
    host
        This machine's address, at which others reach it.
    deliver
        ``deliver(node, body, frames)`` is called with each message, in order per sender.
    lost
        ``lost(node, reason)`` is called once for each dead node, after all that it has sent was
        delivered.
    frozen
        ``frozen(node, why)`` is called when a node is shown not to run, and with "" when it has
        come back. All three are called on the receiving thread.
    replaced
        ``replaced(rank, node)`` is called when a worker that was lost has another in its place,
        which is a new node; any thread.
    tell
        Sends a message to the session's service.
    """

    def __init__(
        self,
        node: int,
        count: int,
        host: str,
        deliver: Deliver,
        lost: Lost,
        tell: Callable[[Any], None],
        frozen: Lost,
        replaced: Replaced,
    ) -> None:
        self.node, self.host, self._count = node, host, count
        self._deliver, self._lost, self._frozen, self._tell = deliver, lost, frozen, tell
        self._replaced = replaced
        self._owner = os.getpid()
        self._peers: dict[int, _Peer] = {}  # also of nodes that are still to open
        self._address = Address(place_here(), gpus=gpus_here())
        self._addresses: dict[int, Address] = {}
        self._local: LocalPort | None = None
        self._tcp: Port | None = None
        self._leaving: dict[int, tuple[str, float]] = {}  # dead nodes: reason, since when
        self.loop = EventLoop()
        self._closing = False
        self._start = plain_lock()
        self._late: queue.SimpleQueue[tuple[_Peer, Message, Later] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._thread = self._new_thread(self._run, "discolab-rpc-receiver")
        _routers.add(self)

    def _new_thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=body, name=f"{name}-{self.node}", daemon=True)
        thread.start()
        return thread

    # -- sending -----------------------------------------------------------------------------

    def send(self, to: int, message: Message, later: Later | None = None) -> None:
        """Send a message to another node; any thread. Never waits for it.

        What goes to a lost node, or from a closed router, is dropped. The frames are copied before
        this returns, but for a large message with `later`: its copy is made on the sender thread,
        and smaller messages may overtake it.

        Raises
        ------
        DiscoError
            If there is no memory for the copy, or this process was forked from the router's.
        """
        if os.getpid() != self._owner:
            raise DiscoError(
                f"node {self.node} of rpc is in process {self._owner}, from which this one was "
                "forked: rpc can't be used here"
            )
        peer = self._peers.get(to) or self._peer(to)
        if peer.gone or self._closing:
            return
        if later is not None and sum(map(_size, message.frames)) > LATER:
            if self._sender is None:
                self._start_sender()
            self._late.put((peer, message, later))
            return
        try:
            self._send(peer, message)
        except OSError as exc:
            raise DiscoError(
                f"there is no memory for a message to node {to}: {exc.strerror}"
            ) from exc

    def _peer(self, node: int) -> _Peer:
        return self._peers.setdefault(node, _Peer())

    def _send(self, peer: _Peer, message: Message, later: Later | None = None) -> None:
        connection = peer.connection
        if connection is None:
            copy = Message(message.body, [bytes(frame) for frame in message.frames])
            if later is not None and not _valid(later):
                return
            with peer.lock:
                if peer.connection is None:
                    if not peer.gone:
                        peer.waiting.append(copy)
                    return
                peer.connection.send(peer.connection.pack(*copy))
            return
        frame = connection.pack(*message)
        if later is not None and not _valid(later):
            connection.discard(frame)
            return
        with peer.lock:
            if not peer.gone:
                connection.send(frame)

    def _start_sender(self) -> None:
        with self._start:
            if self._sender is None:
                self._sender = self._new_thread(self._send_late, "discolab-rpc-sender")

    def _send_late(self) -> None:
        """Body of the sender thread."""
        bind_thread(None)
        while True:
            entry = self._late.get()
            if entry is None or self._closing:
                return
            peer, message, later = entry
            if peer.gone:
                continue
            try:
                self._send(peer, message, later)
            except Exception as exc:
                _report_failed(later, f"there is no memory for the message: {exc}")
            del entry, peer, message, later

    def same_gpus(self, to: int) -> bool:
        """Whether a node can open the GPU memory of this one, as far as is known."""
        return to == self.node or self._peer(to).same_gpus

    # -- messages of the service --------------------------------------------------------------

    def receive(self, value: tuple[Any, ...]) -> None:
        """Take a message of the service; any thread."""
        if value[0] == "close":
            self.close()
        elif value[0] == "new":
            _, rank, node = value
            self._replaced(rank, node)
            self._tell(("known", node))
        else:
            self.loop.soon(partial(self._control, *value))

    def _control(self, kind: str, *rest: Any) -> None:
        if kind == "open":
            self._open(*rest)
        elif kind == "at":
            self._learn(rest[0], address_of(rest[1]))
        elif kind == "lost":
            node, reason = rest
            if not self._peer(node).gone:
                self._leaving.setdefault(node, (reason, time.monotonic()))
        elif kind == "frozen":
            self._frozen(*rest)

    def _open(self, token: bytes, how: str, keys: dict[str, str]) -> None:
        address = self._address
        if self._local is None and how != "tcp" and HAVE_LOCAL:
            self._local = LocalPort(self.loop, self.node, self._count, token, self._arrived)
        if self._tcp is None and how != "local":
            self._tcp = self._open_tcp(token, Keys.of(keys))
        if self._local is not None:
            address = address._replace(name=self._local.address)
        if self._tcp is not None:
            address = address._replace(endpoint=self._tcp.address)
        self._tell(("at", tuple(address)))
        for node, known in self._addresses.copy().items():
            self._learn(node, known)

    def _open_tcp(self, token: bytes, keys: Keys) -> Port:
        from ..transport.tcp import TcpPort  # it imports zmq, which most sessions don't need

        try:
            endpoint = endpoint_of(self.host, 0)
            return TcpPort(self.loop, endpoint, self.node, token, keys, self._arrived)
        except (OSError, DiscoError) as exc:
            raise DiscoError(f"rpc can't listen at {self.host}: {exc}") from None

    def _learn(self, node: int, address: Address) -> None:
        self._addresses[node] = address
        peer = self._peer(node)
        if peer.gone or peer.connection is not None:
            return
        if self._local is not None and address.name and address.place == self._address.place:
            connection = self._local.connect(address.name, node)
        elif self._tcp is not None and address.endpoint:
            connection = self._tcp.connect(address.endpoint, node)
        else:
            if self._tcp is None and self._local is not None:
                self._tell(("tcp",))
            return
        with peer.lock:
            gpus = self._address.gpus
            peer.same_gpus = connection.same_machine and gpus != "" and gpus == address.gpus
            while peer.waiting:
                try:
                    connection.send(connection.pack(*peer.waiting.popleft()))
                except OSError:  # there is no memory for it
                    traceback.print_exc()
            peer.connection = connection

    # -- receiving ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Body of the receiving thread."""
        bind_thread(None)
        while not self._closing:
            try:
                self.loop.turn(self._drain_leaving() if self._leaving else _REST)
            except Exception:
                if not self._closing:
                    traceback.print_exc()  # a fault of ours; what comes next may be well
        self._end()

    def _drain_leaving(self) -> float:
        """Deliver what dead nodes have sent; returns the seconds until there may be more of it."""
        for node, (reason, since) in self._leaving.copy().items():
            ports = [port for port in (self._local, self._tcp) if port is not None]
            if sum(port.drain(node, since) for port in ports) == len(ports):
                del self._leaving[node]
                self._part(node, reason)
        return 0.02 if self._leaving else _REST

    def _part(self, node: int, reason: str) -> None:
        self._addresses.pop(node, None)
        if self._peer(node).close():
            try:
                self._lost(node, reason)
            except Exception:
                traceback.print_exc()

    def _arrived(self, node: int, data: Any, fd: int | None, dropped: Any) -> None:
        if self._peer(node).gone:
            if fd is not None:
                os.close(fd)
            return
        try:
            body, frames = unpack(data, fd, dropped, copied=True)
        except FrameError as exc:
            worker = f"worker {node % self._count}"
            self.receive(("lost", node, f"{worker} has said what is no message of ours ({exc})"))
            return
        try:
            self._deliver(node, body, frames)
        except Exception:
            traceback.print_exc()

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Send and receive no more; any thread."""
        if os.getpid() != self._owner:
            return
        self._closing = True
        self._late.put(None)
        self.loop.wake()
        me = threading.current_thread()
        for thread in (self._sender, self._thread):
            if thread is not None and thread is not me:
                thread.join(_JOIN)

    def _end(self) -> None:
        for peer in list(self._peers.values()):
            peer.close()
        for port in (self._local, self._tcp):
            if port is not None:
                port.close()
        self.loop.close()

    def abandon(self) -> None:
        """Close what this process has inherited of its parent's router."""
        self._closing = True
        self.loop.close()  # first, so that the parent's event loop stays as it is
        if self._local is not None:
            self._local.leave()


def open_router(
    worker: Worker,
    deliver: Deliver,
    lost: Lost,
    frozen: Lost = lambda node, why: None,
    replaced: Replaced = lambda rank, node: None,
    node: int | None = None,
) -> Router:
    """The router of a worker's process, and of the controller where that is its process.

    It has all other nodes of the session open theirs. `deliver`, `lost`, `frozen` and `replaced`,
    see `Router`, may be called before this returns. `node` is the rank if it is not given.
    """
    link = worker.link
    if link is None:
        raise DiscoError("all workers are in this process: there is nobody to send messages to")
    tell = partial(link.tell, SERVICE)
    number = worker.worker_id if node is None else node
    router = Router(number, worker.num_workers, link.host, deliver, lost, tell, frozen, replaced)
    link.listen(SERVICE, router.receive)
    tell(("open",))
    return router


def _size(frame: Any) -> int:
    return memoryview(frame).nbytes


def _valid(later: Later) -> bool:
    text = later.check()
    if text:
        _report_failed(later, text)
    return not text


def _report_failed(later: Later, text: str) -> None:
    try:
        later.failed(text)
    except Exception:
        traceback.print_exc()


@atexit.register
def _at_exit() -> None:
    for router in list(_routers):
        router.close()


def _in_child() -> None:
    """Close what was inherited: peers must notice when the parent process ends."""
    for router in list(_routers):
        router.abandon()
    _routers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
