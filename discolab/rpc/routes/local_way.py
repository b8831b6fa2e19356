"""A node's way to another one of its machine: the connection, and what waits to be sent on it.

A peer's lock guards its `LocalWay`; segments come back on the receiving thread.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

from ...engines.remote.local_lines import is_full, send_frame
from ...runtime.protocol import Message
from ...transport.frame import BufferPool, Frame, pack, reload, unload
from .ways import Way

if TYPE_CHECKING:
    from .local import LocalEnd

MOST_HELD = 64  # segments that wait to be sent to one peer; what is more waits without
MOST_FREED = 1000  # numbers of segments in one message
HELLO = struct.Struct("<4s32sI")  # magic and version, the token, which node
MAGIC = b"DLR\x01"
IN, OUT = 1, 4  # as select has them where there are such sockets
_ROOM = 1 << 20  # bytes asked for in the kernel
_CREDENTIALS = struct.Struct("3i")  # process, user, group

_Held = Frame | tuple[bytes, bytes]  # the latter: see `unload`


class LocalWay(Way):
    """The connection to a peer, made when there is something to say."""

    same_machine = True

    def __init__(self, end: LocalEnd, node: int, name: str) -> None:
        self.pool = BufferPool()
        self._end, self._node, self._name = end, node, name
        self._lock = end.station.locked(node)
        self._sock: socket.socket | None = None
        self._waiting: deque[_Held] = deque()
        self._held = 0  # segments among them
        self._broken = False

    def pack(self, message: Message) -> Frame:
        """See `Way`."""
        pool = self.pool if self.pool.lent < self._end.most_lent else None
        return pack(message.body, message.frames, True, pool)

    def discard(self, frame: Frame) -> None:
        """See `Way`."""
        if frame.buffer is not None and frame.buffer.number:
            self.pool.free(frame.buffer.number)

    def send(self, frame: Frame) -> None:
        """See `Way`."""
        if self._broken:
            return
        sock = self._sock
        if sock is not None and not self._waiting:
            try:
                send_frame(sock, frame)
                return
            except OSError as exc:
                if not _try_later(exc):
                    return  # the receiving thread sees the end of it
        self._hold(frame)
        if sock is None:
            self._connect()
        elif len(self._waiting) == 1:
            self._flush()

    def _hold(self, frame: Frame) -> None:
        """Let it wait; as plain bytes if many descriptors are open for this already."""
        if frame.buffer is None:
            self._waiting.append(frame)
        elif self._held < MOST_HELD:
            self._held += 1
            self._waiting.append(frame)
        else:
            self._waiting.append(unload(frame))
            self.discard(frame)

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
            sock.connect(f"\0{self._name}")
            if not same_user(sock):
                raise OSError(errno.EACCES, "somebody else listens there")
            sock.send(HELLO.pack(MAGIC, self._end.token, self._end.node))
        except OSError as exc:
            sock.close()
            if _try_later(exc):  # many want to connect to it
                self._try_again_soon()
            else:
                self._break()  # it has gone, and the service will say so
            return
        self._sock = sock
        self._end.station.loop.watch(sock.fileno(), self._ready, IN)
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as there is room; have the rest sent when there is more."""
        sock = self._sock
        assert sock is not None
        mask = IN
        try:
            while self._waiting:
                held = self._waiting[0]
                frame = held if isinstance(held, Frame) else reload(*held)
                send_frame(sock, frame)
                self._waiting.popleft()  # not before: what comes meanwhile does not overtake it
                if held is frame and frame.buffer is not None:
                    self._held -= 1
        except BlockingIOError:
            mask |= OUT
        except OSError as exc:
            if not _try_later(exc):
                self._break()
                return
            self._try_again_soon()  # too many descriptors on their way, or no memory
        self._end.station.loop.change(sock.fileno(), mask)

    def _try_again_soon(self) -> None:
        if self not in self._end.again:
            self._end.again.append(self)
            self._end.station.loop.wake()

    def try_again(self) -> None:
        """What could not be done before; on the receiving thread."""
        with self._lock:
            if self._broken:
                return
            if self._sock is None:
                self._connect()
            else:
                self._flush()

    def _ready(self, mask: int) -> None:
        if mask & OUT:
            with self._lock:
                if self._sock is not None and not self._broken:
                    self._flush()
        if mask & ~OUT:
            self._take_back()

    def _take_back(self) -> None:
        """Segments can be used again, or the peer has gone."""
        while self._sock is not None:
            try:
                said = self._sock.recv(2 * MOST_FREED)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            if not said:
                with self._lock:
                    self.close()
                return
            for number in struct.unpack(f"<{len(said) // 2}H", said[: len(said) // 2 * 2]):
                self.pool.free(number)

    def _break(self) -> None:
        """Nothing can be sent any more. The receiving thread closes the socket."""
        self._broken = True
        self._waiting.clear()

    def close(self) -> None:
        """See `Way`."""
        self._break()
        sock, self._sock = self._sock, None
        if sock is not None:
            self._end.station.loop.forget(sock.fileno())
            sock.close()
        self.pool = BufferPool()


def _try_later(exc: OSError) -> bool:
    return isinstance(exc, BlockingIOError) or is_full(exc) or exc.errno == errno.EMFILE


def same_user(sock: socket.socket) -> bool:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
