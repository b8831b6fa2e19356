"""Starts worker processes of this machine, and knows how they ended and what they left behind.

`Children` are the processes of one session; `Children.start` has a fork server (forkserver.py) fork
one more. One thread at a time uses it.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

from ..runtime.errors import DiscoError
from ..transport.frame import new_memory
from .forkserver import ForkServer
from .heartbeat import process_state

_BUFFER_SIZE = 1 << 16  # bytes
_DONE = struct.Struct("<Q")
_USED = struct.Struct("<I")
_USED_AT = _DONE.size
_TEXT_AT = _USED_AT + _USED.size
_ROOM = _BUFFER_SIZE - _TEXT_AT
_KILLED = -int(signal.SIGKILL)


class CrashBuffer:
    """Keeps what a worker runs, and has printed but not sent, where it survives the worker.

    Memory that the controller's process shares with a worker's: u64 commands done, u32 bytes used,
    then text. A process that crashes takes with it what is in its own memory; what it ran and
    printed last is what people want to read. The worker writes, the controller reads when the
    worker is gone. This is one process's end; it takes the descriptor over.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BUFFER_SIZE)
        os.close(fd)

    @classmethod
    def new(cls) -> tuple[CrashBuffer, int]:
        """Make a buffer, and a descriptor for the other process."""
        fd = new_memory()
        os.ftruncate(fd, _BUFFER_SIZE)
        return cls(os.dup(fd)), fd

    def note(self, text: str) -> None:
        """Append text; what does not fit pushes out what was there."""
        data = text[-_ROOM:].encode("utf-8", "replace")[-_ROOM:]
        (used,) = _USED.unpack_from(self._memory, _USED_AT)
        if used + len(data) > _ROOM:
            used = 0
        self._memory[_TEXT_AT + used : _TEXT_AT + used + len(data)] = data
        _USED.pack_into(self._memory, _USED_AT, used + len(data))

    def clear(self) -> None:
        """Empty it: what was noted has been sent."""
        _USED.pack_into(self._memory, _USED_AT, 0)

    def set_done(self, count: int) -> None:
        """Set how many commands are done."""
        _DONE.pack_into(self._memory, 0, count)

    def done(self) -> int:
        """How many commands were done."""
        count: int = _DONE.unpack_from(self._memory)[0]
        return count

    def read(self) -> str:
        """The text in it."""
        used = min(_USED.unpack_from(self._memory, _USED_AT)[0], _ROOM)
        return self._memory[_TEXT_AT : _TEXT_AT + used].decode("utf-8", "replace")


class Children:
    """Worker processes, and nodes to try, by a number of the owner's: a worker's rank.

    Attributes
    ----------
    pids
        Their process ids.
    codes
        How they have ended, as far as it is known: exit code, or minus a signal's number.
    """

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self._servers: dict[int, ForkServer] = {}
        self._buffers: dict[int, CrashBuffer] = {}

    def start(
        self,
        server: ForkServer,
        number: int,
        settings: dict[str, Any],
        text: int = -1,
        fds: Sequence[int] = (),
        timeout: float = 60.0,
    ) -> int:
        """Start a process: have the server fork it.

        Parameters
        ----------
        settings
            Of a worker (worker_main.py), or with ``run`` of something else.
        text
            Where its descriptors 1 and 2 lead; -1: where the server's do.
        fds
            Descriptors that a worker gets.

        Returns
        -------
        int
            A descriptor that is readable once it has ended, the caller's; -1 if there is none.
        """
        buffer = -1
        if "run" not in settings:
            self._buffers[number], buffer = CrashBuffer.new()
            fds = [*fds, buffer]
        try:
            settings = {**settings, "own_text": text < 0}
            fds = [*fds, text] if text >= 0 else fds
            pid = server.fork(settings, fds, timeout)
            self._servers[number], self.pids[number] = server, pid
            self.codes.pop(number, None)  # of another one that had the number before
        finally:
            if buffer >= 0:
                os.close(buffer)
        try:
            return os.pidfd_open(pid)
        except (AttributeError, OSError):  # an old kernel; or it has ended already
            return -1

    def look(self) -> dict[int, int]:
        """Find those that have ended since the last look, and how; never waits for one to end."""
        news: dict[int, int] = {}
        for server in set(self._servers.values()):
            alive = [n for n, s in self._servers.items() if s is server and n not in self.codes]
            pids = [self.pids[number] for number in alive]
            try:
                ended = server.ended(pids) if server.usable else dict.fromkeys(pids, _KILLED)
            except DiscoError:  # it has just ended, and what it has forked with it
                ended = dict.fromkeys(pids, _KILLED)
            news |= {n: ended[self.pids[n]] for n in alive if self.pids[n] in ended}
        self.codes |= news
        return news

    def await_end(self, number: int) -> None:
        """Wait a moment for a process that is just ending, and record how it did."""
        server = self._servers.get(number)
        if server is not None and number not in self.codes:
            try:
                code = server.status(self.pids[number])
            except DiscoError:  # the server has ended too
                return
            if code is not None:
                self.codes[number] = code

    def kill(self, number: int) -> None:
        """End one of them now, with what it has started."""
        server = self._servers.get(number)
        if server is not None and server.usable and number not in self.codes:
            server.kill(self.pids[number])

    def exit_reason(self, number: int) -> str:
        """Why a process has ended: ``was killed by SIGKILL``."""
        return how_it_ended(self.codes.get(number))

    def commands_done(self, number: int) -> int:
        """How many commands a worker has done."""
        return self._buffers[number].done()

    def last_output(self, number: int) -> str:
        """What a worker has printed and not sent."""
        return self._buffers[number].read() if number in self._buffers else ""

    def states(self) -> dict[int, str]:
        """What each that lives does, as `process_state` tells it."""
        return {n: process_state(pid) for n, pid in self.pids.items() if n not in self.codes}

    def end(self) -> None:
        """End all of them, with what they have started, and release their output."""
        for number, pid in self.pids.items():
            server = self._servers[number]
            try:
                if number not in self.codes and server.usable:
                    server.kill(pid)
            except DiscoError as exc:
                sys.stderr.write(f"{exc}\n")
        self._buffers.clear()


def how_it_ended(code: int | None) -> str:
    """Describe an exit code, or minus a signal's number; None: it is not known."""
    if code is None:
        return "has gone"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with status {code}"
