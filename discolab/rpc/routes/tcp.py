"""Between machines: TCP, encrypted and authenticated (transport/tcp.py).

Each node has a port of its own; the service hands addresses, and the keys and the token of this
session's nodes, round over the session's own lines. A connection carries messages one way, and is
never taken up again once it broke: the session's own line to that worker breaks with it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from ...engines.nodes.machines import endpoint_of
from ...runtime.errors import DiscoError
from ...runtime.protocol import Message
from ...transport.frame import Frame, pack
from ...transport.handshake import Keys, hear_hello, say_hello
from ...transport.tcp import TcpConnection, TcpServer
from .addresses import Address
from .ways import End, Station, Way

_PARTED = 3.0  # seconds that the end of a dead node's connection may take to come
_SILENT = 0.5  # seconds that the first word of one that is dead may take


class TcpEnd(End):
    """See the module.

    Raises
    ------
    DiscoError
        If this machine has no such address.
    """

    def __init__(self, station: Station, node: int, host: str, token: bytes, keys: Keys) -> None:
        self.node, self.token, self.keys, self.station = node, token, keys, station
        self._parted: set[int] = set()  # nodes whose connection has ended
        try:
            self.server = TcpServer(
                station.loop,
                endpoint_of(host, 0),
                keys,
                self._greet,
                self._received,
                self._parted.add,
            )
        except (OSError, DiscoError) as exc:
            raise DiscoError(f"rpc can't listen at {host}: {exc}") from None

    def addressed(self, address: Address) -> Address:
        """See `End`."""
        return address._replace(endpoint=self.server.endpoint)

    def way_to(self, node: int, address: Address) -> Way:
        """See `End`."""
        return TcpWay(self, address)

    def _greet(self, _connection: bytes, data: Any) -> int | None:
        hello = hear_hello(bytes(data), self.token)
        return hello.rank if hello is not None and self.station.has(hello.rank) else None

    def _received(self, node: int, data: Any) -> None:
        if data is not None:
            self.station.arrived(node, data, None, None)

    def drain(self, node: int, since: float) -> bool:
        """See `End`. What it has said ends with its connection."""
        self.server.look()
        wait = _PARTED if self.server.has(node) else _SILENT
        return node in self._parted or time.monotonic() > since + wait

    def close(self) -> None:
        """See `End`; the ways are closed."""
        self.server.close(0)


class TcpWay(Way):
    """The connection to a peer, made when there is something to say."""

    def __init__(self, end: TcpEnd, address: Address) -> None:
        self._end, self._address = end, address
        self._connection: TcpConnection | None = None

    def pack(self, message: Message) -> Frame:
        """See `Way`."""
        return pack(message.body, message.frames)

    def discard(self, frame: Frame) -> None:
        """See `Way`."""

    def send(self, frame: Frame) -> None:
        """See `Way`."""
        end, connection = self._end, self._connection
        if connection is None:
            connection = self._connection = TcpConnection(
                end.server.context,
                self._address.endpoint,
                end.keys,
                say_hello(end.token, end.node),
            )
        with suppress(EOFError):  # the service will say so
            connection.send(frame.data)

    def close(self) -> None:
        """See `Way`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
