"""Connections between machines: zmq over TCP, encrypted and authenticated by CURVE.

A `TcpServer` has one port. A process that connects must have the keys (`handshake.Keys`): without
them it gets no further than zmq's own handshake. The first message on a connection then says which
peer it is; until that is accepted the connection is unauthenticated, and there is room for so many
only. A connection that breaks is never taken up again: what was on its way is lost with it.

A message is one zmq frame; a large one is cut in pieces, each a mark and a frame: so nobody can
have memory allocated by claiming a size, encryption and transport go side by side, and each piece
is a sign of life. What ends in an empty frame is void: an acknowledgement, or what a signal has
torn between two frames.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from ..runtime.errors import DiscoError
from .connection import Arrived, Connection, Port
from .frame import Frame
from .handshake import WITHIN, Keys, Unauthenticated, hear_hello, is_hello, say_hello, token_for
from .loop import EventLoop

MOST_UNAUTHENTICATED = 128  # connections that have not said which peer they are
PIECE = 1 << 20  # bytes in one frame
SILENCE = 60.0  # seconds of silence after which a connection is taken for cut
LINGER = 500  # ms that closing waits for what was said to be on its way
ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MORE, _LAST = b"+", b"."
_OVERHEAD = 4096  # bytes of encryption and framing
_PING = 2.0  # seconds between two signs of life of a connection
_AT_ONCE = 64  # messages received before others have their turn
_PARTED = 3.0  # seconds that the end of a dead process's connection may take to come
_SILENT = 0.5  # seconds that the first message of a dead process may take
_EVENT = struct.Struct("=HI")


# -- sockets ---------------------------------------------------------------------------------


def set_options(sock: zmq.Socket[bytes], endpoint: str, keys: Keys, server: bool) -> None:
    """Prepare a socket, before it is bound or connected."""
    for option, value in (
        (zmq.SNDHWM, 0),  # senders are throttled elsewhere
        (zmq.RCVHWM, 0),
        (zmq.LINGER, LINGER),
        (zmq.MAXMSGSIZE, PIECE + _OVERHEAD),
        (zmq.HANDSHAKE_IVL, int(WITHIN * 1000)),
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


class Writer:
    """Sends messages on a socket; one thread at a time. Ctrl-C may tear one, but none after it."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._send = sock.send
        self._half = False  # whether a message may have been torn between two frames

    def send(self, data: Any, to: bytes | None = None) -> None:
        """Send a message, from a ROUTER to one of its peers; never waits.

        Raises
        ------
        zmq.ZMQError
            If the connection is gone: EHOSTUNREACH, or EAGAIN.
        """
        send = self._send
        if self._half:
            send(b"", zmq.NOBLOCK)  # ends it; ignored where nothing was torn
            self._half = False
        if to is None and len(data) <= PIECE:
            send(data, zmq.NOBLOCK)
            return
        self._half = True
        if len(data) <= PIECE:
            send(to or b"", zmq.NOBLOCK | zmq.SNDMORE)
            send(data, zmq.NOBLOCK)
        else:
            for mark, piece in _pieces(data):
                if to is not None:
                    send(to, zmq.NOBLOCK | zmq.SNDMORE)
                send(mark, zmq.NOBLOCK | zmq.SNDMORE)
                send(piece, zmq.NOBLOCK)
        self._half = False


def _pieces(data: Any) -> list[tuple[bytes, memoryview]]:
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
            # copied: where a zmq.Frame is freed, zmq handles signals, and a Ctrl-C that has just
            # come is lost there; so the main thread must never have the last reference to one
            return frame.bytes if len(frame) else None
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


def event_of(message: list[bytes]) -> tuple[int, int]:
    """The event and the value of a message of a socket's monitor."""
    event, value = _EVENT.unpack(message[0])
    return event, value


def milliseconds(seconds: float) -> int:
    """To wait: never less than asked for."""
    return max(0, math.ceil(seconds * 1000))


