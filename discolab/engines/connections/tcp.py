"""Connections to workers in other processes and on other machines: one port (transport/tcp.py).

A process that connects must have the key file (`Keys`), and then says what it is: a node, in JSON,
or one of the three connections of a worker that a node was told to start (it knows the session's
token). Three, because a zmq socket belongs to one thread at a time: the worker's own thread
receives commands, its link thread receives control messages, and the thread that holds the link's
lock sends. A connection that breaks is never taken up again, so its worker is lost.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from ...transport.frame import Frame
from ...transport.handshake import Keys, hear_hello, is_hello, new_token, say_hello
from ...transport.loop import Wakeup
from ...transport.tcp import TcpConnection, TcpServer, milliseconds
from .interface import Received, Transport, WorkerEnd

COMMANDS, CONTROL, REPLIES = range(3)  # the connections of a worker
_JOIN_WITHIN = 30.0  # seconds
_LINGER = 2_000  # ms that sending a worker's last messages may take
_PATIENCE = 1.0  # seconds that it may take to know what became of a worker's process
_SOON = 0.02  # seconds between two checks whether it is known


class TcpTransport(Transport):
    """See `Transport`.

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
    node_said
        ``node_said(node, message)`` is called on the reader thread: `node` names the connection,
        `message` is what the node says, a dict; None once it is gone.
    settled
        Whether it is known what became of a worker whose connection is broken. The receiver is
        told of the end only then, a second later at most.

    Raises
    ------
    DiscoError
        If the address is not of this machine, or the port is in use.
    """

    shared = False

    def __init__(self, endpoint: str, keys: Keys) -> None:
        super().__init__()
        self.token = new_token()
        self.node_said: Callable[[bytes, dict[str, Any] | None], None] = lambda node, message: None
        self.settled: Callable[[int], bool] = lambda rank: True
        self._broken: dict[int, float] = {}  # ranks whose end is due, and until when it may wait
        self._ended: set[int] = set()
        self._closed = False
        try:
            self._server = TcpServer(
                self.loop, endpoint, keys, self._greet, self._received, self._parted
            )
        except BaseException:
            super().close()
            raise
        self.endpoint = self._server.endpoint

    # -- sending -----------------------------------------------------------------------------

    def sender(self, rank: int) -> Callable[[Frame], object]:
        return lambda frame: self._send(rank, COMMANDS, frame)

    def control(self, rank: int, frame: Frame) -> None:
        self._send(rank, CONTROL, frame)

    def _send(self, rank: int, role: int, frame: Frame) -> None:
        if rank not in self._ended:
            self._server.send((rank, role), frame.data)

    def tell_node(self, node: bytes, message: dict[str, Any]) -> None:
        """Say something to a node; any thread."""
        if self._server.has(node):
            self._server.send(node, json.dumps(message).encode())

    # -- receiving ---------------------------------------------------------------------------

    def _greet(self, connection: bytes, data: Any) -> Any:
        """Take the first message on a connection: a worker's hello, or a node's message."""
        data = bytes(data)
        if not is_hello(data):
            return connection if self._hear_node(connection, data) else None
        hello = hear_hello(data, self.token)
        if hello is None or hello.role not in (COMMANDS, CONTROL, REPLIES):
            return None
        gone = hello.rank in self._broken or hello.rank in self._ended
        return None if gone else (hello.rank, hello.role)

    def _received(self, peer: Any, data: Any) -> None:
        if type(peer) is bytes:
            if data is not None:
                self._hear_node(peer, data)
            return
        rank, role = peer
        if role == REPLIES and rank not in self._ended:
            self.receiver.heard(rank)
            if data is not None:
                self.read_text(rank)  # what was written before a message comes before it
                self.receiver.received(rank, data, None)

    def _hear_node(self, node: bytes, data: Any) -> bool:
        """Pass on what a node says; false if it is no message of a node."""
        try:
            message = dict(json.loads(bytes(data)))
        except (TypeError, ValueError):
            return False
        # later: the server is receiving just now, under its lock
        self.loop.soon(lambda: self.node_said(node, message))
        return True

    def _parted(self, peer: Any) -> None:
        if type(peer) is bytes:
            self.loop.soon(lambda: self.node_said(peer, None))
        else:
            self.end(peer[0])

    def end(self, rank: int) -> None:
        """Treat a worker as lost, whatever its connections say; any thread."""
        if rank not in self._ended and rank not in self._broken:
            self._broken[rank] = time.monotonic() + _PATIENCE
            self.loop.soon(lambda: self._end_broken(rank))

    def _end_broken(self, rank: int) -> None:
        """Report a worker's end, once it is known why it ended."""
        until = self._broken.get(rank)
        if until is None:  # another thread has said so too
            return
        if time.monotonic() <= until and not self.settled(rank):
            self.loop.later(_SOON, lambda: self._end_broken(rank))
            return
        del self._broken[rank]
        self._ended.add(rank)
        for role in (COMMANDS, CONTROL):
            self._server.forget((rank, role))
        self.read_text(rank)
        self.receiver.ended(rank)

    def remove(self, rank: int) -> None:
        super().remove(rank)
        for role in (COMMANDS, CONTROL, REPLIES):
            self._server.drop((rank, role))
        self._broken.pop(rank, None)
        self._ended.discard(rank)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._server.close()
        super().close()


