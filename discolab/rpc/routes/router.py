"""The router of a node: sends messages to other nodes of the session, and receives theirs.

The receiving thread owns the ports, `_leaving` and what is said to the service; what the service
says comes to it by the event loop. A peer's lock guards what waits for it, and the sending
on its way; it is a leaf among locks. `_start` guards the making of the sender thread.
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

from ...engines.nodes.machines import endpoint_of
from ...runtime.errors import DiscoError
from ...runtime.serialize import Message
from ...runtime.worker import Worker, bind_thread
from ...transport.connection import Connection, Port
from ...transport.frame import FrameError, unpack
from ...transport.handshake import Keys
from ...transport.local import HAVE_LOCAL, LocalPort
from ...transport.loop import EventLoop
from ..channels import gpus_here
from .addresses import Address, address_of, place_here

LATER = 1 << 20  # bytes of frames from which on a message may be packed on the sender thread
_SERVICE = "rpc"
_REST = 1.0  # seconds between two looks where nothing is due
_JOIN = 2.0  # seconds that the threads may take to end

Deliver = Callable[[int, Any, list[Any]], None]
Lost = Callable[[int, str], None]
_routers: weakref.WeakSet[Router] = weakref.WeakSet()


class Later(Protocol):
    """Who has a large message packed while it goes on computing; called on the sender thread."""

    def check(self) -> str:
        """After the copy was made: "" or why it is not what was to be sent."""

    def failed(self, text: str) -> None:
        """The message is not sent, and why."""


class _Peer:
    """Another node. `lock` guards `way`, `waiting`, `gone`, and the sending."""

    __slots__ = ("gone", "lock", "same_gpus", "waiting", "way")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.way: Connection | None = None
        self.waiting: deque[Message] = deque()  # until the way is known
        self.gone = False
        self.same_gpus = False


class Router:
    """See the module; made by `open_router`.

    Parameters
    ----------
    node, num_nodes
        Which of how many this one is.
    host
        This machine's address, at which others reach it.
    deliver
        ``deliver(node, body, frames)`` is called with each message, in order per sender.
    lost
        ``lost(node, obituary)`` is called once for each dead node, after all that it has sent was
        delivered. Both are called on the receiving thread.
    tell
        Says something to the session's service.
    """

    def __init__(
        self,
        node: int,
        num_nodes: int,
        host: str,
        deliver: Deliver,
        lost: Lost,
        tell: Callable[[Any], None],
    ) -> None:
        self.node, self.host = node, host
        self._deliver, self._lost, self._tell = deliver, lost, tell
        self._owner = os.getpid()
        self._peers = {n: _Peer() for n in range(num_nodes) if n != node}
        self._address = Address(place_here(), gpus=gpus_here())
        self._addresses: dict[int, Address] = {}
        self._local: LocalPort | None = None
        self._tcp: Port | None = None
        self._leaving: dict[int, tuple[str, float]] = {}  # dead nodes: obituary, since when
        self.loop = EventLoop()
        self._closing = False
        self._start = threading.Lock()
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
        peer = self._peers[to]
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

    def _send(self, peer: _Peer, message: Message, later: Later | None = None) -> None:
        way = peer.way
        if way is None:
            copy = Message(message.body, [bytes(frame) for frame in message.frames])
            if later is not None and not _valid(later):
                return
            with peer.lock:
                if peer.way is None:
                    if not peer.gone:
                        peer.waiting.append(copy)
                    return
                peer.way.send(peer.way.pack(*copy))
            return
        frame = way.pack(*message)
        if later is not None and not _valid(later):
            way.discard(frame)
            return
        with peer.lock:
            if not peer.gone:
                way.send(frame)

    def _start_sender(self) -> None:
        with self._start:
            if self._sender is None:
                self._sender = self._new_thread(self._send_late, "discolab-rpc-sender")

    def _send_late(self) -> None:
        """Body of the sender thread."""
        bind_thread(None)
        while True:
            found = self._late.get()
            if found is None or self._closing:
                return
            peer, message, later = found
            if peer.gone:
                continue
            try:
                self._send(peer, message, later)
            except Exception as exc:
                _tell_failed(later, f"there is no memory for the message: {exc}")
            del found, peer, message, later

    def same_machine(self, to: int) -> bool | None:
        """Whether memory can be shared with a node; None: not known yet."""
        if to == self.node:
            return True
        way = self._peers[to].way
        return None if way is None else way.same_machine

    def same_gpus(self, to: int) -> bool:
        """Whether a node can open the GPU memory of this one, as far as is known."""
        return to == self.node or self._peers[to].same_gpus

    # -- what the service says ---------------------------------------------------------------

    def hear(self, value: tuple[Any, ...]) -> None:
        """The service says something; any thread."""
        if value[0] == "close":
            self.close()
        else:
            self.loop.soon(partial(self._notice, *value))

    def _notice(self, kind: str, *rest: Any) -> None:
        if kind == "open":
            self._open(*rest)
        elif kind == "at":
            self._learn(rest[0], address_of(rest[1]))
        elif kind == "lost":
            node, obituary = rest
            if node in self._peers and not self._peers[node].gone:
                self._leaving.setdefault(node, (obituary, time.monotonic()))

    def _open(self, token: bytes, how: str, keys: dict[str, str]) -> None:
        me, count = self.node, len(self._peers) + 1
        address = self._address
        if self._local is None and how != "tcp" and HAVE_LOCAL:
            self._local = LocalPort(self.loop, me, count, token, self._arrived)
        if self._tcp is None and how != "local":
            self._tcp = self._open_tcp(token, Keys.of(keys))
        if self._local is not None:
            address = address._replace(name=self._local.address)
        if self._tcp is not None:
            address = address._replace(endpoint=self._tcp.address)
        self._tell(("at", tuple(address)))
        for node, known in tuple(self._addresses.items()):
            self._learn(node, known)

    def _open_tcp(self, token: bytes, keys: Keys) -> Port:
        from ...transport.tcp import TcpPort  # it imports zmq, which most sessions don't need

        count = len(self._peers) + 1
        try:
            endpoint = endpoint_of(self.host, 0)
            return TcpPort(self.loop, endpoint, self.node, count, token, keys, self._arrived)
        except (OSError, DiscoError) as exc:
            raise DiscoError(f"rpc can't listen at {self.host}: {exc}") from None

    def _learn(self, node: int, address: Address) -> None:
        self._addresses[node] = address
        peer = self._peers.get(node)
        if peer is None or peer.gone or peer.way is not None:
            return
        if self._local is not None and address.name and address.place == self._address.place:
            way = self._local.connect(address.name)
        elif self._tcp is not None and address.endpoint:
            way = self._tcp.connect(address.endpoint)
        else:
            if self._tcp is None and self._local is not None:
                self._tell(("tcp",))
            return
        with peer.lock:
            gpus = self._address.gpus
            peer.same_gpus = way.same_machine and gpus != "" and gpus == address.gpus
            while peer.waiting:
                try:
                    way.send(way.pack(*peer.waiting.popleft()))
                except OSError:  # there is no memory for it
                    traceback.print_exc()
            peer.way = way

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
        """Deliver what dead nodes have sent; the seconds until there may be more of it."""
        for node, (obituary, since) in tuple(self._leaving.items()):
            ports = [port for port in (self._local, self._tcp) if port is not None]
            if sum(port.drain(node, since) for port in ports) == len(ports):
                del self._leaving[node]
                self._part(node, obituary)
        return 0.02 if self._leaving else _REST

    def _part(self, node: int, obituary: str) -> None:
        peer = self._peers[node]
        with peer.lock:
            if peer.gone:
                return
            peer.gone = True
            peer.waiting.clear()
            if peer.way is not None:
                peer.way.close()
        try:
            self._lost(node, obituary)
        except Exception:
            traceback.print_exc()

    def _arrived(self, node: int, data: Any, fd: int | None, dropped: Any) -> None:
        if node not in self._peers or self._peers[node].gone:
            if fd is not None:
                os.close(fd)
            return
        try:
            body, frames = unpack(data, fd, dropped, copied=True)
        except FrameError as exc:
            self.hear(("lost", node, f"worker {node} has said what is no message of ours ({exc})"))
            return
        try:
            self._deliver(node, body, frames)
        except Exception:
            traceback.print_exc()

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Say and hear no more; any thread."""
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
        for peer in self._peers.values():
            with peer.lock:
                peer.gone = True
                peer.waiting.clear()
                if peer.way is not None:
                    peer.way.close()
        for port in (self._local, self._tcp):
            if port is not None:
                port.close()
        self.loop.close()

    def leave(self) -> None:
        """This process was forked from the router's: let go of what it has of it."""
        self._closing = True
        self.loop.close()  # first: what the parent waits for is not to be changed from here
        if self._local is not None:
            self._local.leave()


def open_router(worker: Worker, deliver: Deliver, lost: Lost) -> Router:
    """The router of a worker's process, and of the controller where that is its process.

    It has all other nodes of the session open theirs. `deliver` and `lost`, see `Router`, may be
    called before this returns.
    """
    link = worker.link
    if link is None:
        raise DiscoError("all workers are in this process: there is nobody to send messages to")
    tell = partial(link.tell, _SERVICE)
    router = Router(worker.worker_id, worker.num_workers, link.host, deliver, lost, tell)
    link.listen(_SERVICE, router.hear)
    tell(("open",))
    return router


def _size(frame: Any) -> int:
    return memoryview(frame).nbytes


def _valid(later: Later) -> bool:
    text = later.check()
    if text:
        _tell_failed(later, text)
    return not text


def _tell_failed(later: Later, text: str) -> None:
    try:
        later.failed(text)
    except Exception:
        traceback.print_exc()


@atexit.register
def _at_exit() -> None:
    for router in list(_routers):
        router.close()


def _in_child() -> None:
    """Who is at the other end must see it when this process's parent goes."""
    for router in list(_routers):
        router.leave()
    _routers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
