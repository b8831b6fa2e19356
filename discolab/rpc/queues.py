"""The calls that wait for a thread of one rank, as plain state; the pool's lock guards it.

A call that was made while serving another one is *deeper* than that. Threads serve the deepest
first, and at most `MOST_AT_DEPTH` calls of one depth at a time, those that wait included. So there
is always room for what the others wait for, however many they are: calls back and forth end, with a
bounded number of threads. What waits for no call, as a stream does for who takes its items, is not
counted meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MOST_AT_DEPTH = 64
DEEPEST = 1 << 20  # of what others wait for, and itself waits for nothing


class Deep(Protocol):
    """What can be queued."""

    depth: int


T = TypeVar("T", bound=Deep)


class Queues(Generic[T]):
    """See the module."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[T]] = {}
        self._served: dict[int, int] = {}

    def put(self, task: T) -> None:
        """Queue a task; in one operation, which an interrupt can't cut in two."""
        queue = self._waiting.get(task.depth)
        if queue is None:
            self._waiting[task.depth] = deque((task,))
        else:
            queue.append(task)

    def first(self) -> T | None:
        """What is to be served next, None if nothing can be."""
        waiting = self._waiting
        if not waiting:
            return None
        for depth in sorted(waiting, reverse=True) if len(waiting) > 1 else waiting:
            if self._served.get(depth, 0) < MOST_AT_DEPTH:
                return waiting[depth][0]
        return None

    def take(self) -> T | None:
        """Take that off its queue; it is served until `done`."""
        task = self.first()
        if task is not None:
            depth = task.depth
            queue = self._waiting[depth]
            queue.popleft()
            if not queue:
                del self._waiting[depth]
            self._served[depth] = self._served.get(depth, 0) + 1
        return task

    def done(self, task: T) -> None:
        """It is served no more."""
        left = self._served[task.depth] - 1
        if left:
            self._served[task.depth] = left
        else:
            del self._served[task.depth]

    def again(self, task: T) -> None:
        """It is served once more, whether there is room or not."""
        self._served[task.depth] = self._served.get(task.depth, 0) + 1

    def withdraw(self, task: T) -> None:
        """The task that was queued last at its depth is not to be served."""
        queue = self._waiting[task.depth]
        queue.remove(task)
        if not queue:
            del self._waiting[task.depth]

    def ready(self) -> int:
        """How many could be served now."""
        served = self._served
        return sum(
            max(0, min(len(queue), MOST_AT_DEPTH - served.get(depth, 0)))
            for depth, queue in self._waiting.items()
        )

    def clear(self) -> list[T]:
        """Take all off."""
        found = [task for queue in self._waiting.values() for task in queue]
        self._waiting.clear()
        return found

    def __bool__(self) -> bool:
        return bool(self._waiting)
