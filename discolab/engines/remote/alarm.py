"""What wakes a thread that polls file descriptors."""

from __future__ import annotations

import os


class Alarm:
    """A file descriptor that any thread can make readable."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
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
        """Let go of it."""
        if not self._closed:
            self._closed = True
            for fd in {self.fd, self._in}:
                os.close(fd)
