"""How one thread waits for many file descriptors, and does what is due.

The thread that calls `EventLoop.turn` is the loop's; all callbacks are called there.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

PORTABLE = os.environ.get("DISCOLAB_TRANSPORT") == "portable" or sys.platform != "linux"
"""Whether only what all systems with unix sockets have is used; the variable is for tests."""

READ, WRITE = 1, 4  # POLLIN and POLLOUT, and as epoll has them


class Wakeup:
    """A file descriptor that any thread can make readable, to wake one that polls."""

    def __init__(self) -> None:
        if not PORTABLE:
            self.fd = self._in = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._in = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._in, False)
        self._closed = False

    def ring(self) -> None:
        """Make it readable."""
        if not self._closed:
            try:
                os.write(self._in, b"\x01\0\0\0\0\0\0\0")
            except (BlockingIOError, OSError):
                pass

    def clear(self) -> None:
        """Make it not readable."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close it, once."""
        if not self._closed:
            self._closed = True
            for fd in {self.fd, self._in}:
                os.close(fd)


class EventLoop:
    """See the module. `soon`, `later`, `wake`, `watch` and `change` are for any thread."""

    def __init__(self) -> None:
        self._poll: Any = select.poll() if PORTABLE else select.epoll()
        self._unit = 1000 if PORTABLE else 1  # poll counts in milliseconds
        self._ready: dict[int, Callable[[int], object]] = {}
        self._soon: deque[Callable[[], object]] = deque()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._wakeup = Wakeup()
        self.watch(self._wakeup.fd, lambda _: self._wakeup.clear())

    def watch(self, fd: int, ready: Callable[[int], object], mask: int = READ) -> None:
        """Call ``ready(mask)`` while `fd` is ready for what `mask` says."""
        self._ready[fd] = ready
        self._poll.register(fd, mask)
        if PORTABLE:
            self._wakeup.ring()  # a poll that is under way does not know of it

    def change(self, fd: int, mask: int) -> None:
        """Wait for something else of a descriptor."""
        if fd in self._ready:
            self._poll.modify(fd, mask)

    def forget(self, fd: int) -> None:
        """Watch a descriptor no longer, before it is closed."""
        if self._ready.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def soon(self, call: Callable[[], object]) -> None:
        """Call something on the loop's thread. Takes no lock, so a finalizer may ask for it."""
        self._soon.append(call)
        self._wakeup.ring()

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something on the loop's thread after a while."""
        entry = time.monotonic() + seconds, next(self._numbers), call
        self.soon(lambda: heapq.heappush(self._later, entry))

    def wake(self) -> None:
        """Have `turn` return."""
        self._wakeup.ring()

    def turn(self, timeout: float) -> None:
        """Wait until something is ready or due, `timeout` seconds at most, and call it."""
        if self._soon:
            timeout = 0.0
        elif self._later:
            timeout = min(timeout, max(0.0, self._later[0][0] - time.monotonic()))
        found = self._poll.poll(timeout * self._unit)
        for fd, mask, ready in [(fd, mask, self._ready.get(fd)) for fd, mask in found]:
            # else one called before has closed it, and the number may be that of another already
            if ready is not None and self._ready.get(fd) is ready:
                ready(mask)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def close(self) -> None:
        """Close what is the loop's own. Also for a process that was forked from the loop's."""
        self._ready, self._later = {}, []  # an epoll is shared: nothing is taken out of it
        self._soon.clear()
        self._wakeup.close()
        if hasattr(self._poll, "close"):
            self._poll.close()
