"""A worker's end of a line over zmq: three connections to the session's one port.

Three, because a zmq socket belongs to one thread at a time: the worker's own thread receives
commands, its link thread receives control messages, and whoever holds the link's lock sends.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from ...transport.frame import Frame
from ...transport.loop import Wakeup
from ..nodes.keys import Keys
from .lines import Wire
from .zmq_parts import (
    CMD,
    CTL,
    JOIN,
    MAGIC,
    OUT,
    PIECE,
    Joiner,
    event_of,
    milliseconds,
    pieces,
    set_options,
)

_JOIN_WITHIN = 30.0  # seconds
_LINGER = 2_000  # ms that the last words may take
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class ZmqWire(Wire):
    """See `Wire`.

    Parameters
    ----------
    endpoint
        Of the session: ``tcp://10.0.0.1:5555``.
    token
        The session's, 16 bytes that only its workers know.

    Raises
    ------
    EOFError
        If the session does not take the worker in.
    """

    segments = False

    def __init__(self, endpoint: str, keys: Keys, token: bytes, rank: int) -> None:
        self._context = zmq.Context()
        self._alarm = Wakeup()
        self._half = False  # whether a send may have been torn between two frames
        self._gone = self._closing = False
        self._listening = threading.Lock()  # held by the link thread while it uses sockets
        self._sockets = [self._context.socket(zmq.DEALER) for _ in (CMD, CTL, OUT)]
        self._monitors = [sock.get_monitor_socket(_BROKEN) for sock in self._sockets]
        self._cmd, self._ctl, self._out = self._sockets
        try:
            for kind, sock in enumerate(self._sockets):
                set_options(sock, endpoint, keys, server=False)
                sock.connect(endpoint)
                sock.send(JOIN.pack(MAGIC, token, rank, kind))
            self._await_welcome(endpoint)
        except BaseException:
            self._out.setsockopt(zmq.LINGER, 0)
            self.close()
            raise
        self._recv_command = self._cmd.recv
        self._commands, self._controls = Joiner(), Joiner()
        self._poll = zmq.Poller()  # the link thread's
        for monitor in self._monitors:
            self._poll.register(monitor, zmq.POLLIN)
        self._poll.register(self._ctl, zmq.POLLIN)
        self._poll.register(self._alarm.fd, zmq.POLLIN)

    def _await_welcome(self, endpoint: str) -> None:
        """Each connection is acknowledged: from then on nothing said on it can be lost."""
        deadline = time.monotonic() + _JOIN_WITHIN
        for sock, monitor in zip(self._sockets, self._monitors, strict=True):
            poll = zmq.Poller()
            poll.register(sock, zmq.POLLIN)
            poll.register(monitor, zmq.POLLIN)
            found = dict(poll.poll(milliseconds(deadline - time.monotonic())))
            if sock not in found:
                why = "broke the connection off" if monitor in found else "does not answer"
                raise EOFError(f"the session at {endpoint} {why}")
            sock.recv()

    def recv_command(self) -> tuple[Any, int | None] | None:
        """See `Wire`; if the session goes, `recv_control` notices."""
        while True:
            data = self._commands.take(self._cmd, self._recv_command(copy=False))
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
        if self._alarm.fd in found:
            self._alarm.clear()
        if self._ctl in found:
            data = self._controls.take(self._ctl, self._ctl.recv(copy=False))
            return None if data is None else (data, None)
        for monitor in self._monitors:
            if monitor in found and event_of(monitor.recv_multipart())[0] & _BROKEN:
                self._gone = True
                raise EOFError("the controller is gone")
        return None

    def send(self, frame: Frame) -> None:
        """See `Wire`; never waits: what is on its way is held in memory."""
        out, data = self._out, frame.data
        try:
            if self._half:
                out.send(b"", zmq.NOBLOCK)  # ends what was torn
            if len(data) <= PIECE:
                out.send(data, zmq.NOBLOCK)
                return
            self._half = True
            for mark, piece in pieces(data):
                out.send(mark, zmq.NOBLOCK | zmq.SNDMORE)
                out.send(piece, zmq.NOBLOCK)
            self._half = False
        except zmq.Again:
            raise EOFError("the controller is gone") from None

    def wake(self) -> None:
        """See `Wire`."""
        self._alarm.ring()

    def close(self) -> None:
        """See `Wire`; on the worker's own thread."""
        self._closing = True
        self._alarm.ring()
        with self._listening:
            self._close()

    def _close(self) -> None:
        for sock, monitor in zip(self._sockets, self._monitors, strict=True):
            sock.disable_monitor()
            monitor.close(0)
            sock.close(_LINGER if sock is self._out else 0)
        self._alarm.close()
        self._context.term()


__all__ = ["ZmqWire"]
