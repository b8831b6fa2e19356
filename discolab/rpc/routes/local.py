"""Between nodes of one machine: unix sockets, and memory that is shared (transport/local.py).

A node that has something to say connects. Such a connection carries messages one way; back come the
numbers of shared buffers that can be used again. All is the receiving thread's own, but for
`LocalWay.pack`, `discard` and `send`.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from functools import partial

from ...runtime.protocol import Message
from ...transport import local
from ...transport.frame import Frame, pack
from ...transport.handshake import Hello
from ...transport.local import LocalConnection, LocalListener, LocalSocket
from ...transport.loop import EventLoop
from .addresses import Address
from .ways import End, Station, Way

MOST_LENT = 256  # shared buffers that peers may hold, a descriptor each; of more they take copies
MOST_FREED = 1000  # numbers of buffers in one message
_AT_ONCE = 64  # messages taken from one connection before the others have their turn
_DRAIN = 1.0  # seconds that taking what a dead node has said may last
_TIDY = 10.0  # seconds between two looks at buffers that nobody uses


class LocalEnd(End):
    """See the module."""

    def __init__(self, station: Station, node: int, num_nodes: int, token: bytes) -> None:
        self.node, self.token, self.station = node, token, station
        self.most_lent = max(4, MOST_LENT // num_nodes)
        self._incoming: dict[int, _Incoming] = {}
        self._ways: list[LocalWay] = []
        self.listener = LocalListener(station.loop, token, self._accept)
        self._tidy()

    def addressed(self, address: Address) -> Address:
        """See `End`."""
        return address._replace(name=self.listener.address)

    def way_to(self, node: int, address: Address) -> Way:
        """See `End`."""
        way = LocalWay(self, address.name)
        self._ways.append(way)
        return way

    def _accept(self, hello: Hello, sock: LocalSocket) -> bool:
        node = hello.rank
        if node in self._incoming or not self.station.has(node):
            return False
        self._incoming[node] = _Incoming(self.station, sock, node)
        return True

    def _tidy(self) -> None:
        for way in self._ways:
            way.connection.pool.tidy()
        self.station.loop.later(_TIDY, self._tidy)

    def drain(self, node: int, since: float) -> bool:
        """See `End`. What a dead process has said is all here."""
        self.listener.take_all()
        incoming = self._incoming.get(node)
        if incoming is None:
            return True
        late = time.monotonic() > since + _DRAIN
        if not late and incoming.take():
            return False
        incoming.connection.close()
        return True

    def close(self) -> None:
        """See `End`."""
        self.listener.close()
        for incoming in self._incoming.values():
            incoming.connection.close()

    def leave(self) -> None:
        """In a process that was forked: nobody else is here, so no lock is taken."""
        for way in self._ways:
            way.close()
        self.listener.leave()
        for incoming in self._incoming.values():
            incoming.connection.close()


class LocalWay(Way):
    """The connection to a peer, made when there is something to say."""

    same_machine = True

    def __init__(self, end: LocalEnd, address: str) -> None:
        self._most_lent = end.most_lent
        open_socket = partial(local.connect, address, end.token, end.node)
        self.connection = LocalConnection(
            end.station.loop, ready=self._take_back, connect=open_socket
        )

    def pack(self, message: Message) -> Frame:
        """See `Way`."""
        pool = self.connection.pool
        lending = pool.lent < self._most_lent
        return pack(message.body, message.frames, True, pool if lending else None)

    def discard(self, frame: Frame) -> None:
        """See `Way`."""
        if frame.buffer is not None and frame.buffer.number:
            self.connection.pool.free(frame.buffer.number)

    def send(self, frame: Frame) -> None:
        """See `Way`."""
        self.connection.send(frame)

    def _take_back(self) -> None:
        """Buffers can be used again, or the peer has gone."""
        connection = self.connection
        while not connection.closed:
            try:
                said = connection.receive()
            except BlockingIOError:
                return
            if said is None:
                connection.stop()
                return
            for (number,) in struct.iter_unpack("<H", said[0][: len(said[0]) // 2 * 2]):
                connection.pool.free(number)

    def close(self) -> None:
        """See `Way`."""
        self.connection.close()


class _Incoming:
    """A connection on which a peer says things. The receiving thread's own."""

    def __init__(self, station: Station, sock: LocalSocket, node: int) -> None:
        self._station, self._node = station, node
        self.connection = LocalConnection(station.loop, sock, self.take)
        freed: deque[int] = deque()
        self._dropped = partial(_dropped, freed, station.loop, self.connection)

    def take(self) -> bool:
        """Take some messages; whether there may be more."""
        connection = self.connection
        for _ in range(_AT_ONCE):
            if connection.closed:
                return False
            try:
                found = connection.receive()
            except BlockingIOError:
                return False
            if found is None:
                connection.close()
                return False
            self._station.arrived(self._node, found[0], found[1], self._dropped)
        return True


def _dropped(freed: deque[int], loop: EventLoop, connection: LocalConnection, number: int) -> None:
    """Nothing of a buffer is held here any more; in a finalizer, so it holds no router."""
    freed.append(number)
    loop.soon(partial(_give_back, freed, connection))


def _give_back(freed: deque[int], connection: LocalConnection) -> None:
    """Say that buffers can be used again."""
    while freed:
        some = [freed.popleft() for _ in range(min(len(freed), MOST_FREED))]
        connection.send(Frame(struct.pack(f"<{len(some)}H", *some)))
