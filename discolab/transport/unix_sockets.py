"""Connections within one machine: unix sockets, and memory that is shared.

A frame is one datagram (SOCK_SEQPACKET): it arrives whole or not at all, so a signal in the middle
of a send can't tear it. What is large in it travels as a descriptor of shared memory. Where the
system has no such sockets (`loop.PORTABLE`), streams are used, and only one thread sends.

Two processes get connected as a pair of sockets that both inherit, or by an address that one of
them listens at: a random name that no file has, where there are such names.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..runtime.interrupts import shield
from . import handshake
from .connection import Arrived, Connection, Port
from .frame import KEEP_FREE, LARGEST, BufferPool, Frame, pack, reload, unload
from .handshake import Unauthenticated
from .loop import PORTABLE, READ, WRITE, EventLoop

HAVE_LOCAL = hasattr(socket, "AF_UNIX") and hasattr(os, "fork")
MOST_UNAUTHENTICATED = 64  # connections that have not said which process they are from
MOST_HELD = 64  # shared buffers that wait to be sent to one peer; more wait as plain bytes
MOST_LENT = 256  # buffers that peers may hold, a descriptor each; of more they take copies
MOST_FREED = 1000  # numbers of buffers in one message
MOST_FDS = 8  # with one message
_ROOM = LARGEST + 8_192  # bytes to receive a message in
_BUFFER = 1 << 20  # bytes asked for in the kernel, for each direction
_BACKLOG = 1024
_AT_ONCE = 64  # messages taken from one connection before the others have their turn
_DRAIN = 1.0  # seconds that taking what a dead process has said may last
_SOON = 0.005  # seconds until what can't be waited for is tried again
_FULL = (errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM, errno.EMFILE)
_FD_ROOM = socket.CMSG_SPACE(4 * MOST_FDS) if HAVE_LOCAL else 0
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_STREAM_HEAD = struct.Struct("<IB")  # bytes of a message, descriptors with it
_KIND = getattr(socket, "SOCK_SEQPACKET", 0) if not PORTABLE else socket.SOCK_STREAM

Received = tuple[bytes, Sequence[int]]  # a message, and the descriptors that came with it


# -- sockets ---------------------------------------------------------------------------------


class LocalSocket(ABC):
    """A socket on which messages stay whole and in order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self.fileno = sock.fileno
        self.close = sock.close

    @abstractmethod
    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message whole or not at all; raises an `OSError` where it can't."""

    @abstractmethod
    def recv(self, wait: bool = True, most: int = _ROOM) -> Received | None:
        """The next message; None at the end of the connection.

        Raises
        ------
        BlockingIOError
            Without `wait`, if there is none.
        OSError
            If the connection has failed, or a message is longer than `most`.
        """

    @abstractmethod
    def flush(self) -> None:
        """Send what is left of a message; raises `BlockingIOError` if that must wait."""


# One that never blocks is called with Python's lock held: a thread that lets go of it between the
# sends to several workers waits each time for another that takes it.
_send_now = ctypes.PyDLL(None, use_errno=True).send
_send_now.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send_now.restype = ctypes.c_ssize_t
_NOW = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0) if HAVE_LOCAL else 0


class PacketSocket(LocalSocket):
    """Each message is one datagram."""

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        sock = self.sock
        if fds:
            socket.send_fds(sock, [data], fds)
        elif sock.gettimeout() != 0:  # a worker's end, which waits until there is room
            sock.send(data)
        elif _send_now(sock.fileno(), data, len(data), _NOW) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def flush(self) -> None:
        """See `LocalSocket`: nothing ever is left."""

    def recv(self, wait: bool = True, most: int = _ROOM) -> Received | None:
        flags = _CLOEXEC if wait else _CLOEXEC | socket.MSG_DONTWAIT
        data, ancillary, state, _ = self.sock.recvmsg(most, _FD_ROOM, flags)
        fds = _descriptors(ancillary) if ancillary else ()
        if state & socket.MSG_TRUNC:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMSGSIZE, "a message is longer than it may be")
        return (data, fds) if data else None


