"""Between nodes of one machine: unix sockets, and memory that is shared.

Each node listens under a random name that no file has. Who has something to say connects, and says
first the session's token and which node it is; both sides make sure that the other is of the same
user. Such a connection carries messages one way, each one datagram (SOCK_SEQPACKET), perhaps with a
shared buffer (transport/frame.py); back come the numbers of buffers that can be used again.

The receiving thread owns a `LocalEnd` and what comes in; what goes out: local_way.py.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import socket
import struct
import time
from collections import deque
from functools import partial

from ...engines.remote.local_lines import HAVE_LOCAL_LINES, recv_frame
from ...transport.loop import EventLoop
from .addresses import Address
from .local_way import HELLO, IN, MAGIC, MOST_FREED, OUT, LocalWay, same_user
from .ways import End, Station, Way

HAVE_LOCAL_ROUTES = HAVE_LOCAL_LINES and hasattr(socket, "SO_PEERCRED")
MOST_STRANGERS = 64  # connections that have not said who they are
HANDSHAKE = 10.0  # seconds that they have to say it
MOST_LENT = 256  # segments that peers may hold, a descriptor each; of more they take copies
_BACKLOG = 1024
_SOON = 0.005  # seconds until what can't be waited for is tried again
_AT_ONCE = 64  # messages taken from one connection before the others have their turn
_DRAIN = 1.0  # seconds that taking what a dead node has said may last


class LocalEnd(End):
    """See the module."""

    def __init__(self, station: Station, node: int, num_nodes: int, token: bytes) -> None:
        self.node, self.token, self.station = node, token, station
        self.most_lent = max(4, MOST_LENT // num_nodes)
        self.name = f"discolab-{secrets.token_hex(16)}"
        self.again: deque[LocalWay] = deque()  # ways to be tried again; any thread appends
        self.freed: deque[tuple[int, int]] = deque()  # node, segment; finalizers append
        self._incoming: dict[int, _Incoming] = {}
        self._strangers: dict[socket.socket, float] = {}  # the oldest first; until when
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        self._ways: list[LocalWay] = []
        self._tidied = time.monotonic()
        station.loop.watch(self._listener.fileno(), lambda _: self._accept(), IN)

    def addressed(self, address: Address) -> Address:
        """See `End`."""
        return address._replace(name=self.name)

    def way_to(self, node: int, address: Address) -> Way:
        """See `End`."""
        way = LocalWay(self, node, address.name)
        self._ways.append(way)
        return way

    # -- who comes ---------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_SOON)  # it stays ready, and can't be taken now
                    return
                continue  # it has gone again
            sock.setblocking(False)
            if not same_user(sock):
                sock.close()
                continue
            self._strangers[sock] = time.monotonic() + HANDSHAKE
            self.station.loop.watch(sock.fileno(), partial(self._greet, sock), IN)
            if len(self._strangers) > MOST_STRANGERS:
                self._hang_up(next(iter(self._strangers)))

    def _greet(self, sock: socket.socket, _mask: int = IN) -> None:
        """The first message on a connection."""
        if sock not in self._strangers:
            return
        try:
            said = sock.recv(HELLO.size + 1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        node = self._known(said)
        if node is None:
            self._hang_up(sock)
            return
        del self._strangers[sock]
        self.station.loop.forget(sock.fileno())
        incoming = _Incoming(self, sock, node)
        self._incoming[node] = incoming
        self.station.loop.watch(sock.fileno(), incoming.ready, IN)
        incoming.ready(IN)

    def _known(self, said: bytes) -> int | None:
        if len(said) != HELLO.size:
            return None
        magic, token, node = HELLO.unpack(said)
        if magic != MAGIC or not hmac.compare_digest(token, self.token):
            return None
        return None if node in self._incoming else node

    def _hang_up(self, sock: socket.socket) -> None:
        self._strangers.pop(sock, None)
        self.station.loop.forget(sock.fileno())
        sock.close()

    # -- what is due -------------------------------------------------------------------------

    def look(self) -> float:
        """See `End`."""
        rest = HANDSHAKE
        now = time.monotonic()
        for sock, until in tuple(self._strangers.items()):
            if now > until:
                self._hang_up(sock)
            else:
                rest = min(rest, until - now + 0.01)
        for _ in range(len(self.again)):
            self.again.popleft().try_again()
        if self.freed:
            self._give_back()
        if self.again or self.freed:
            rest = _SOON
        if now - self._tidied > HANDSHAKE:
            self._tidied = now
            for way in self._ways:
                way.pool.tidy()
        return rest

    def _give_back(self) -> None:
        numbers: dict[int, list[int]] = {}
        for _ in range(len(self.freed)):
            node, number = self.freed.popleft()
            numbers.setdefault(node, []).append(number)
        for node, found in numbers.items():
            incoming = self._incoming[node]
            for at in range(0, len(found), MOST_FREED):
                some = found[at : at + MOST_FREED]
                if not incoming.give_back(some):
                    self.freed.extend((node, number) for number in some)

    def drain(self, node: int, since: float) -> bool:
        """See `End`. What a dead process has said is all here."""
        self._accept()
        for sock in tuple(self._strangers):
            self._greet(sock)
        incoming = self._incoming.get(node)
        if incoming is None:
            return True
        late = time.monotonic() > since + _DRAIN
        if not late and incoming.ready(IN):
            return False
        incoming.close()
        return True

    def close(self) -> None:
        """See `End`."""
        self.station.loop.forget(self._listener.fileno())
        self._listener.close()
        for sock in tuple(self._strangers):
            self._hang_up(sock)
        for incoming in self._incoming.values():
            incoming.close()
        self.freed.clear()
        self.again.clear()

    def leave(self) -> None:
        """In a process that was forked: nobody else is here, so no lock is taken."""
        for way in self._ways:
            way.close()
        self.close()


class _Incoming:
    """A connection on which a peer says things. The receiving thread's own."""

    def __init__(self, end: LocalEnd, sock: socket.socket, node: int) -> None:
        self._end, self._sock, self._node = end, sock, node
        self._dropped = partial(_dropped, end.freed, end.station.loop, node)
        self.closed = False

    def ready(self, _mask: int) -> bool:
        """Take some messages; whether there may be more."""
        arrived = self._end.station.arrived
        for _ in range(_AT_ONCE):
            if self.closed:
                return False
            try:
                found = recv_frame(self._sock)
            except BlockingIOError:
                return False
            except OSError:
                found = None
            if found is None:
                self.close()
                return False
            arrived(self._node, found[0], found[1], self._dropped)
        return True

    def give_back(self, numbers: list[int]) -> bool:
        """Say that segments can be used again; False: not now."""
        if self.closed:
            return True
        try:
            self._sock.send(struct.pack(f"<{len(numbers)}H", *numbers))
        except BlockingIOError:
            return False
        except OSError:
            pass  # who wanted to know is gone
        return True

    def close(self) -> None:
        """Once."""
        if not self.closed:
            self.closed = True
            self._end.station.loop.forget(self._sock.fileno())
            self._sock.close()


def _dropped(freed: deque[tuple[int, int]], loop: EventLoop, node: int, number: int) -> None:
    """Nothing of a segment is held here any more; in a finalizer, so it holds no router."""
    freed.append((node, number))
    loop.wake()


assert not HAVE_LOCAL_ROUTES or (IN, OUT) == (select.EPOLLIN, select.EPOLLOUT)
