"""Between machines: zmq over TCP, encrypted and authenticated by CURVE.

Each node has keys and a port of its own for each session; the service hands public keys and
addresses round over the session's own lines. Who connects must have a key that is known to be a
node's, so what comes is from that node. A connection carries messages one way, and is never taken
up again once it broke: the session's own line to that worker breaks with it.

All sockets are the receiving thread's own; who sends, leaves what is packed in `_outbox`.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from typing import Any

import zmq
from zmq.utils import z85

from ...engines.nodes.keys import Keys
from ...engines.nodes.machines import endpoint_of
from ...engines.remote.zmq_parts import (
    PIECE,
    Joiner,
    event_of,
    pieces,
    readable,
    set_options,
)
from ...runtime.errors import DiscoError
from ...runtime.protocol import Message
from ...transport.frame import Frame, pack
from .addresses import Address
from .ways import End, Station, Way

MOST_UNKNOWN = 64  # who knocks with a key that is not known, or not yet
_DOMAIN = b"discolab-rpc"
_KNOCK = 8.0  # seconds that such a one is kept waiting: less than zmq waits for a handshake
_AT_ONCE = 64  # messages received before others have their turn
_PARTED = 3.0  # seconds that the end of a dead node's connection may take to come
_SILENT = 0.5  # seconds that the first word of one that is dead may take
_IN = 1  # as zmq's descriptors are waited for


class TcpEnd(End):
    """See the module.

    Attributes
    ----------
    endpoint, key
        This node's address and public key.

    Raises
    ------
    DiscoError
        If this machine has no such address.
    """

    def __init__(self, station: Station, node: int, host: str) -> None:
        public, self.secret = (key.decode() for key in zmq.curve_keypair())
        self.node, self.key, self.station = node, public, station
        self.outbox: deque[tuple[TcpWay, Any]] = deque()  # any thread appends
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._known: dict[bytes, int] = {}  # public keys of nodes
        self._knocking: dict[tuple[bytes, ...], float] = {}  # the oldest first; until when
        self._by_fd: dict[int, int] = {}  # whose connection it is
        self._joiners: dict[int, Joiner] = {}
        self._parted: set[int] = set()  # nodes whose connection has ended
        self._more = False
        try:
            self._door = self.context.socket(zmq.ROUTER)
            self._door.bind("inproc://zeromq.zap.01")
            self._router = self.context.socket(zmq.ROUTER)
            endpoint = endpoint_of(host, 0)
            set_options(self._router, endpoint, Keys(public, self.secret, "", ""), server=True)
            self._router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            self._monitor = self._router.get_monitor_socket(
                zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            )
            self._router.bind(endpoint)
            self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except (OSError, zmq.ZMQError) as exc:
            self.context.destroy(0)
            raise DiscoError(f"rpc can't listen at {host}: {exc}") from None
        for sock in (self._router, self._door, self._monitor):
            # all are looked at whichever is ready
            station.loop.watch(sock.fileno(), lambda _: self._look_at_all(), _IN)
        station.loop.wake()

    def addressed(self, address: Address) -> Address:
        """See `End`."""
        return address._replace(endpoint=self.endpoint, key=self.key)

    def way_to(self, node: int, address: Address) -> Way:
        """See `End`."""
        self._known[z85.decode(address.key.encode())] = node
        for asked in tuple(self._knocking):
            if self._answer(asked):
                del self._knocking[asked]
        return TcpWay(self, address)

    # -- who comes ---------------------------------------------------------------------------

    def _look_at_door(self) -> None:
        while readable(self._door):
            asked = tuple(self._door.recv_multipart())
            if len(asked) != 9 or asked[7] != b"CURVE" or len(asked[8]) != 32:
                self._reply(asked, b"400", b"")
            elif not self._answer(asked):  # its key may be on its way to us
                self._knocking[asked] = time.monotonic() + _KNOCK
        now = time.monotonic()
        for asked, until in tuple(self._knocking.items()):
            if now > until or len(self._knocking) > MOST_UNKNOWN:
                del self._knocking[asked]
                self._reply(asked, b"400", b"")

    def _answer(self, asked: tuple[bytes, ...]) -> bool:
        """Let in whose key is known."""
        node = self._known.get(asked[8])
        if node is None:
            return False
        self._reply(asked, b"200", b"%d" % node)
        return True

    def _reply(self, asked: tuple[bytes, ...], status: bytes, user: bytes) -> None:
        who, _, version, request = (*asked, b"", b"", b"")[:4]
        self._door.send_multipart([who, b"", version, request, status, b"", user, b""])

    def _look_at_monitor(self) -> list[int]:
        """The nodes whose connections have ended since."""
        parted = []
        while readable(self._monitor):
            event, fd = event_of(self._monitor.recv_multipart())
            node = self._by_fd.pop(fd, None)
            if event == zmq.EVENT_DISCONNECTED and node is not None:
                parted.append(node)
        return parted

    # -- what is due -------------------------------------------------------------------------

    def look(self) -> float:
        """See `End`."""
        self._look_at_all()
        while self.outbox:
            way, data = self.outbox.popleft()
            way.send_now(data)
        return 0.0 if self._more else 1.0

    def _look_at_all(self) -> None:
        self._look_at_door()
        parted = self._look_at_monitor()  # before what they said: after it, all of that is there
        self._take()
        while parted and self._more:
            self._take()
        self._parted.update(parted)

    def _take(self) -> None:
        """Receive some messages; `_more`: there may be others."""
        router = self._router
        self._more = True
        for _ in range(_AT_ONCE):
            if not readable(router):
                self._more = False
                return
            router.recv()
            frame = router.recv(copy=False)
            node = int(str(frame.get("User-Id")))  # as the door has said
            fd = int(frame.get(zmq.SRCFD))
            if self._by_fd.get(fd) != node:
                self._look_at_monitor()  # what was said of this descriptor before is another's
                self._by_fd[fd] = node
            joiner = self._joiners.setdefault(node, Joiner())
            data = joiner.take(router, frame)
            if data is not None:
                self.station.arrived(node, data, None, None)
        self.station.loop.wake()

    def drain(self, node: int, since: float) -> bool:
        """See `End`. What it has said ends with its connection."""
        self._look_at_all()
        wait = _PARTED if node in self._by_fd.values() else _SILENT
        if node not in self._parted and time.monotonic() < since + wait:
            return False
        while self._more:
            self._take()
        return True

    def close(self) -> None:
        """See `End`; the ways are closed."""
        for sock in (self._router, self._door, self._monitor):
            self.station.loop.forget(sock.fileno())
        self._router.disable_monitor()
        self.context.destroy(0)


class TcpWay(Way):
    """The connection to a peer, made when there is something to say."""

    def __init__(self, end: TcpEnd, address: Address) -> None:
        self._end, self._address = end, address
        self._sock: zmq.Socket[bytes] | None = None

    def pack(self, message: Message) -> Frame:
        """See `Way`."""
        return pack(message.body, message.frames)

    def discard(self, frame: Frame) -> None:
        """See `Way`."""

    def send(self, frame: Frame) -> None:
        """See `Way`."""
        self._end.outbox.append((self, frame.data))
        self._end.station.loop.wake()

    def send_now(self, data: Any) -> None:
        """On the receiving thread."""
        sock = self._sock
        if sock is None:
            sock = self._connect()
        try:
            if len(data) <= PIECE:
                sock.send(data, zmq.NOBLOCK)
                return
            for mark, piece in pieces(data):
                sock.send(mark, zmq.NOBLOCK | zmq.SNDMORE)
                sock.send(piece, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            if exc.errno != errno.EAGAIN:  # else the connection has gone
                raise

    def _connect(self) -> zmq.Socket[bytes]:
        end, address = self._end, self._address
        self._sock = sock = end.context.socket(zmq.DEALER)
        keys = Keys(address.key, "", end.key, end.secret)
        set_options(sock, address.endpoint, keys, server=False)
        sock.connect(address.endpoint)
        return sock

    def close(self) -> None:
        """See `Way`."""
        if self._sock is not None:
            self._sock.close(0)
            self._sock = None
        self._end.outbox = deque(item for item in self._end.outbox if item[0] is not self)
