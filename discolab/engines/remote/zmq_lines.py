"""Lines to workers in other processes and on other machines: one port (transport/tcp.py).

Who connects must have the key file (`Keys`), and then say what he is: a node, in JSON, or one of
the three connections of a worker that a node was told to start (it knows the session's token).
Three, because a zmq socket belongs to one thread at a time: the worker's own thread receives
commands, its link thread receives control messages, and whoever holds the link's lock sends. A
connection that breaks is never taken up again, so its worker is lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from ...transport.frame import Frame
from ...transport.handshake import Keys, hear_hello, is_hello, new_token, say_hello
from ...transport.loop import Wakeup
from ...transport.tcp import TcpConnection, TcpServer, milliseconds
from .lines import END, JOINED, MESSAGE, Event, Lines, Wire

CMD, CTL, OUT = range(3)  # the connections of a worker
_JOIN_WITHIN = 30.0  # seconds
_LINGER = 2_000  # ms that a worker's last words may take
_PATIENCE = 1.0  # seconds that what became of a worker's process may take to be known
_SOON = 0.02  # seconds between two looks whether it is


class ZmqLines(Lines):
    """See `Lines`.

    Nodes come as JOINED events of rank -1, whose data is ``(node, message)``: the bytes that name
    the connection, and what the node says, a dict; None once it is gone.

    Parameters
    ----------
    endpoint
        To bind: ``tcp://127.0.0.1:*`` or ``ipc:///path``.

    Attributes
    ----------
    endpoint
        What it is bound to.
    token
        What a worker must know to be taken in.
    heard
        When each worker was heard last, also in the middle of a long message (`time.monotonic`).
    on_close
        Called in the end.
    settled
        Whether it is known what became of a worker whose line is broken. Its END waits for this,
        a second at most.

    Raises
    ------
    DiscoError
        If the address is not of this machine, or the port is in use.
    """

    shared = False

    def __init__(self, endpoint: str, keys: Keys) -> None:
        super().__init__()
        self.token = new_token()
        self.heard: dict[int, float] = {}
        self.on_close: Callable[[], None] = lambda: None
        self.settled: Callable[[int], bool] = lambda rank: True
        self._broken: dict[int, float] = {}  # ranks whose END is due, and until when it may wait
        self._ended: set[int] = set()
        self._watched: set[int] = set()
        self._closed = False
        try:
            self._server = TcpServer(
                self._loop, endpoint, keys, self._greet, self._received, self._parted
            )
        except BaseException:
            super().close()
            raise
        self.endpoint = self._server.endpoint

    # -- sending -----------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        if rank not in self._ended:
            self._server.send((rank, CMD), frame.data)

    def control(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        if rank not in self._ended:
            self._server.send((rank, CTL), frame.data)

    def tell_node(self, node: bytes, message: dict[str, Any]) -> None:
        """Say something to a node; any thread."""
        if self._server.has(node):
            self._server.send(node, json.dumps(message).encode())

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[Event]:
        """See `Lines`."""
        self._loop.turn(min(timeout, _SOON) if self._broken else timeout)
        if self._broken:
            self._end_broken()
        events, self._events = self._events, []
        return events

    def _greet(self, connection: bytes, data: Any) -> Any:
        """The first message on a connection: a worker's hello, or what a node says."""
        data = bytes(data)
        if not is_hello(data):
            return connection if self._hear_node(connection, data) else None
        hello = hear_hello(data, self.token)
        if hello is None or hello.role not in (CMD, CTL, OUT):
            return None
        gone = hello.rank in self._broken or hello.rank in self._ended
        return None if gone else (hello.rank, hello.role)

    def _received(self, peer: Any, data: Any) -> None:
        if type(peer) is bytes:
            if data is not None:
                self._hear_node(peer, data)
            return
        rank, role = peer
        if role == OUT and rank not in self._ended:
            self.heard[rank] = time.monotonic()
            if data is not None:
                self._read_text(rank)  # what was written before a message comes before it
                self._events.append(Event(MESSAGE, rank, data))

    def _hear_node(self, node: bytes, data: Any) -> bool:
        """What a node says, as an event; false if it is none."""
        try:
            message = dict(json.loads(bytes(data)))
        except (TypeError, ValueError):
            return False
        self._events.append(Event(JOINED, -1, (node, message)))
        return True

    def _parted(self, peer: Any) -> None:
        if type(peer) is bytes:
            self._events.append(Event(JOINED, -1, (peer, None)))
        else:
            self.end(peer[0])

    def end(self, rank: int) -> None:
        """A worker is lost, whatever its connections say; any thread."""
        if rank not in self._ended:
            self._broken.setdefault(rank, time.monotonic() + _PATIENCE)
            self._loop.wake()

    def _end_broken(self) -> None:
        for rank, until in tuple(self._broken.items()):
            if time.monotonic() > until or self.settled(rank):
                del self._broken[rank]
                self._ended.add(rank)
                for role in (CMD, CTL):
                    self._server.forget((rank, role))
                self._read_text(rank)
                self._events.append(Event(END, rank))

    # -- what else the reader thread looks at ------------------------------------------------------

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Take over `fd`, and have `ready` called on the reader thread while it is readable."""
        self._watched.add(fd)
        self._loop.watch(fd, lambda _: ready())

    def unwatch(self, fd: int) -> None:
        """No more; on the reader thread."""
        if fd in self._watched:
            self._watched.remove(fd)
            self._loop.forget(fd)
            os.close(fd)

    def close(self) -> None:
        """See `Lines`."""
        if self._closed:
            return
        self._closed = True
        self._server.close()
        self.on_close()
        super().close()
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()


class ZmqWire(Wire):
    """See `Wire`.

    Parameters
    ----------
    endpoint
        Of the session: ``tcp://10.0.0.1:5555``.
    token
        The session's, that only its workers know.

    Raises
    ------
    EOFError
        If the session does not take the worker in.
    """

    shared = False

    def __init__(self, endpoint: str, keys: Keys, token: bytes, rank: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = Wakeup()
        self._gone = self._closing = False
        self._listening = threading.Lock()  # held by the link thread while it uses sockets
        self._connections = [
            TcpConnection(self._context, endpoint, keys, say_hello(token, rank, role))
            for role in (CMD, CTL, OUT)
        ]
        self._cmd, self._ctl, self._out = self._connections
        try:
            self._await_welcome(endpoint)
        except BaseException:
            self._close(0)
            raise
        self._poll = zmq.Poller()  # the link thread's
        for connection in self._connections:
            self._poll.register(connection.monitor, zmq.POLLIN)
        self._poll.register(self._ctl.sock, zmq.POLLIN)
        self._poll.register(self._wakeup.fd, zmq.POLLIN)

    def _await_welcome(self, endpoint: str) -> None:
        """Each connection is acknowledged: from then on nothing said on it can be lost."""
        deadline = time.monotonic() + _JOIN_WITHIN
        for connection in self._connections:
            poll = zmq.Poller()
            poll.register(connection.sock, zmq.POLLIN)
            poll.register(connection.monitor, zmq.POLLIN)
            found = dict(poll.poll(milliseconds(deadline - time.monotonic())))
            if connection.sock not in found:
                broken = connection.monitor in found
                why = "broke the connection off" if broken else "does not answer"
                raise EOFError(f"the session at {endpoint} {why}")
            connection.receive()

    def recv_command(self) -> tuple[Any, int | None] | None:
        """See `Wire`; if the session goes, `recv_control` notices."""
        while True:
            data = self._cmd.receive()
            if data is not None:
                return data, None

    def recv_control(self, timeout: float) -> tuple[Any, int | None] | None:
        """See `Wire`."""
        with self._listening:
            return None if self._closing else self._recv_control(timeout)

    def _recv_control(self, timeout: float) -> tuple[Any, int | None] | None:
        if self._gone:
            raise EOFError("the controller is gone")
        found = dict(self._poll.poll(milliseconds(timeout)))
        if self._wakeup.fd in found:
            self._wakeup.clear()
        if self._ctl.sock in found:
            data = self._ctl.receive()
            return None if data is None else (data, None)
        for connection in self._connections:
            if connection.monitor in found and connection.has_ended():
                self._gone = True
                raise EOFError("the controller is gone")
        return None

    def send(self, frame: Frame) -> None:
        """See `Wire`; never waits: what is on its way is held in memory."""
        try:
            self._out.send(frame.data)
        except EOFError:
            raise EOFError("the controller is gone") from None

    def wake(self) -> None:
        """See `Wire`."""
        self._wakeup.ring()

    def close(self) -> None:
        """See `Wire`; on the worker's own thread."""
        self._closing = True
        self._wakeup.ring()
        with self._listening:
            self._close(_LINGER)

    def _close(self, linger: int) -> None:
        for connection in self._connections:
            connection.close(linger if connection is self._out else 0)
        self._wakeup.close()
        self._context.term()
