"""What both ends of a line over zmq share: options of sockets, who says what first, large messages.

Every connection is encrypted and authenticated by CURVE. The first message on a connection says
what it is for: a worker's three (`JOIN`), or a node's (JSON). A message is one frame; a large one
is cut in pieces, each a mark and a frame: so a stranger can't have memory allocated by claiming a
size, encryption and transport go side by side, and each piece is a sign of life. What ends in an
empty frame is void: an acknowledgement, or what a signal has torn between two frames.
"""

from __future__ import annotations

import errno
import math
import struct
from typing import Any

import zmq

from ..nodes.keys import Keys

CMD, CTL, OUT = range(3)  # the connections of a worker
VERSION = 1  # of what is said over zmq: lines, nodes, frames
JOIN = struct.Struct("<4s16sIB")  # magic and version, the session's token, rank, which connection
MAGIC = b"DLJ\x01"

PIECE = 1 << 20  # bytes in one frame
SILENCE = 60.0  # seconds of silence after which a connection is taken for cut
HANDSHAKE = 10.0  # seconds that whoever connects may take to say who he is
LINGER = 500  # ms that closing waits for what was said to be on its way
_MORE, _LAST = b"+", b"."
_OVERHEAD = 4096  # bytes of encryption and framing
_PING = 2.0  # seconds between two signs of life of a connection
_EVENT = struct.Struct("=HI")


def set_options(sock: zmq.Socket[bytes], endpoint: str, keys: Keys, server: bool) -> None:
    """Prepare a socket, before it is bound or connected."""
    for option, value in (
        (zmq.SNDHWM, 0),  # who sends commands is held back by the session instead
        (zmq.RCVHWM, 0),
        (zmq.LINGER, LINGER),
        (zmq.MAXMSGSIZE, PIECE + _OVERHEAD),
        (zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000)),
        (zmq.HEARTBEAT_IVL, int(_PING * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, int(SILENCE * 1000)),
    ):
        sock.setsockopt(option, value)
    if "[" in endpoint:  # else an IPv4 address would be shown in IPv6's way
        sock.setsockopt(zmq.IPV6, 1)
    if server:
        sock.curve_server = True
        sock.curve_publickey = keys.session_public.encode()
        sock.curve_secretkey = keys.session_secret.encode()
    else:
        sock.curve_serverkey = keys.session_public.encode()
        sock.curve_publickey = keys.node_public.encode()
        sock.curve_secretkey = keys.node_secret.encode()
        # what was on its way when a connection broke is lost: never take it up again. Not -1, which
        # throws away what has come and was not read
        sock.setsockopt(zmq.RECONNECT_IVL, 2**31 - 1)
        sock.setsockopt(zmq.CONNECT_TIMEOUT, 10_000)


def pieces(data: Any) -> list[tuple[bytes, memoryview]]:
    """A large message as marks and frames."""
    view = memoryview(data)
    cut = [(_MORE, view[at : at + PIECE]) for at in range(0, len(view), PIECE)]
    return [*cut[:-1], (_LAST, cut[-1][1])]


class Joiner:
    """Puts what comes on one connection together again."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def take(self, sock: zmq.Socket[bytes], frame: zmq.Frame) -> Any:
        """The message that is complete with `frame` and those behind it; None if none is."""
        if not frame.more:
            self._parts = []  # of what was torn
            size = len(frame)
            if size > PIECE // 16:
                return frame.buffer
            return frame.bytes if size else None
        piece = sock.recv(copy=False)
        while piece.more:  # nothing of ours
            piece = sock.recv(copy=False)
        if not len(piece):
            return None
        self._parts.append(piece.buffer)
        if frame.bytes != _LAST:
            return None
        parts, self._parts = self._parts, []
        return b"".join(parts)


def readable(sock: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def event_of(message: list[bytes]) -> tuple[int, int]:
    """The event and the value of a message of a socket's monitor."""
    event, value = _EVENT.unpack(message[0])
    return event, value


def milliseconds(seconds: float) -> int:
    """To wait: never less than asked for."""
    return max(0, math.ceil(seconds * 1000))


def why_not_bound(endpoint: str, exc: zmq.ZMQError) -> str:
    """In words, with what to do about it."""
    where = endpoint.removeprefix("tcp://")
    if exc.errno == errno.EADDRINUSE:
        return (
            f"{where} is in use by another program or session: choose another port, or port=0 for "
            "any that is free"
        )
    if exc.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"this machine has no address {where.rpartition(':')[0]}: {exc.strerror}"
    return f"{where} can't be listened on: {exc.strerror}"
