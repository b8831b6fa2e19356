"""Connections within one machine: pairs of sockets that are made before a worker is forked.

Nobody else can connect to them, and they have no name that could be left behind. A worker has two
pairs (transport/unix_sockets.py): one for commands and all that the worker says, one for control
messages.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from functools import partial

from ...transport.frame import Frame
from ...transport.loop import Wakeup
from ...transport.unix_sockets import LocalConnection, LocalSocket
from .interface import Received, Transport, WorkerEnd

_LOOK_FOR = 100e-6  # seconds for which a worker polls for its next command before it sleeps
_yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))


class _Connections:
    """The controller's ends of one worker's connections."""

    def __init__(self, commands: LocalConnection, control: LocalConnection) -> None:
        self.commands, self.control = commands, control
        self.control_lock = threading.Lock()
        self.ended = False


class LocalTransport(Transport):
    """See `Transport`."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self._workers: dict[int, _Connections] = {}
        self._closed = False

    def add(
        self, rank: int, commands: LocalSocket, control: LocalSocket, text: int, process: int = -1
    ) -> None:
        """Take over the controller's ends.

        Parameters
        ----------
        text
            The descriptor to which the worker's descriptors 1 and 2 lead.
        process
            A descriptor that is readable once the process has ended (`os.pidfd_open`): children
            that it has forked may hold the other end of its connection open. -1 if there is none.
        """
        self._workers[rank] = worker = _Connections(
            LocalConnection(self.loop, commands, lambda: self._read(rank)),
            LocalConnection(self.loop, control),
        )
        self.watch_text(rank, text)

        def has_ended() -> None:
            if self._workers.get(rank) is worker:  # else another one has its place already
                self._read(rank, has_ended=True)

        self.watch_process(process, has_ended)

    def __contains__(self, rank: int) -> bool:
        """Whether this transport closes the descriptors of worker `rank`."""
        return rank in self._workers

    def sender(self, rank: int) -> Callable[[Frame], object]:
        return self._workers[rank].commands.send

    def control(self, rank: int, frame: Frame) -> None:
        worker = self._workers.get(rank)
        if worker is not None:
            with worker.control_lock:
                worker.control.send(frame)

    def _read(self, rank: int, has_ended: bool = False) -> None:
        """Take a message; the loop calls again for the next. Of a process that has ended, all."""
        worker = self._workers.get(rank)  # None: it is just being added
        while worker is not None and not worker.ended:
            self.read_text(rank)  # what was written before a message comes before it
            try:
                received = worker.commands.receive()
            except BlockingIOError:
                if not has_ended:
                    return
                received = None
            if received is None:
                worker.ended = True
                worker.commands.stop()
                worker.control.stop()
                self.read_text(rank)
                self.receiver.ended(rank)
                return
            self.receiver.received(rank, *received)
            if not has_ended:
                return

    def remove(self, rank: int) -> None:
        super().remove(rank)
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.ended = True
            with worker.control_lock:
                worker.control.close()
            worker.commands.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        super().close()
        for worker in self._workers.values():
            worker.ended = True
            with worker.control_lock:
                worker.control.close()
            worker.commands.close()


class LocalWorkerEnd(WorkerEnd):
    """See `WorkerEnd`."""

    shared = True

    def __init__(self, commands: LocalSocket, control: LocalSocket) -> None:
        self._commands, self._control = commands, control
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(self._wakeup.fd, select.POLLIN)

    def recv_command(self) -> Received | None:
        """See `WorkerEnd`. It polls for a moment before it sleeps: being woken takes longer."""
        recv = self._commands.recv
        until = time.perf_counter() + _LOOK_FOR
        try:
            while time.perf_counter() < until:
                try:
                    return recv(wait=False)
                except BlockingIOError:
                    _yield_core()
            return recv()
        except OSError:
            return None

    def recv_control(self, timeout: float) -> Received | None:
        for fd, _ in self._poll.poll(max(0.0, timeout) * 1000):
            if fd == self._wakeup.fd:
                self._wakeup.clear()
                continue
            try:
                received = self._control.recv()
            except OSError:
                received = None
            if received is None:
                raise EOFError("the controller is gone")
            return received
        return None

    def send(self, frame: Frame) -> None:
        try:
            self._commands.send(frame.data, () if frame.buffer is None else (frame.buffer.fd,))
        except OSError as exc:
            raise EOFError("the controller is gone") from exc

    def wake(self) -> None:
        self._wakeup.ring()

    def close(self) -> None:
        self._commands.close()
        self._control.close()
