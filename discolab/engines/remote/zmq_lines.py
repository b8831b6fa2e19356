"""Lines to workers in other processes and on other machines: one port, on zmq.

Who connects must have the key file (`Keys`), and then say what he is: a node, or one of the three
connections of a worker that a node was told to start (it knows the session's token). A connection
that breaks is never taken up again: what was on its way is lost with it, so its worker is lost.

The ROUTER socket is used by all threads under `_lock`, a leaf among locks; the reader thread waits
for it outside of the lock. Everything else here is the reader thread's own, but for `_wires` and
`_early`, which change under `_lock` too.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from ...runtime.errors import DiscoError
from ...transport.frame import Frame
from ...transport.loop import Wakeup
from ..nodes.keys import Keys
from .lines import END, JOINED, MESSAGE, TEXT, Event, Lines
from .zmq_door import Door
from .zmq_parts import (
    CMD,
    CTL,
    JOIN,
    LINGER,
    MAGIC,
    OUT,
    PIECE,
    Joiner,
    milliseconds,
    pieces,
    set_options,
    why_not_bound,
)

_MOST_AT_ONCE = 64  # messages received before a sender may have its turn
_PATIENCE = 1.0  # seconds that what became of a worker's process may take to be known
_SOON = 0.02  # seconds between two looks whether it is
_NODE = 3  # a connection that is a node's, beside CMD, CTL, OUT

Where = tuple[int, int] | bytes  # (rank, CMD or CTL), or a node


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
        What a worker must know to be taken in, 16 bytes.
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

    segments = False

    def __init__(self, endpoint: str, keys: Keys) -> None:
        self.token = secrets.token_bytes(16)
        self.heard: dict[int, float] = {}
        self.on_close: Callable[[], None] = lambda: None
        self.settled: Callable[[int], bool] = lambda rank: True
        self._lock = threading.Lock()
        self._holder = 0  # the thread that has the lock
        self._half = False  # whether a send may have been torn between two frames
        self._later: deque[tuple[Where, Any]] = deque()  # what finalizers send in between
        self._wires: dict[tuple[int, int], bytes] = {}  # (rank, CMD, CTL or OUT) -> connection
        self._early: dict[tuple[int, int], list[Any]] = {}  # sent before the connection is there
        self._peers: dict[bytes, tuple[int, int, Joiner]] = {}  # connection -> (what for, rank)
        self._broken: dict[int, float] = {}  # ranks whose END is due, and until when it may wait
        self._ended: set[int] = set()
        self._texts: dict[int, int] = {}  # rank -> the pipe to which its descriptors 1, 2 lead
        self._watched: dict[int, Callable[[], None]] = {}
        self._more = self._closed = False
        self._alarm = Wakeup()
        self._poll = select.poll()
        self._context = zmq.Context()
        try:
            self._door = Door(self._context, keys)
            self._router = self._context.socket(zmq.ROUTER)
            self._state: Callable[[int], Any] = self._router.getsockopt
            set_options(self._router, endpoint, keys, server=True)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.BACKLOG, 1024)
            fds = self._door.watch(self._router)
            for fd in (self._router.fileno(), self._alarm.fd, *fds):
                self._poll.register(fd, select.POLLIN)
            self._doorbell = fds[0]
            self._router.bind(endpoint)
            self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as exc:
            self.close()
            raise DiscoError(why_not_bound(endpoint, exc)) from None

    # -- sending -----------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        self._send((rank, CMD), frame.data)

    def control(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        self._send((rank, CTL), frame.data)

    def tell_node(self, node: bytes, message: dict[str, Any]) -> None:
        """Say something to a node; any thread."""
        self._send(node, json.dumps(message).encode())

    def _send(self, where: Where, data: Any) -> None:
        me = threading.get_ident()
        if self._holder == me:  # a finalizer, in the middle of a send or receive of this thread
            self._later.append((where, data))
            return
        with self._lock:
            self._holder = me
            try:
                self._send_now(where, data)
                self._send_late()
                pending = not self._closed and self._state(zmq.EVENTS) & zmq.POLLIN
            finally:
                self._holder = 0
        if pending:  # sending has taken the sign of it from the descriptor
            self._alarm.ring()

    def _send_late(self) -> None:
        while self._later:
            self._send_now(*self._later.popleft())

    def _send_now(self, where: Where, data: Any) -> None:
        """Under the lock. Ctrl-C may tear what is sent, but nothing that comes after."""
        peer = where if type(where) is bytes else self._wires.get(where)  # type: ignore[arg-type]
        if self._closed:
            return
        if peer is None:
            assert type(where) is tuple
            if where[0] not in self._ended:
                self._early.setdefault(where, []).append(data)
            return
        router = self._router
        try:
            if self._half:
                router.send(b"", zmq.NOBLOCK)  # ends it; ignored where nothing was torn
            self._half = True
            if len(data) <= PIECE:
                router.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
                router.send(data, zmq.NOBLOCK)
            else:
                for mark, piece in pieces(data):
                    router.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
                    router.send(mark, zmq.NOBLOCK | zmq.SNDMORE)
                    router.send(piece, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            if exc.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            # the connection is gone: the door knows it too
        self._half = False

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[Event]:
        """See `Lines`."""
        pause = 0.0 if self._more else min(timeout, _SOON) if self._broken else timeout
        for fd, _ in self._poll.poll(milliseconds(pause)):
            if fd == self._alarm.fd:
                self._alarm.clear()
            elif fd == self._doorbell:
                self._door.answer()
            elif fd in self._watched:
                self._watched[fd]()
        gone = self._door.gone()  # before what they said: after it, all of that is there
        events: list[Event] = []
        self._take(events)
        while gone and self._more:
            self._take(events)
        for who in gone:
            self._part(who, events)
        if self._texts:
            events = self._with_texts(events)
        if self._broken:
            self._end_broken(events)
        return events

    def _take(self, events: list[Event]) -> None:
        """Receive some messages; `_more`: there may be others."""
        router, state = self._router, self._state
        with self._lock:
            self._holder = threading.get_ident()
            try:
                self._more = True
                for _ in range(_MOST_AT_ONCE):
                    if not state(zmq.EVENTS) & zmq.POLLIN:
                        self._more = False
                        break
                    who = router.recv()
                    frame = router.recv(copy=False)
                    peer = self._peers.get(who)
                    if peer is None:
                        self._greet(who, frame, Joiner().take(router, frame), events)
                        continue
                    kind, rank, joiner = peer
                    data = joiner.take(router, frame)
                    if kind == _NODE:
                        _say_of_node(who, data, events)
                    elif kind == OUT and rank not in self._ended:
                        self.heard[rank] = time.monotonic()
                        if data is not None:
                            events.append(Event(MESSAGE, rank, data))
                self._send_late()
            finally:
                self._holder = 0

    def _greet(self, who: bytes, frame: zmq.Frame, data: Any, events: list[Event]) -> None:
        """The first message on a connection; what is of no use is as if it had not come."""
        if data is None:
            return
        if bytes(data[:4]) != MAGIC:
            if _say_of_node(who, data, events):
                self._peers[who] = _NODE, -1, Joiner()
                self._door.knows(who, frame)
            return
        if len(data) != JOIN.size:
            return
        _, token, rank, kind = JOIN.unpack(data)
        known = (rank, kind) in self._wires or rank in self._broken or rank in self._ended
        if known or kind not in (CMD, CTL, OUT) or not secrets.compare_digest(token, self.token):
            return
        self._peers[who] = kind, rank, Joiner()
        self._wires[rank, kind] = who
        self._door.knows(who, frame)
        self._send_now(who, b"")
        for early in self._early.pop((rank, kind), ()):
            self._send_now(who, early)

    def _part(self, who: bytes, events: list[Event]) -> None:
        """A connection has ended."""
        kind, rank, _ = self._peers.pop(who)
        if kind == _NODE:
            events.append(Event(JOINED, -1, (who, None)))
        else:
            self.end(rank)

    def end(self, rank: int) -> None:
        """A worker is lost, whatever its connections say; any thread."""
        if rank not in self._ended:
            self._broken.setdefault(rank, time.monotonic() + _PATIENCE)
            self._alarm.ring()

    def _end_broken(self, events: list[Event]) -> None:
        for rank, until in tuple(self._broken.items()):
            if time.monotonic() > until or self.settled(rank):
                del self._broken[rank]
                self._ended.add(rank)
                events += self._read_text(rank)
                events.append(Event(END, rank))

    # -- what else the reader thread looks at ------------------------------------------------------

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Take over `fd`, and have `ready` called on the reader thread while it is readable."""
        self._watched[fd] = ready
        self._poll.register(fd, select.POLLIN)
        self._alarm.ring()

    def unwatch(self, fd: int) -> None:
        """No more; on the reader thread."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)
            os.close(fd)

    def watch_text(self, rank: int, fd: int) -> None:
        """Take over the pipe to which a worker's descriptors 1 and 2 lead."""
        os.set_blocking(fd, False)
        self._texts[rank] = fd
        self._poll.register(fd, select.POLLIN)
        self._alarm.ring()

    def _with_texts(self, events: list[Event]) -> list[Event]:
        """What was written before a message comes before it."""
        found = [text for rank in tuple(self._texts) for text in self._read_text(rank)]
        return found + events if found else events

    def _read_text(self, rank: int) -> list[Event]:
        fd = self._texts.get(rank, -1)
        found: list[Event] = []
        while fd >= 0:
            try:
                data = os.read(fd, 65_536)
            except BlockingIOError:
                break
            if not data:
                self._poll.unregister(fd)
                os.close(self._texts.pop(rank))
                break
            found.append(Event(TEXT, rank, data))
        return found

    def wake(self) -> None:
        """See `Lines`."""
        self._alarm.ring()

    def close(self) -> None:
        """See `Lines`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._context.destroy(LINGER)
        self.on_close()
        self._alarm.close()
        for fd in (*self._texts.values(), *self._watched):
            os.close(fd)
        self._texts.clear()
        self._watched.clear()


def _say_of_node(who: bytes, data: Any, events: list[Event]) -> bool:
    """What a node says, as an event; false if it is none."""
    try:
        message = dict(json.loads(bytes(data)))
    except (TypeError, ValueError):
        return False
    events.append(Event(JOINED, -1, (who, message)))
    return True