class StreamSocket(LocalSocket):
    """Each message has its size before it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._out = memoryview(b"")  # what is left of a message
        self._in = bytearray()
        self._fds: list[int] = []

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        self._until_possible(select.POLLOUT, self.flush)
        whole = memoryview(_STREAM_HEAD.pack(len(data), len(fds)) + data)
        self._until_possible(select.POLLOUT, partial(self._begin, whole, fds))
        if self.sock.gettimeout() != 0:
            self._until_possible(select.POLLOUT, self.flush)

    def _begin(self, whole: memoryview, fds: Sequence[int]) -> None:
        with shield():
            if fds:
                sent = socket.send_fds(self.sock, [whole], fds, socket.MSG_DONTWAIT)
            else:
                sent = self.sock.send(whole, socket.MSG_DONTWAIT)
            self._out = whole[sent:]

    def flush(self) -> None:
        while self._out:
            with shield():
                self._out = self._out[self.sock.send(self._out, socket.MSG_DONTWAIT) :]

    def recv(self, wait: bool = True, most: int = _ROOM) -> Received | None:
        part = partial(self._receive, most)
        return self._until_possible(select.POLLIN, part) if wait else part()

    def _receive(self, most: int) -> Received | None:
        """Never more than one message: the descriptor is readable while there is another one."""
        while True:
            have, size = len(self._in), 0
            if have >= _STREAM_HEAD.size:
                size, count = _STREAM_HEAD.unpack_from(self._in)
                if size > most:
                    raise OSError(errno.EMSGSIZE, "a message is longer than it may be")
                if have == _STREAM_HEAD.size + size:
                    message = bytes(self._in[_STREAM_HEAD.size :]), self._fds[:count]
                    self._in, self._fds = bytearray(), self._fds[count:]
                    return message
            with shield():
                data, ancillary, _, _ = self.sock.recvmsg(
                    _STREAM_HEAD.size + size - have, _FD_ROOM, _CLOEXEC | socket.MSG_DONTWAIT
                )
                self._in += data
                self._fds += _descriptors(ancillary)
            if not data:
                return None

    def _until_possible(self, what: int, action: Callable[[], Any]) -> Any:
        """Do something as often as it takes; on a socket that does not block, once."""
        timeout = self.sock.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return action()
            except BlockingIOError:
                if timeout == 0:
                    raise
            left = None if deadline is None else 1000 * (deadline - time.monotonic())
            poll = select.poll()
            poll.register(self.sock, what)
            if (left is not None and left <= 0) or not poll.poll(left):
                raise TimeoutError


def _descriptors(ancillary: Any) -> list[int]:
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
    if not _CLOEXEC:
        for fd in fds:
            os.set_inheritable(fd, False)
    return fds


def local_socket(sock: socket.socket | int) -> LocalSocket:
    """A socket, or its descriptor, as one for messages."""
    if isinstance(sock, int):
        sock = socket.socket(fileno=sock)
    return (StreamSocket if sock.type == socket.SOCK_STREAM else PacketSocket)(sock)


def socket_pair() -> tuple[LocalSocket, LocalSocket]:
    """Two ends of a connection that nobody else can connect to."""
    one, other = socket.socketpair(socket.AF_UNIX, _KIND)
    return local_socket(one), local_socket(other)


# -- connections -----------------------------------------------------------------------------


class LocalConnection(Connection):
    """One end, of which an event loop takes care: nothing blocks, what has no room waits.

    `send` is for one thread at a time, all else for the loop's.

    Parameters
    ----------
    connect
        Gives the socket; called by the loop, once there is something to send.
    ready
        Called when there is something to receive, or the end.

    Attributes
    ----------
    pool
        Shared buffers for this peer.
    """

    same_machine = True

    def __init__(
        self,
        loop: EventLoop,
        sock: LocalSocket | None = None,
        ready: Callable[[], object] | None = None,
        connect: Callable[[], LocalSocket] | None = None,
    ) -> None:
        self.pool = BufferPool()
        self.closed = False
        self._loop, self._ready, self._connect = loop, ready, connect
        self._sock: LocalSocket | None = None
        self._mask = 0
        self._waiting: deque[Frame | tuple[bytes, bytes]] = deque()  # the latter: see `unload`
        self._held = [0, 0]  # buffers that have come to wait (the sender's), and gone (the loop's)
        self._due = False  # whether `flush` will be called
        if sock is not None:
            self._adopt(sock)

    def _adopt(self, sock: LocalSocket) -> None:
        sock.sock.setblocking(False)
        self._sock = sock
        self._want(READ if self._ready is not None else 0)

    def send(self, frame: Frame) -> None:
        """See `Connection`. One that is broken swallows it."""
        if self.closed:
            return
        sock = self._sock
        # what waits is taken away only after it was sent: so nothing overtakes it
        if sock is not None and not self._waiting and not PORTABLE:
            try:
                sock.send(frame.data, () if frame.buffer is None else (frame.buffer.fd,))
                return
            except OSError as exc:
                if not _try_later(exc):
                    return  # the loop sees the end of it
        if frame.buffer is None:
            self._waiting.append(frame)
        elif self._held[0] - self._held[1] < MOST_HELD:
            self._held[0] += 1
            self._waiting.append(frame)
        else:  # many descriptors are open for this already
            self._waiting.append(unload(frame))
            self.pool.free(frame.buffer.number)
        if not self._due:
            self._due = True
            self._loop.soon(self.flush)

    def discard(self, frame: Frame) -> None:
        if frame.buffer is not None and frame.buffer.number:
            self.pool.free(frame.buffer.number)

    def flush(self) -> None:
        """Send what waits, as far as there is room, and have the rest sent when there is more."""
        waiting = self._waiting
        self._due = False
        if self.closed:
            return
        later = 0
        try:
            if self._sock is None:
                assert self._connect is not None
                self._adopt(self._connect())
            assert self._sock is not None
            while waiting:
                frame = waiting[0]
                if not isinstance(frame, Frame):
                    waiting[0] = frame = reload(*frame)
                    self._held[1] -= 1
                self._sock.send(frame.data, () if frame.buffer is None else (frame.buffer.fd,))
                waiting.popleft()
                if frame.buffer is not None:
                    self._held[1] += 1
            self._sock.flush()
        except BlockingIOError:
            self._due = True
            if self._sock is None:  # many connect to it
                self._loop.later(_SOON, self.flush)
            later = WRITE
        except OSError as exc:
            if not _try_later(exc):
                waiting.clear()
                if self._sock is None:
                    self.closed = True
                return
            self._due = True
            self._loop.later(_SOON, self.flush)
        if self._sock is not None:
            self._want((READ if self._ready is not None else 0) | later)

    def receive(self) -> tuple[bytes, int | None] | None:
        """The next message and its shared buffer's descriptor; None at the end.

        Raises
        ------
        BlockingIOError
            If there is none now.
        """
        assert self._sock is not None
        try:
            received = self._sock.recv(wait=False)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if received is None:
            return None
        data, fds = received
        return data, fds[0] if fds else None

    def _want(self, mask: int) -> None:
        if mask != self._mask:
            assert self._sock is not None
            fd, before = self._sock.fileno(), self._mask
            self._mask = mask
            if not mask:
                self._loop.forget(fd)
            elif before:
                self._loop.change(fd, mask)
            else:
                self._loop.watch(fd, self._look, mask)

    def _look(self, mask: int) -> None:
        if mask & ~READ:
            self.flush()
        if mask & ~WRITE and self._ready is not None:
            self._ready()

    def stop(self) -> None:
        """Send and receive no more; the socket stays open for a thread that may be using it."""
        self.closed = True
        self._ready = None
        self._waiting.clear()
        if self._sock is not None:
            self._want(0)

    def close(self) -> None:
        self.stop()
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        self.pool = BufferPool()


def _try_later(exc: OSError) -> bool:
    """Whether something failed for want of room: too many messages or descriptors on their way."""
    return isinstance(exc, BlockingIOError) or exc.errno in _FULL


# -- ports -----------------------------------------------------------------------------------


class LocalPort(Port):
    """A unix socket at which processes of the same user connect that know the token.

    Back on a connection come the numbers of shared buffers that can be used again.

    Parameters
    ----------
    me, count
        The number of this process, and how many there are at a time.
    """

    def __init__(
        self, loop: EventLoop, me: int, count: int, token: bytes, arrived: Arrived
    ) -> None:
        self._loop, self._me, self._count, self._token = loop, me, count, token
        self._own_token = handshake.token_for(token, me)
        self._arrived = arrived
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: list[_Outgoing] = []
        self.unauthenticated: Unauthenticated[LocalSocket] = Unauthenticated(
            MOST_UNAUTHENTICATED, self._drop
        )
        self._folder = ""
        if PORTABLE:
            self._folder = tempfile.mkdtemp(prefix="discolab-")  # for this user alone
            self.address = os.path.join(self._folder, "socket")
        else:
            self.address = f"\0discolab-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, _KIND)
        self._listener.setblocking(False)
        self._listener.bind(self.address)
        self._listener.listen(_BACKLOG)
        loop.watch(self._listener.fileno(), self._accept)
        self._tidy()

    def connect(self, address: str, node: int) -> Connection:
        token = handshake.token_for(self._token, node)
        open_socket = partial(connect, address, token, self._me)
        made = _Outgoing(self._loop, open_socket, max(4, MOST_LENT // self._count))
        self._outgoing.append(made)
        return made

    def _tidy(self) -> None:
        self._outgoing = [connection for connection in self._outgoing if not connection.closed]
        for connection in self._outgoing:
            connection.pool.tidy()
        self._loop.later(KEEP_FREE, self._tidy)

    def _accept(self, _mask: int = READ) -> None:
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
            if not _is_same_user(sock):
                sock.close()
                continue
            connected = local_socket(sock)
            self._loop.watch(sock.fileno(), partial(self._greet, connected))
            self._loop.later(handshake.WITHIN, partial(self._hang_up, connected))
            self.unauthenticated.add(connected)

    def _greet(self, connected: LocalSocket, _mask: int = READ) -> None:
        """Read the first message on a connection."""
        if connected not in self.unauthenticated:
            return
        try:
            received = connected.recv(wait=False, most=handshake.SIZE)
        except BlockingIOError:
            return
        except OSError:
            received = None
        for fd in received[1] if received else ():
            os.close(fd)
        hello = handshake.hear_hello(received[0], self._own_token) if received else None
        sender = -1 if hello is None else hello.rank
        if sender < 0 or sender in self._incoming:
            self._hang_up(connected)
            return
        self.unauthenticated.remove(connected)
        self._loop.forget(connected.fileno())
        self._incoming[sender] = _Incoming(self._loop, connected, sender, self._arrived)

    def _hang_up(self, connected: LocalSocket) -> None:
        if self.unauthenticated.remove(connected):
            self._drop(connected)

    def _drop(self, connected: LocalSocket) -> None:
        self._loop.forget(connected.fileno())
        connected.close()

    def drain(self, sender: int, since: float) -> bool:
        """See `Port`. All that a dead process has sent is here already."""
        self._accept()
        for connected in self.unauthenticated.all():
            self._greet(connected)
        incoming = self._incoming.get(sender)
        if incoming is None:
            return True
        if time.monotonic() < since + _DRAIN and incoming.take():
            return False
        incoming.close()
        return True

    def close(self) -> None:
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for connected in self.unauthenticated.all():
            self._hang_up(connected)
        for incoming in self._incoming.values():
            incoming.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """Close all in a process that was forked from the port's; the loop is closed there."""
        self._folder = ""
        for connection in self._outgoing:
            connection.close()
        self.close()


