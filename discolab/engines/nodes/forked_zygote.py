"""A zygote that a node forks from itself: the imports are done once, and their memory is shared."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import threading
import time
from typing import NoReturn

from ...transport.local import LocalSocket, socket_pair
from ..remote import zygote as zygotes
from ..remote.zygote import Zygote


class ForkedZygote(Zygote):
    """A zygote forked from this process, which has imported everything and uses no threads yet."""

    def __init__(self) -> None:
        self._socket, theirs = socket_pair()
        pid = os.fork()
        if pid == 0:
            self._socket.close()
            _be_zygote(theirs)
        theirs.close()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ready = True
        self._numbers = itertools.count(1)
        self.process = _Child(pid)  # type: ignore[assignment]


class _Child:
    """As much of `subprocess.Popen` as a `Zygote` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_zygote(sock: LocalSocket) -> NoReturn:
    code = 1
    try:
        zygotes.die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        zygotes.LINGER = math.inf  # it ends with the node
        zygotes.serve(sock)
        code = 0
    finally:
        os._exit(code)
