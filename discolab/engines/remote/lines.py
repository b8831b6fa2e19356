"""Lines between a controller and its remote workers: what a transport must do.

A worker's line carries commands (controller to worker, received by the worker's own thread),
control messages (controller to worker, received by its link thread, also while it computes), and
all that the worker says (one stream, in order). Messages are `Frame`s; a line never loses, repeats
or reorders them, and never blocks the controller. `local_lines` and `zmq_lines` are the transports.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from ...transport.frame import Frame
from ...transport.loop import EventLoop

MESSAGE, TEXT, JOINED, END = "message", "text", "joined", "end"


class Event(NamedTuple):
    """Something that came in.

    `kind` is MESSAGE (`data` is its bytes, `fd` its buffer's descriptor or None), TEXT (bytes that
    the worker's process wrote to its file descriptors 1 and 2), JOINED (somebody not known yet is
    there, `data` is what it says of itself) or END (the line is broken; `data` says why, if it is
    known).
    """

    kind: str
    rank: int
    data: Any = None
    fd: int | None = None


class Lines(ABC):
    """The controller's ends of all lines of one session.

    `send` is called by one thread at a time (the session's lock), `control` and `wake` on any
    thread, `receive` on the reader thread alone.
    """

    shared: bool = False
    """Whether frames may have shared buffers."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self._events: list[Event] = []
        self._texts: dict[int, int] = {}  # rank -> the pipe to which its descriptors 1, 2 lead

    @abstractmethod
    def send(self, rank: int, frame: Frame) -> None:
        """Queue a command; never blocks, and does nothing where the line is broken."""

    @abstractmethod
    def control(self, rank: int, frame: Frame) -> None:
        """Queue a control message; as `send`."""

    @abstractmethod
    def receive(self, timeout: float) -> list[Event]:
        """What has come in; waits up to `timeout` seconds for it, less after `wake`."""

    def watch_text(self, rank: int, fd: int) -> None:
        """Take over the pipe to which a worker's descriptors 1 and 2 lead."""
        os.set_blocking(fd, False)
        self._texts[rank] = fd
        self._loop.watch(fd, lambda _: self._read_text(rank))

    def _read_text(self, rank: int) -> None:
        """Take what a worker's process has written."""
        fd = self._texts.get(rank, -1)
        while fd >= 0:
            try:
                data = os.read(fd, 65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.forget(fd)
                os.close(self._texts.pop(rank))
                return
            self._events.append(Event(TEXT, rank, data))

    def wake(self) -> None:
        """Have `receive` return; any thread."""
        self._loop.wake()

    def close(self) -> None:
        """Close everything; the reader thread has ended."""
        self._loop.close()
        for fd in self._texts.values():
            os.close(fd)
        self._texts.clear()


class Wire(ABC):
    """A worker's end of its line."""

    shared: bool = False

    @abstractmethod
    def recv_command(self) -> tuple[Any, int | None] | None:
        """Wait for the next command: its bytes and shared buffer. None: the controller is gone."""

    @abstractmethod
    def recv_control(self, timeout: float) -> tuple[Any, int | None] | None:
        """The next control message, None if there was none for `timeout` seconds.

        Raises
        ------
        EOFError
            If the controller is gone.
        """

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Say something; one thread at a time. May wait for room, not for an answer.

        Raises
        ------
        EOFError
            If the controller is gone.
        """

    @abstractmethod
    def wake(self) -> None:
        """Have `recv_control` return."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it, with what was said sent first."""
