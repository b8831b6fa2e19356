"""The calls that wait for a thread of one rank, as plain state; the pool's lock guards it.

A call that is made while another one is served is *deeper* than that one. Threads serve the deepest
calls first, and at most `MOST_AT_DEPTH` calls of one depth at a time, waiting ones included. So
there is always room for the calls that others wait for, however many there are: calls back and
forth end, with a bounded number of threads. A call that waits for something else than a call, as a
stream does for whoever takes its items, is not counted meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MOST_AT_DEPTH = 64
DEEPEST = 1 << 20  # of tasks that others wait for, and that wait for nothing


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
        """The task to serve next, None if none can be served now."""
        waiting = self._waiting
        if not waiting:
            return None
        for depth in sorted(waiting, reverse=True) if len(waiting) > 1 else waiting:
            if self._served.get(depth, 0) < MOST_AT_DEPTH:
                return waiting[depth][0]
        return None

    def take(self) -> T | None:
        """Take the next task off its queue; it counts as served until `done`."""
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
        """A task is no longer served."""
        left = self._served[task.depth] - 1
        if left:
            self._served[task.depth] = left
        else:
            del self._served[task.depth]

    def again(self, task: T) -> None:
        """Serve a task once more, whether there is room or not."""
        self._served[task.depth] = self._served.get(task.depth, 0) + 1

    def withdraw(self, task: T) -> None:
        """Take a task off its queue that is not to be served."""
        queue = self._waiting[task.depth]
        queue.remove(task)
        if not queue:
            del self._waiting[task.depth]

    def ready(self) -> int:
        """How many tasks could be served now."""
        served = self._served
        return sum(
            max(0, min(len(queue), MOST_AT_DEPTH - served.get(depth, 0)))
            for depth, queue in self._waiting.items()
        )

    def clear(self) -> list[T]:
        """Take all tasks off the queues."""
        tasks = [task for queue in self._waiting.values() for task in queue]
        self._waiting.clear()
        return tasks

    def __bool__(self) -> bool:
        return bool(self._waiting)
