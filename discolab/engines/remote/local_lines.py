"""Lines within one machine: pairs of sockets that are made before a worker's process is forked.

Nobody else can connect to them, and they have no name that could be left behind. Each line is two
connections (transport/local.py): commands and all that the worker says, and control messages.
"""

from __future__ import annotations

import os
import select
import threading
import time
from functools import partial
from typing import Any

from ...transport.frame import Frame
from ...transport.local import LocalConnection, LocalSocket
from ...transport.loop import Wakeup
from .lines import END, MESSAGE, Event, Lines, Wire

_LOOK_FOR = 100e-6  # seconds for which a worker looks for its next command before it sleeps
_yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))


class _Line:
    """The controller's ends of one worker's connections."""

    def __init__(self, rank: int, cmd: LocalConnection, ctl: LocalConnection, process: int) -> None:
        self.rank, self.cmd, self.ctl, self.process = rank, cmd, ctl, process
        self.control_lock = threading.Lock()
        self.broken = False


class LocalLines(Lines):
    """See `Lines`. `add` before the reader thread starts."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, _Line] = {}
        self._spoken: list[tuple[_Line, bool]] = []  # something has come; whether it has ended
        self._closed = False

    def add(
        self, rank: int, cmd: LocalSocket, ctl: LocalSocket, text: int, process: int = -1
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
        spoken = self._spoken.append
        commands = LocalConnection(self._loop, cmd, lambda: spoken((line, False)))
        line = _Line(rank, commands, LocalConnection(self._loop, ctl), process)
        self._lines[rank] = line
        self.watch_text(rank, text)
        if process >= 0:
            self._loop.watch(process, lambda _: spoken((line, True)))

    def __contains__(self, rank: int) -> bool:
        """Whether the descriptors of worker `rank` are these lines' to close."""
        return rank in self._lines

    def send(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        self._lines[rank].cmd.send(frame)

    def control(self, rank: int, frame: Frame) -> None:
        """See `Lines`."""
        line = self._lines[rank]
        with line.control_lock:
            line.ctl.send(frame)

    def receive(self, timeout: float) -> list[Event]:
        """See `Lines`. What was written comes before the messages of the same moment."""
        self._loop.turn(timeout)
        if self._spoken:
            spoken = self._spoken[:]
            self._spoken.clear()
            for line, ended in spoken:
                if not line.broken:
                    self._read(line, ended)
        events, self._events = self._events, []
        return events

    def _read(self, line: _Line, ended: bool) -> None:
        """Take a message, the next one at the next turn; with `ended`, all, and then it is over."""
        while True:
            try:
                found = line.cmd.receive()
            except BlockingIOError:
                if not ended:
                    return
                found = None
            if found is None:
                self._break(line)
                self._read_text(line.rank)
                self._events.append(Event(END, line.rank))
                return
            self._events.append(Event(MESSAGE, line.rank, *found))
            if not ended:
                return

    def _break(self, line: _Line) -> None:
        line.broken = True
        line.cmd.stop()
        line.ctl.stop()
        if line.process >= 0:
            self._loop.forget(line.process)
            os.close(line.process)
            line.process = -1

    def close(self) -> None:
        """See `Lines`."""
        if self._closed:
            return
        self._closed = True
        super().close()
        for line in self._lines.values():
            line.broken = True
            with line.control_lock:
                line.ctl.close()
            line.cmd.close()
            if line.process >= 0:
                os.close(line.process)
                line.process = -1


class LocalWire(Wire):
    """See `Wire`."""

    shared = True

    def __init__(self, cmd: LocalSocket, ctl: LocalSocket) -> None:
        self._cmd, self._ctl = cmd, ctl
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self._poll.register(ctl.fileno(), select.POLLIN)
        self._poll.register(self._wakeup.fd, select.POLLIN)

    def recv_command(self) -> tuple[Any, int | None] | None:
        """See `Wire`. It looks for a moment before it sleeps: being woken takes longer."""
        until = time.perf_counter() + _LOOK_FOR
        try:
            while time.perf_counter() < until:
                try:
                    return _with_buffer(self._cmd.recv(wait=False))
                except BlockingIOError:
                    _yield_core()
            return _with_buffer(self._cmd.recv())
        except OSError:
            return None

    def recv_control(self, timeout: float) -> tuple[Any, int | None] | None:
        """See `Wire`."""
        for fd, _ in self._poll.poll(max(0.0, timeout) * 1000):
            if fd == self._wakeup.fd:
                self._wakeup.clear()
                continue
            try:
                found = _with_buffer(self._ctl.recv())
            except OSError:
                found = None
            if found is None:
                raise EOFError("the controller is gone")
            return found
        return None

    def send(self, frame: Frame) -> None:
        """See `Wire`."""
        try:
            self._cmd.send(frame.data, () if frame.buffer is None else (frame.buffer.fd,))
        except OSError as exc:
            raise EOFError("the controller is gone") from exc

    def wake(self) -> None:
        """See `Wire`."""
        self._wakeup.ring()

    def close(self) -> None:
        """See `Wire`."""
        self._cmd.close()
        self._ctl.close()


def _with_buffer(found: Any) -> tuple[Any, int | None] | None:
    """A message and its shared buffer."""
    if found is None:
        return None
    data, fds = found
    return data, fds[0] if fds else None
