"""Python's interpreter lock (the GIL), and what holds without it. No state.

A free-threaded Python (``python3.13t``) has no such lock, unless a module in C turns it on that was
not made for that. Nothing of discolab needs it. What it relies on in its place, looked up in the
source of CPython 3.13.5:

- One operation on a list, dict, set, deque or `queue.SimpleQueue`, such as ``append``, ``pop`` or
  ``setdefault``, is a step of its own, and so is ``next`` of an `itertools.count`; of an
  `itertools.cycle` or ``repeat`` it is not.
- ``d.copy()`` of a dict is one, and ``list(x)`` of a list, dict, set or a dict's keys, values or
  items. ``tuple(x)`` of these and ``copy()`` of a deque are not: another thread may add something
  between two items, and then they raise. `copied` is for deques.
- To set an attribute takes and frees a lock of the object, so other threads see it before what the
  same thread does afterwards. *First say it, then look whether somebody waits* needs no more.
- To look and then act are two steps, even if no call is between the two, where the lock made them
  one: that wants a lock of ours.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

is_on: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
"""Whether one thread at a time runs Python. Once it is on it stays on; it may be turned on."""


def copied(items: deque[T]) -> list[T]:
    """What a deque holds, while other threads add to it and take away."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # one came in between, or went
            continue
