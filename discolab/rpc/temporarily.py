"""What a thread is told for the time of a block, as where references go that it writes just now.

    with temporarily(_local, "context", context):
        func()  # asks `_local.context`

A generator made a context manager would do the same, but slower, and each message enters one. No
state of its own.
"""

from __future__ import annotations

import threading
from typing import Any


class temporarily:  # noqa: N801 - used as a function
    """Within the block an attribute of a `threading.local` is `value`; then what it was, or None.

    Parameters
    ----------
    local, name
        Whose attribute; other threads have others.
    """

    __slots__ = ("_before", "_local", "_name", "_value")

    def __init__(self, local: threading.local, name: str, value: Any) -> None:
        self._local, self._name, self._value = local, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._local, self._name, None)
        setattr(self._local, self._name, self._value)

    def __exit__(self, *_: Any) -> None:
        setattr(self._local, self._name, self._before)
