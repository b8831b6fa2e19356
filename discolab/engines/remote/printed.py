"""What workers put out, where no notebook shows it: on this process's streams, in whole lines."""

from __future__ import annotations

import sys
import time
from typing import Any

from ...runtime.link import SERVICES, Service

_PATIENCE = 0.2  # seconds that the beginning of a line waits for its end


class PrintedOutput(Service):
    """Writes to `sys.stdout` and `sys.stderr`. The reader thread alone uses it."""

    def __init__(self) -> None:
        self._tails: dict[tuple[int, str], str] = {}
        self._due: float | None = None

    def receive(self, rank: int, value: Any) -> None:
        """See `Service`."""
        for name, *content in value:
            if name != "display":
                key = rank, name
                lines, newline, tail = (self._tails.pop(key, "") + content[0]).rpartition("\n")
                _write(name, lines + newline)
                if tail:
                    self._tails[key] = tail
                    self._due = time.monotonic() + _PATIENCE

    def next_look(self) -> float | None:
        """See `Service`."""
        return self._due

    def look(self) -> None:
        """See `Service`."""
        self._due = None
        for (_, name), tail in self._tails.items():
            _write(name, tail)
        self._tails.clear()

    def close(self) -> None:
        """See `Service`."""
        self.look()


def _write(name: str, text: str) -> None:
    if text:
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(text)
        stream.flush()


SERVICES.setdefault("output", lambda _: PrintedOutput())