def _readable(sock: zmq.Socket[bytes]) -> bool:
    return bool(int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class TcpConnection:
    """A connection to the port of a server; one thread at a time.

    Parameters
    ----------
    hello
        The first message.

    Attributes
    ----------
    sock, monitor
        To wait for a message, and for the end of the connection.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: Keys, hello: bytes
    ) -> None:
        self.sock = context.socket(zmq.DEALER)
        set_options(self.sock, endpoint, keys, server=False)
        self.monitor = self.sock.get_monitor_socket(ENDED)
        self._writer, self._joiner = Writer(self.sock), Joiner()
        self._receive = self.sock.recv  # looked up here, as a thread may wait in it for long
        self.sock.connect(endpoint)
        self.sock.send(hello)

    def send(self, data: Any) -> None:
        """Send a message; never waits, what is on its way is held in memory.

        Raises
        ------
        EOFError
            If the connection is gone.
        """
        try:
            self._writer.send(data)
        except zmq.Again:
            raise EOFError("the connection is gone") from None

    def receive(self) -> Any:
        """Wait for the next message, or a piece of one: None."""
        return self._joiner.take(self.sock, self._receive(copy=False))

    def has_ended(self) -> bool:
        """Whether the connection has ended, once the monitor has something to say."""
        return bool(event_of(self.monitor.recv_multipart())[0] & ENDED)

    def close(self, linger: int = 0) -> None:
        """Close it; what was sent may take so many ms."""
        self.sock.disable_monitor()
        self.monitor.close(0)
        self.sock.close(linger)


# -- the server ------------------------------------------------------------------------------


class TcpServer:
    """See the module. `send` is for any thread, all else for the loop's.

    The socket is used by all threads under `_lock`, a leaf among locks.

    Parameters
    ----------
    endpoint
        To bind: ``tcp://127.0.0.1:*`` or ``ipc:///path``.
    greet
        ``greet(connection, data)`` is called with the first message on a connection, and gives the
        peer, or None, as if nothing had come. `connection` names the connection, and may be the
        peer. A `Hello` is acknowledged by an empty message.
    received
        ``received(peer, data)`` is called with each later message, and with None for a piece.
    parted
        ``parted(peer)`` is called once a peer's connection has ended, after all that it has sent.

    Attributes
    ----------
    endpoint
        What it is bound to.

    Raises
    ------
    DiscoError
        If the address is not of this machine, or the port is in use.
    """

    def __init__(
        self,
        loop: EventLoop,
        endpoint: str,
        keys: Keys,
        greet: Callable[[bytes, Any], Hashable | None],
        received: Callable[[Any, Any], object],
        parted: Callable[[Any], object],
    ) -> None:
        self._loop, self._greet, self._received, self._parted = loop, greet, received, parted
        self._lock = threading.Lock()
        self._holder = 0  # the thread that has the lock
        self._later: deque[tuple[Any, Any]] = deque()  # what that thread sends in between
        self._peers: dict[bytes, tuple[Any, Joiner]] = {}  # by connection
        self._connections: dict[Any, bytes] = {}  # by peer
        self._early: dict[Any, list[Any]] = {}  # sent before the peer is there
        self._by_fd: dict[int, bytes] = {}  # whose connection it is
        self._unauthenticated: Unauthenticated[int] = Unauthenticated(
            MOST_UNAUTHENTICATED, _hang_up
        )
        self._gone: list[bytes] = []
        self._more = self._closed = False
        self._key = z85.decode(keys.node_public.encode())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            # before the port is bound, so that nobody is let in unasked
            self._authenticator = self.context.socket(zmq.REP)
            self._authenticator.bind("inproc://zeromq.zap.01")
            self._router = router = self.context.socket(zmq.ROUTER)
            self._writer = Writer(router)
            self._state: Callable[[int], Any] = router.getsockopt
            set_options(router, endpoint, keys, server=True)
            for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.BACKLOG, 1024)):
                router.setsockopt(option, value)
            router.setsockopt(zmq.ZAP_DOMAIN, b"discolab")
            self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            router.bind(endpoint)
            self.endpoint = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as exc:
            self.context.destroy(0)
            raise DiscoError(_why_not_bound(endpoint, exc)) from None
        self._fds = [sock.fileno() for sock in (self._authenticator, self._monitor, router)]
        for fd in self._fds:
            loop.watch(fd, self._ready)
        loop.soon(self.look)

    # -- sending -----------------------------------------------------------------------------

    def send(self, peer: Hashable, data: Any) -> None:
        """Send a message to a peer, once it is there; never blocks."""
        me = threading.get_ident()
        if self._holder == me:  # a finalizer, in the middle of a send or receive of this thread
            self._later.append((peer, data))
            return
        with self._lock:
            self._holder = me
            try:
                self._send_now(peer, data)
                self._send_later()
                pending = not self._closed and self._state(zmq.EVENTS) & zmq.POLLIN
            finally:
                self._holder = 0
        if pending:  # sending has taken the sign of it from the descriptor
            self._loop.soon(self.look)

    def _send_later(self) -> None:
        while self._later:
            self._send_now(*self._later.popleft())

    def _send_now(self, peer: Hashable, data: Any) -> None:
        """Under the lock."""
        if self._closed:
            return
        connection = self._connections.get(peer)
        if connection is None:
            self._early.setdefault(peer, []).append(data)
        else:
            self._send_on(connection, data)

    def _send_on(self, connection: bytes, data: Any) -> None:
        try:
            self._writer.send(data, connection)
        except zmq.ZMQError as exc:
            if exc.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            # the connection is gone: the monitor says so too

    # -- receiving ---------------------------------------------------------------------------

    def _ready(self, _mask: int) -> None:
        self.look()

    def look(self) -> None:
        """Receive what has come, and tell of peers that have parted."""
        if self._closed:
            return
        self._authenticate()
        self._watch()  # before receiving: all that these peers have sent is there then
        gone, self._gone = self._gone, []
        self._take()
        while gone and self._more:
            self._take()
        for connection in gone:
            known = self._peers.pop(connection, None)
            if known is None:  # it was dropped
                continue
            peer = known[0]
            if peer == connection:  # a rank is taken for good
                del self._connections[peer]
            self._parted(peer)
        if self._more or self._gone:
            self._loop.soon(self.look)

    def has(self, peer: Hashable) -> bool:
        """Whether a peer has ever connected."""
        return peer in self._connections

    def drop(self, peer: Hashable) -> None:
        """Let another process come as this peer; what the old one still says is nobody's."""
        with self._lock:
            self._early.pop(peer, None)
            connection = self._connections.pop(peer, None)
            if connection is not None:
                self._peers.pop(connection, None)

    def forget(self, peer: Hashable) -> None:
        """Keep nothing for a peer that will not come."""
        with self._lock:
            self._early.pop(peer, None)

    def _authenticate(self) -> None:
        """Answer zmq's question whether a key is known (ZAP)."""
        authenticator = self._authenticator
        while _readable(authenticator):
            asked = authenticator.recv_multipart()
            known = len(asked) == 7 and asked[5] == b"CURVE" and asked[6] == self._key
            status = (b"200", b"OK") if known else (b"400", b"")
            version, request = (*asked, b"", b"")[:2]
            authenticator.send_multipart([version, request, *status, b"", b""])

    def _watch(self) -> None:
        """Note connections that begin, and those that have ended."""
        while _readable(self._monitor):
            event, fd = event_of(self._monitor.recv_multipart())
            if event == zmq.EVENT_ACCEPTED:
                self._unauthenticated.add(fd)
                continue
            self._unauthenticated.remove(fd)
            connection = self._by_fd.pop(fd, None)
            if connection is not None:
                self._gone.append(connection)

    def _take(self) -> None:
        """Receive some messages; `_more`: there may be others."""
        router, state = self._router, self._state
        messages: list[tuple[Any, Any]] = []
        with self._lock:
            self._holder = threading.get_ident()
            try:
                self._more = True
                for _ in range(_AT_ONCE):
                    if not state(zmq.EVENTS) & zmq.POLLIN:
                        self._more = False
                        break
                    connection = router.recv()
                    frame = router.recv(copy=False)
                    known = self._peers.get(connection)
                    if known is None:
                        self._meet(connection, frame, Joiner().take(router, frame))
                    else:
                        messages.append((known[0], known[1].take(router, frame)))
                self._send_later()
            finally:
                self._holder = 0
        for peer, data in messages:
            self._received(peer, data)

    def _meet(self, connection: bytes, frame: zmq.Frame, data: Any) -> None:
        """The first message on a connection; what is of no use is as if it had not come."""
        peer = None if data is None else self._greet(connection, data)
        if peer is None or peer in self._connections:
            return
        self._watch()  # what was said of this descriptor before is of another connection
        fd = int(frame.get(zmq.SRCFD))
        self._unauthenticated.remove(fd)
        self._by_fd[fd] = connection
        self._peers[connection] = peer, Joiner()
        self._connections[peer] = connection
        if is_hello(data):
            self._send_on(connection, b"")
        for early in self._early.pop(peer, ()):
            self._send_on(connection, early)

    def close(self, linger: int = LINGER) -> None:
        """Close it, and all sockets of `context`; sending the rest may take `linger` ms."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for fd in self._fds:
            self._loop.forget(fd)
        self._router.disable_monitor()
        self.context.destroy(linger)


class TcpPort(Port):
    """A port at which processes of a session connect that have its keys and its token.

    Parameters
    ----------
    me
        The number of this process.

    Raises
    ------
    DiscoError
        If the address is not of this machine.
    """

    def __init__(
        self,
        loop: EventLoop,
        endpoint: str,
        me: int,
        token: bytes,
        keys: Keys,
        arrived: Arrived,
    ) -> None:
        self.token, self.keys, self._arrived = token, keys, arrived
        self._me, self._own_token = me, token_for(token, me)
        self._parted: set[int] = set()  # those whose connection has ended
        self.server = TcpServer(loop, endpoint, keys, self._greet, self._received, self._parted.add)
        self.address = self.server.endpoint

    def _greet(self, _connection: bytes, data: Any) -> int | None:
        hello = hear_hello(bytes(data), self._own_token)
        return None if hello is None else hello.rank

    def _received(self, sender: int, data: Any) -> None:
        if data is not None:
            self._arrived(sender, data, None, None)

    def connect(self, address: str, node: int) -> Connection:
        hello = say_hello(token_for(self.token, node), self._me)
        return _Outgoing(lambda: TcpConnection(self.server.context, address, self.keys, hello))

    def drain(self, sender: int, since: float) -> bool:
        """See `Port`. All that a dead process has sent is here once its connection has ended."""
        self.server.look()
        wait = _PARTED if self.server.has(sender) else _SILENT
        return sender in self._parted or time.monotonic() > since + wait

    def close(self) -> None:
        """See `Port`; the connections are closed."""
        self.server.close(0)


class _Outgoing(Connection):
    """A connection on which this process sends."""

    def __init__(self, connect: Callable[[], TcpConnection]) -> None:
        self._connect = connect
        self._connection: TcpConnection | None = None

    def send(self, frame: Frame) -> None:
        if self._connection is None:
            self._connection = self._connect()
        with suppress(EOFError):  # it has gone
            self._connection.send(frame.data)

    def discard(self, frame: Frame) -> None:
        """See `Connection`: nothing is lent."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _hang_up(fd: int) -> None:
    """End a connection of zmq's, which then closes it."""
    try:
        with socket.socket(fileno=os.dup(fd)) as twin:
            twin.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _why_not_bound(endpoint: str, exc: zmq.ZMQError) -> str:
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