def connect(address: str, token: bytes, me: int) -> LocalSocket:
    """Connect to a process that listens, and say which process this is.

    Raises
    ------
    OSError
        If nobody listens there, or not one of this user; a `BlockingIOError` if many connect to it.
    """
    sock = socket.socket(socket.AF_UNIX, _KIND)
    try:
        sock.setblocking(False)
        sock.connect(address)
        if not _is_same_user(sock):
            raise OSError(errno.EACCES, "another user listens there")
        made = local_socket(sock)
        made.send(handshake.say_hello(token, me))
    except OSError:
        sock.close()
        raise
    return made


def _is_same_user(sock: socket.socket) -> bool:
    """Whether the other process is of this user; elsewhere a private folder sees to it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


class _Outgoing(LocalConnection):
    """A connection on which this process sends."""

    def __init__(self, loop: EventLoop, connect: Callable[[], LocalSocket], most_lent: int) -> None:
        super().__init__(loop, ready=self._take_back, connect=connect)
        self._most_lent = most_lent

    def pack(self, body: bytes, parts: Sequence[Any]) -> Frame:
        return pack(body, parts, True, self.pool if self.pool.lent < self._most_lent else None)

    def _take_back(self) -> None:
        """Buffers can be used again, or the peer has gone."""
        while not self.closed:
            try:
                said = self.receive()
            except BlockingIOError:
                return
            if said is None:
                self.stop()
                return
            for (number,) in struct.iter_unpack("<H", said[0][: len(said[0]) // 2 * 2]):
                self.pool.free(number)


class _Incoming(LocalConnection):
    """A connection on which another process sends."""

    def __init__(self, loop: EventLoop, sock: LocalSocket, sender: int, arrived: Arrived) -> None:
        self._sender, self._arrived = sender, arrived
        self._dropped = partial(_dropped, deque(), loop, weakref.ref(self))
        super().__init__(loop, sock, self.take)

    def take(self) -> bool:
        """Take some frames; whether there may be more."""
        for _ in range(_AT_ONCE):
            if self.closed:
                return False
            try:
                received = self.receive()
            except BlockingIOError:
                return False
            if received is None:
                self.close()
                return False
            self._arrived(self._sender, *received, self._dropped)
        return True


def _dropped(
    freed: deque[int], loop: EventLoop, connection: weakref.ref[_Incoming], number: int
) -> None:
    """Nothing of a buffer is held here any more; in a finalizer."""
    freed.append(number)
    loop.soon(partial(_give_back, freed, connection))


def _give_back(freed: deque[int], connection: weakref.ref[_Incoming]) -> None:
    """Say that buffers can be used again."""
    sender = connection()
    while freed and sender is not None:
        some = [freed.popleft() for _ in range(min(len(freed), MOST_FREED))]
        sender.send(Frame(struct.pack(f"<{len(some)}H", *some)))
