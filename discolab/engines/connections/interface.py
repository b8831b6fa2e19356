"""What a transport must do to connect a controller with its worker processes.

A worker has three streams: commands, received by the worker's own thread; control messages,
received by its link thread also while it computes; and all that the worker says, in one order.
Messages are `Frame`s. A stream never loses, repeats or reorders them, and never blocks the
controller.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...transport.frame import Frame
from ...transport.loop import EventLoop

Received = tuple[Any, Sequence[int]]
"""A frame's bytes, and the descriptor of its shared buffer if it has one."""


class Receiver(Protocol):
    """Takes what a transport receives; called on the thread that turns its loop."""

    def received(self, rank: int, data: Any, fd: int | None) -> None:
        """Take a worker's frame, perhaps with the descriptor of a shared buffer."""

    def heard(self, rank: int) -> None:
        """Take note that a worker lives: a part of a frame has come."""

    def written(self, rank: int, data: bytes) -> None:
        """Take what a worker's process has written to its file descriptors 1 and 2."""

    def ended(self, rank: int) -> None:
        """Take note that a worker's connection has ended, after all that came on it."""


class Transport(ABC):
    """The controller's ends of the connections to all workers of one session.

    Attributes
    ----------
    loop
        The reader thread turns it.
    receiver
        Set before the reader thread starts.
    shared
        Whether frames may have shared buffers.
    """

    shared: bool = False
    receiver: Receiver

    def __init__(self) -> None:
        self.loop = EventLoop()
        self._texts: dict[int, int] = {}  # rank -> the pipe to which its descriptors 1, 2 lead
        self._processes: set[int] = set()  # descriptors, readable once a process has ended

    @abstractmethod
    def sender(self, rank: int) -> Callable[[Frame], object]:
        """A function that queues a command for a worker; never blocks, drops it if that is gone.

        One thread at a time may call it, once the worker's process is started.
        """

    @abstractmethod
    def control(self, rank: int, frame: Frame) -> None:
        """Queue a control message, as `sender` does a command; any thread."""

    def watch_text(self, rank: int, fd: int) -> None:
        """Take over the pipe to which a worker's descriptors 1 and 2 lead."""
        os.set_blocking(fd, False)
        self._drop_text(rank)
        self._texts[rank] = fd
        self.loop.watch(fd, lambda _: self.read_text(rank))

    def read_text(self, rank: int) -> None:
        """Pass on what a worker's process has written so far."""
        fd = self._texts.get(rank, -1)
        while fd >= 0:
            try:
                data = os.read(fd, 65_536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop_text(rank)
                return
            self.receiver.written(rank, data)

    def _drop_text(self, rank: int) -> None:
        fd = self._texts.pop(rank, -1)
        if fd >= 0:
            self.loop.forget(fd)
            os.close(fd)

    def remove(self, rank: int) -> None:
        """Close what is left of a connection that has ended; on the loop's thread."""
        self._drop_text(rank)

    def watch_process(self, fd: int, ended: Callable[[], object]) -> None:
        """Take over `fd`, readable once a process has ended, and call `ended` then; -1: never."""

        def has_ended(_mask: int) -> None:
            self.loop.forget(fd)
            self._processes.remove(fd)
            os.close(fd)
            ended()

        if fd >= 0:
            self._processes.add(fd)
            self.loop.watch(fd, has_ended)

    def close(self) -> None:
        """Close everything, after the reader thread has ended."""
        self.loop.close()
        for fd in (*self._texts.values(), *self._processes):
            os.close(fd)
        self._texts.clear()
        self._processes.clear()


class WorkerEnd(ABC):
    """A worker's ends of its streams."""

    shared: bool = False

    @abstractmethod
    def recv_command(self) -> Received | None:
        """Wait for the next command; None: the controller is gone."""

    @abstractmethod
    def recv_control(self, timeout: float) -> Received | None:
        """The next control message, None if there was none for `timeout` seconds.

        Raises
        ------
        EOFError
            If the controller is gone.
        """

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send a message; one thread at a time. May wait for room, never for an answer.

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
        """Close the streams, after what was said has been sent."""
