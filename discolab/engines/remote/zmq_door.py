"""Who comes to the port of a session and who goes; the reader thread's own.

The doorman answers zmq's question whether a key is known (ZAP); without the key nobody gets further
than that. Whoever has not said who he is is a stranger: there is room for so many only, so that
they can't use up this process's file descriptors.
"""

from __future__ import annotations

import os
import socket

import zmq
from zmq.utils import z85

from ..nodes.keys import Keys
from .zmq_parts import event_of, readable

MOST_STRANGERS = 128  # connections that have not said who they are


class Door:
    """Made before the port is bound, so that nobody is let in unasked."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._key = z85.decode(keys.node_public.encode())
        self._doorman = context.socket(zmq.REP)
        self._doorman.bind("inproc://zeromq.zap.01")
        self._by_fd: dict[int, bytes] = {}  # whose connection it is
        self._strangers: dict[int, None] = {}  # the oldest first
        self._gone: list[bytes] = []

    def watch(self, router: zmq.Socket[bytes]) -> list[int]:
        """Watch the connections of a socket; the file descriptors to be polled."""
        router.setsockopt(zmq.ZAP_DOMAIN, b"discolab")
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        return [self._doorman.fileno(), self._monitor.fileno()]

    def answer(self) -> None:
        """Let in who has the key in the file."""
        door = self._doorman
        while readable(door):
            asked = door.recv_multipart()
            known = len(asked) == 7 and asked[5] == b"CURVE" and asked[6] == self._key
            status = (b"200", b"OK") if known else (b"400", b"")
            version, request = (*asked, b"", b"")[:2]
            door.send_multipart([version, request, *status, b"", b""])

    def knows(self, who: bytes, frame: zmq.Frame) -> None:
        """Whoever has sent `frame` has said who he is."""
        self._look()  # what was said of this descriptor before is of another connection
        fd = int(frame.get(zmq.SRCFD))
        self._strangers.pop(fd, None)
        self._by_fd[fd] = who

    def gone(self) -> list[bytes]:
        """Whose connections have ended since it was asked last."""
        self._look()
        found, self._gone = self._gone, []
        return found

    def _look(self) -> None:
        while readable(self._monitor):
            event, fd = event_of(self._monitor.recv_multipart())
            if event == zmq.EVENT_ACCEPTED:
                self._strangers[fd] = None
                continue
            self._strangers.pop(fd, None)
            who = self._by_fd.pop(fd, None)
            if who is not None:
                self._gone.append(who)
        while len(self._strangers) > MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            _hang_up(oldest)


def _hang_up(fd: int) -> None:
    """End a connection of zmq's, which then closes it."""
    try:
        with socket.socket(fileno=os.dup(fd)) as twin:
            twin.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
