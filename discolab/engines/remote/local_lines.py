"""Lines within one machine: pairs of sockets that are made before a worker's process is forked.

Nobody else can connect to them, and they have no name that could be left behind. A message is one
datagram (SOCK_SEQPACKET): it arrives whole or not at all, so a signal in the middle of a send can't
tear it. Where the kernel's buffer is full, messages wait here and the reader thread sends them on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Any

from ...transport.frame import LARGEST, PORTABLE, Frame
from .lines import END, MESSAGE, TEXT, Event, Lines, Wire

HAVE_LOCAL_LINES = not PORTABLE and hasattr(socket, "SOCK_SEQPACKET") and hasattr(select, "epoll")
_ROOM = LARGEST + 8_192  # bytes to receive a message in
_BUFFER = 1 << 20  # bytes asked for in the kernel, for each direction
_LOOK_FOR = 100e-6  # seconds for which a worker looks for its next command before it sleeps
_FULL = (errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM)
_TEXT, _PROCESS = "text", "process"
_FD_ROOM = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a line; each end's messages stay whole and in order."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return pair


class _Line:
    """The controller's ends of one worker's sockets, and what waits to be sent on them."""

    def __init__(
        self, rank: int, cmd: socket.socket, ctl: socket.socket, text: int, process: int
    ) -> None:
        self.rank, self.cmd, self.ctl, self.text, self.process = rank, cmd, ctl, text, process
        self.waiting: dict[socket.socket, deque[Frame]] = {cmd: deque(), ctl: deque()}
        self.control_lock = threading.Lock()
        self.broken = False


class LocalLines(Lines):
    """See `Lines`. `add` before the reader thread starts."""

    segments = True

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._by_fd: dict[int, tuple[_Line, Any]] = {}
        self._poll = select.epoll()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._alarm, select.EPOLLIN)
        self._closed = False

    def add(
        self, rank: int, cmd: socket.socket, ctl: socket.socket, text: int, process: int = -1
    ) -> None:
        """Take over the controller's ends.

        Parameters
        ----------
        text
            The descriptor to which the worker's descriptors 1 and 2 lead.
        process
            A descriptor that is readable once the process has ended (`os.pidfd_open`): children
            that it has forked may hold the other end of its line open. -1 if there is none.
        """
        line = _Line(rank, cmd, ctl, text, process)
        cmd.setblocking(False)
        ctl.setblocking(False)
        os.set_blocking(text, False)
        self._lines[rank] = line
        for fd, what in ((cmd.fileno(), cmd), (ctl.fileno(), ctl), (text, _TEXT)):
            self._by_fd[fd] = line, what
        for fd in (cmd.fileno(), text):
            self._poll.register(fd, select.EPOLLIN)
        if process >= 0:
            self._by_fd[process] = line, _PROCESS
            self._poll.register(process, select.EPOLLIN)

    def __contains__(self, rank: int) -> bool:
        """Whether the descriptors of worker `rank` are these lines' to close."""
        return rank in self._lines

    def send(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        line = self._lines[rank]
        self._send(line, line.cmd, frame)

    def control(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        line = self._lines[rank]
        with line.control_lock:
            self._send(line, line.ctl, frame)

    def _send(self, line: _Line, end: socket.socket, frame: Frame) -> None:
        waiting = line.waiting[end]
        if line.broken:
            return
        # what waits is taken away only after it was sent: so nothing overtakes it
        if not waiting:
            try:
                send_frame(end, frame)
                return
            except BlockingIOError:
                pass
            except OSError as exc:
                if not is_full(exc):
                    return  # the reader thread sees the end of the line
        waiting.append(frame)
        self.wake()

    def receive(self, timeout: float) -> list[Event]:
        """See `Lines`."""
        events: list[Event] = []
        messages: list[tuple[_Line, bool]] = []
        for fd, what in self._poll.poll(timeout):
            if fd == self._alarm:
                self._drain_alarm()
                continue
            found = self._by_fd.get(fd)
            if found is None:
                continue
            line, end = found
            if end is _TEXT:  # first: it was written before the messages of the same moment
                self._read_text(line, events)
            elif end is _PROCESS:
                messages.append((line, True))
            else:
                if what & select.EPOLLOUT:
                    self._flush(line, end)
                if end is line.cmd and what & ~select.EPOLLOUT:
                    messages.append((line, False))
        for line, ended in messages:
            if not line.broken:
                self._read(line, events, ended)
        return events

    def _drain_alarm(self) -> None:
        try:
            os.eventfd_read(self._alarm)
        except BlockingIOError:
            pass
        for line in self._lines.values():
            for end, waiting in line.waiting.items():
                if waiting and not line.broken:
                    self._flush(line, end)

    def _flush(self, line: _Line, end: socket.socket) -> None:
        """Send what waits, as far as there is room; ask to be told of more."""
        waiting = line.waiting[end]
        mask = select.EPOLLIN if end is line.cmd else 0
        try:
            while waiting:
                send_frame(end, waiting[0])
                waiting.popleft()
        except OSError as exc:
            if not isinstance(exc, BlockingIOError) and not is_full(exc):
                waiting.clear()
            else:
                mask |= select.EPOLLOUT
        if line.broken:
            return
        try:
            self._poll.modify(end.fileno(), mask)
        except FileNotFoundError:
            if mask:
                self._poll.register(end.fileno(), mask)

    def _read(self, line: _Line, events: list[Event], ended: bool) -> None:
        """Take a message, the next one at the next poll; with `ended`, all, and then it is over."""
        while True:
            try:
                found = recv_frame(line.cmd)
            except BlockingIOError:
                if not ended:
                    return
                found = None
            except OSError:
                found = None
            if found is None:
                self._break(line)
                self._read_text(line, events)
                events.append(Event(END, line.rank))
                return
            events.append(Event(MESSAGE, line.rank, *found))
            if not ended:
                return

    def _read_text(self, line: _Line, events: list[Event]) -> None:
        if line.text < 0:
            return
        while True:
            try:
                data = os.read(line.text, 65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._forget(line.text)
                os.close(line.text)
                line.text = -1
                return
            events.append(Event(TEXT, line.rank, data))

    def _break(self, line: _Line) -> None:
        line.broken = True
        for end in (line.cmd, line.ctl):
            self._forget(end.fileno())
            line.waiting[end].clear()
        if line.process >= 0:
            self._forget(line.process)
            os.close(line.process)
            line.process = -1

    def _forget(self, fd: int) -> None:
        self._by_fd.pop(fd, None)
        try:
            self._poll.unregister(fd)
        except (FileNotFoundError, ValueError):
            pass

    def wake(self) -> None:
        """See `Lines`."""
        if not self._closed:
            try:
                os.eventfd_write(self._alarm, 1)
            except (BlockingIOError, OSError):
                pass

    def close(self) -> None:
        """See `Lines`."""
        if self._closed:
            return
        self._closed = True
        for line in self._lines.values():
            line.broken = True
            with line.control_lock:
                line.ctl.close()
            line.cmd.close()
            for fd in (line.text, line.process):
                if fd >= 0:
                    os.close(fd)
            line.text = line.process = -1
        self._poll.close()
        os.close(self._alarm)


class LocalWire(Wire):
    """See `Wire`."""

    segments = True

    def __init__(self, cmd: socket.socket, ctl: socket.socket) -> None:
        self._cmd, self._ctl = cmd, ctl
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(ctl.fileno(), select.POLLIN)
        self._poll.register(self._alarm, select.POLLIN)

    def recv_command(self) -> tuple[Any, int | None] | None:
        """See `Wire`. It looks for a moment before it sleeps: being woken takes longer."""
        until = time.perf_counter() + _LOOK_FOR
        try:
            while time.perf_counter() < until:
                try:
                    return recv_frame(self._cmd, _CLOEXEC | socket.MSG_DONTWAIT)
                except BlockingIOError:
                    os.sched_yield()
            return recv_frame(self._cmd)
        except OSError:
            return None

    def recv_control(self, timeout: float) -> tuple[Any, int | None] | None:
        """See `Wire`."""
        for fd, _ in self._poll.poll(max(0.0, timeout) * 1000):
            if fd == self._alarm:
                os.eventfd_read(self._alarm)
                continue
            try:
                found = recv_frame(self._ctl)
            except OSError:
                found = None
            if found is None:
                raise EOFError("the controller is gone")
            return found
        return None

    def send(self, frame: Frame) -> None:
        """See `Wire`."""
        try:
            send_frame(self._cmd, frame)
        except OSError as exc:
            raise EOFError("the controller is gone") from exc

    def wake(self) -> None:
        """See `Wire`."""
        os.eventfd_write(self._alarm, 1)

    def close(self) -> None:
        """See `Wire`."""
        self._cmd.close()
        self._ctl.close()


# One that never blocks is called with Python's lock held: who lets go of it between the sends to
# several workers waits each time for a thread that takes it.
_send_now = ctypes.PyDLL(None, use_errno=True).send
_send_now.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send_now.restype = ctypes.c_ssize_t


def send_frame(end: socket.socket, frame: Frame) -> None:
    """Send a message whole or not at all; raises an `OSError` where it can't."""
    data = frame.data
    if frame.buffer is not None:
        socket.send_fds(end, [data], [frame.buffer.fd])
    elif end.gettimeout() != 0:  # a worker's end, which waits until there is room
        end.send(data)
    elif _send_now(end.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def recv_frame(end: socket.socket, flags: int = _CLOEXEC) -> tuple[bytes, int | None] | None:
    """A message and the descriptor that came with it; None at the end of the line."""
    data, ancillary, _, _ = end.recvmsg(_ROOM, _FD_ROOM, flags)
    if not ancillary:
        return (data, None) if data else None
    return data, int.from_bytes(ancillary[0][2][:4], "little")


def is_full(exc: OSError) -> bool:
    """Whether a send failed for want of room: too many messages or descriptors on their way."""
    return exc.errno in _FULL