class TcpWorkerEnd(WorkerEnd):
    """See `WorkerEnd`.

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
            for role in (COMMANDS, CONTROL, REPLIES)
        ]
        self._commands, self._control, self._replies = self._connections
        try:
            self._await_welcome(endpoint)
        except BaseException:
            self._close(0)
            raise
        self._poll = zmq.Poller()  # the link thread's
        for connection in self._connections:
            self._poll.register(connection.monitor, zmq.POLLIN)
        self._poll.register(self._control.sock, zmq.POLLIN)
        self._poll.register(self._wakeup.fd, zmq.POLLIN)

    def _await_welcome(self, endpoint: str) -> None:
        """Each connection is acknowledged: from then on nothing said on it can be lost."""
        deadline = time.monotonic() + _JOIN_WITHIN
        for connection in self._connections:
            poll = zmq.Poller()
            poll.register(connection.sock, zmq.POLLIN)
            poll.register(connection.monitor, zmq.POLLIN)
            ready = dict(poll.poll(milliseconds(deadline - time.monotonic())))
            if connection.sock not in ready:
                broken = connection.monitor in ready
                why = "broke the connection off" if broken else "does not answer"
                raise EOFError(f"the session at {endpoint} {why}")
            connection.receive()

    def recv_command(self) -> Received | None:
        """See `WorkerEnd`; if the session goes, `recv_control` notices."""
        while True:
            data = self._commands.receive()
            if data is not None:
                return data, ()

    def recv_control(self, timeout: float) -> Received | None:
        with self._listening:
            return None if self._closing else self._recv_control(timeout)

    def _recv_control(self, timeout: float) -> Received | None:
        if self._gone:
            raise EOFError("the controller is gone")
        ready = dict(self._poll.poll(milliseconds(timeout)))
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        if self._control.sock in ready:
            data = self._control.receive()
            return None if data is None else (data, ())
        for connection in self._connections:
            if connection.monitor in ready and connection.has_ended():
                self._gone = True
                raise EOFError("the controller is gone")
        return None

    def send(self, frame: Frame) -> None:
        """See `WorkerEnd`; never waits: what is on its way is held in memory."""
        try:
            self._replies.send(frame.data)
        except EOFError:
            raise EOFError("the controller is gone") from None

    def wake(self) -> None:
        self._wakeup.ring()

    def close(self) -> None:
        """See `WorkerEnd`; on the worker's own thread."""
        self._closing = True
        self._wakeup.ring()
        with self._listening:
            self._close(_LINGER)

    def _close(self, linger: int) -> None:
        for connection in self._connections:
            connection.close(linger if connection is self._replies else 0)
        self._wakeup.close()
        self._context.term()
