"""One piece of work in parts, for several threads that take them one by one.

`work` may run on any number of threads at once. No lock: a part is taken by one step of an
iterator and finished by one append, each of which is one operation of the interpreter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import torch


class Tickets:
    """Parts that may be done in any order, each once."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts
        self._next = itertools.count().__next__
        self._taken = 0  # at least so many; a hint, written by any thread
        self._finished: list[None] = []

    def work(self) -> None:
        """Do parts until all are taken."""
        parts, take, finish = self._parts, self._next, self._finished.append
        with torch.inference_mode():
            while (part := take()) < len(parts):
                self._taken = part + 1
                parts[part]()
                finish(None)

    def helpers(self) -> int:
        """How many more threads than one can be of use on this machine."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, (cores or 1) // torch.get_num_threads())
        return min(threads, len(self._parts)) - 1

    def left(self) -> bool:
        """Whether there may be parts that nobody has taken."""
        return self._taken < len(self._parts)

    def finished(self) -> bool:
        """Whether all parts are done."""
        return len(self._finished) == len(self._parts)
