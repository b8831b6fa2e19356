"""What worker processes put out: kept in the worker until it is sent, shown by the controller.

In a worker's process any thread writes to the `OutputBuffer`, and the two that send take from it,
one at a time. On the controller the reader thread alone uses what is here.
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from ..runtime.services import SERVICES, Service
from .child_processes import CrashBuffer

_TEXTS = ("stdout", "stderr")
_MOST_LINES = 60  # of what a worker has put out, kept: a crash alone may say forty
_LONGEST_LINE = 500  # characters of a line that are kept
_PATIENCE = 0.2  # seconds that the beginning of a line waits for its end
Item = tuple[Any, ...]  # ("stdout" | "stderr", text), or what a layer above has put in


# -- in a worker's process -----------------------------------------------------------------------


class OutputBuffer:
    """The output of this process that is not sent yet.

    Attributes
    ----------
    items
        What is kept.
    crash_buffer
        Has the text too, for when this process crashes; None: there is none.

    Parameters
    ----------
    on_first
        Called when there is something.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.crash_buffer: CrashBuffer | None = None
        self.items: list[Item] = []
        self._on_first = on_first
        self._told = False  # whether somebody is to take what is kept

    def add(self, item: Item) -> None:
        """Append an item."""
        self.items.append(item)
        if self.crash_buffer is not None and item[0] in _TEXTS:
            self.crash_buffer.note(item[1])
        if not self._told:
            self._told = True
            self._on_first()

    def take(self) -> list[Item]:
        """Remove and return all of it, texts of one stream in a row joined."""
        self._told = False  # first: who finds it set has his item in what is taken now
        count = len(self.items)
        if not count:
            return []
        # the list stays: another thread may have looked it up, and be about to append
        items = self.items[:count]
        del self.items[:count]
        if self.crash_buffer is not None:
            self.crash_buffer.clear()
        joined: list[Item] = []
        texts: list[str] = []
        for item, after in zip(items, [*items[1:], ("",)], strict=True):
            if item[0] not in _TEXTS:
                joined.append(item)
                continue
            texts.append(item[1])
            if after[0] != item[0]:
                joined.append((item[0], "".join(texts)))
                texts.clear()
        return joined

    def clear(self) -> None:
        """Drop all of it."""
        self.items.clear()


class Stream:
    """Stands for `sys.stdout` or `sys.stderr` in a worker process."""

    def __init__(self, name: str, original: TextIO, buffer: OutputBuffer) -> None:
        self._name = name
        self.original = original
        self._output = buffer

    def write(self, text: str) -> int:
        """Write as a text stream does."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._output.add((self._name, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: the link soon sends what is kept."""

    def isatty(self) -> bool:
        """False: it is no terminal."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def install(buffer: OutputBuffer) -> None:
    """Have this process's Python write to `buffer`; what it forks writes to its descriptors."""
    streams = Stream("stdout", sys.stdout, buffer), Stream("stderr", sys.stderr, buffer)
    sys.stdout, sys.stderr = streams

    def restore() -> None:
        buffer.clear()
        for stream, name in zip(streams, _TEXTS, strict=True):
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.original)

    os.register_at_fork(after_in_child=restore)


# -- on the controller ---------------------------------------------------------------------------


class LastOutput:
    """The last lines that a worker has put out, for when it dies."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._begun = ""  # a line without its end
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, text: str) -> None:
        """Keep the end of the text. As in a terminal, what follows a carriage return replaces."""
        *lines, begun = (self._begun + text).split("\n")
        self._lines.extend(
            line.rpartition("\r")[2][:_LONGEST_LINE] for line in lines[-_MOST_LINES:]
        )
        self._begun = begun.rpartition("\r")[2][-_LONGEST_LINE:]

    def lines(self) -> list[str]:
        """What is kept, without empty lines."""
        return [line for line in (*self._lines, self._begun) if line]


class PrintedOutput(Service):
    """Writes what workers put out to `sys.stdout` and `sys.stderr`, in whole lines.

    It serves sessions for which no notebook shows it.
    """

    def __init__(self) -> None:
        # lines without their ends: when each must be written, and its pieces
        self._begun: dict[tuple[int, str], tuple[float, list[str]]] = {}

    def receive(self, rank: int, value: Any) -> None:
        for name, *content in value:
            if name == "display":
                continue
            key = rank, name
            lines, newline, begun = content[0].rpartition("\n")
            if newline:
                _, pieces = self._begun.pop(key, (0.0, ()))
                _write(name, "".join([*pieces, lines, newline]))
            if begun:
                due = time.monotonic() + _PATIENCE
                self._begun.setdefault(key, (due, []))[1].append(begun)

    def next_look(self) -> float | None:
        begun = list(self._begun.values())
        return min(begun)[0] if begun else None

    def look(self) -> None:
        self._write_begun(time.monotonic())

    def close(self) -> None:
        self._write_begun(float("inf"))

    def _write_begun(self, now: float) -> None:
        # the thread that closes the session may be here while the reader thread still receives
        for key, (due, _) in self._begun.copy().items():
            if due <= now:
                _, pieces = self._begun.pop(key, (0.0, ()))
                _write(key[1], "".join(pieces))


def _write(name: str, text: str) -> None:
    if text:
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(text)
        stream.flush()


SERVICES.setdefault("output", lambda _: PrintedOutput())
