"""What is so on a thread for the time of a block. No state of its own."""

from __future__ import annotations

import threading
from typing import Any


class within:  # noqa: N801 - used as a function
    """Within it an attribute of a `threading.local` is `value`; then what it was, or None."""

    __slots__ = ("_before", "_local", "_name", "_value")

    def __init__(self, local: threading.local, name: str, value: Any) -> None:
        self._local, self._name, self._value = local, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._local, self._name, None)
        setattr(self._local, self._name, self._value)

    def __exit__(self, *_: Any) -> None:
        setattr(self._local, self._name, self._before)
