"""Standard output and errors of a worker process: kept by its link until they are sent.

Any thread writes; appending to a list is atomic, and `take` takes a list as a whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from .black_box import BlackBox

_TEXTS = ("stdout", "stderr")
Item = tuple[Any, ...]  # ("stdout" | "stderr", text), or what a layer above has put in


class Outlet:
    """What this process has put out and not sent. `on_first` is called when there is something.

    `box`, if there is one, has the text too, for when this process crashes.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.box: BlackBox | None = None
        self._items: list[Item] = []
        self._on_first = on_first

    def add(self, item: Item) -> None:
        """Keep one thing."""
        items = self._items
        items.append(item)
        if self.box is not None and item[0] in _TEXTS:
            self.box.note(item[1])
        if len(items) == 1:
            self._on_first()

    @property
    def waiting(self) -> bool:
        """Whether anything is kept."""
        return bool(self._items)

    def take(self) -> list[Item]:
        """All that is kept, texts of one stream in a row joined."""
        if not self._items:
            return []
        items, self._items = self._items, []
        if self.box is not None:
            self.box.clear()
        joined: list[Item] = []
        texts: list[str] = []
        for number, item in enumerate(items):
            texts.append(item[1])
            after = items[number + 1 : number + 2]
            if item[0] not in _TEXTS:
                joined.append(item)
                texts.clear()
            elif not after or after[0][0] != item[0]:
                joined.append((item[0], "".join(texts)))
                texts.clear()
        return joined

    def clear(self) -> None:
        """Forget it."""
        self._items.clear()


class Stream:
    """Stands for `sys.stdout` or `sys.stderr` in a worker process."""

    def __init__(self, name: str, original: TextIO, outlet: Outlet) -> None:
        self._name = name
        self.original = original
        self._outlet = outlet

    def write(self, text: str) -> int:
        """Write as a text stream does."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._outlet.add((self._name, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing: the link sends what is kept, soon."""

    def isatty(self) -> bool:
        """No."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def install(outlet: Outlet) -> None:
    """Have this process's Python write to `outlet`; what it forks writes to its descriptors."""
    streams = Stream("stdout", sys.stdout, outlet), Stream("stderr", sys.stderr, outlet)
    sys.stdout, sys.stderr = streams

    def restore() -> None:
        outlet.clear()
        for stream, name in zip(streams, ("stdout", "stderr"), strict=True):
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.original)

    os.register_at_fork(after_in_child=restore)
