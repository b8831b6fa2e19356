"""A value that each worker has for itself, in the place of one that the process has.

`_guard` guards the making of values; a value that is there is read without it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..runtime.worker import Worker, current_worker_or_none
from .imports import is_importing

T = TypeVar("T")

_guard = threading.Lock()


class PerWorker(Generic[T]):
    """Each worker's own value, also for the threads that it starts; usable as a class attribute.

    Parameters
    ----------
    controllers
        The value of all who are no worker.
    make
        Makes a worker's.
    imports_share
        Whether what modules do while they are imported concerns the controller's value: a module
        is imported once, for all workers.
    """

    def __init__(
        self, controllers: T, make: Callable[[], T], *, imports_share: bool = False
    ) -> None:
        self.controllers = controllers
        self._make = make
        self._imports_share = imports_share
        self._values: weakref.WeakKeyDictionary[Worker, T] = weakref.WeakKeyDictionary()

    def here(self) -> T:
        """That of who calls."""
        worker = current_worker_or_none()
        if worker is None or (self._imports_share and is_importing()):
            return self.controllers
        value = self._values.get(worker)
        if value is None:
            with _guard:
                value = self._values.setdefault(worker, self._make())
        return value

    def __get__(self, instance: Any, owner: Any = None) -> T:
        return self.here()

    def __set__(self, instance: Any, value: T) -> None:
        worker = current_worker_or_none()
        if worker is None:
            self.controllers = value
        else:
            with _guard:
                self._values[worker] = value


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
