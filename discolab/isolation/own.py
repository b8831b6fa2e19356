"""A value that each worker has for itself, in the place of one that the process has.

`_guard` guards the making of values; a value that is there is read without it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

from ..runtime.worker import Worker, current_worker_or_none
from .imports import worker_unless_importing

T = TypeVar("T")

# In `Worker.process_state`: names of what a script's end puts back as it was begin with this.
OF_SCRIPT = "of the script: "

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
        worker = worker_unless_importing() if self._imports_share else current_worker_or_none()
        if worker is None:
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


class OwnSetting(Generic[T]):
    """A setting that a worker may make for itself, until its script ends; else the notebook's.

    The notebook's value stays where its library keeps it.

    Parameters
    ----------
    name
        What sets it: its key in `Worker.process_state`.
    imports_share
        As for `PerWorker`.
    """

    def __init__(self, name: str, *, imports_share: bool = False) -> None:
        self._key = f"{OF_SCRIPT}{name}"
        self._imports_share = imports_share

    def get(self, notebooks: Callable[[], T]) -> T:
        """The worker's own value if it has set one, else what `notebooks()` gives."""
        worker = current_worker_or_none()
        if worker is None or self._key not in worker.process_state:
            return notebooks()
        value: T = worker.process_state[self._key]
        return value

    def set(self, value: T) -> bool:
        """Set the worker's own value. False: who calls is no worker, and nothing was set."""
        worker = worker_unless_importing() if self._imports_share else current_worker_or_none()
        if worker is not None:
            worker.process_state[self._key] = value
        return worker is not None


class DictOfWorkers(MutableMapping[Any, Any]):
    """A dictionary to which each worker adds entries of its own; a script's end takes them away.

    What modules enter while they are imported is for all.

    Parameters
    ----------
    name
        What it is: its key in `Worker.process_state`.
    shared
        The process's, which the notebook has.
    make
        Makes a worker's; by default one in which the worker sees the shared entries too.
    """

    def __init__(self, name: str, shared: Any, make: Callable[[], Any] | None = None) -> None:
        self.shared = shared
        self._key = f"{OF_SCRIPT}{name}"
        self._make = make or (lambda: ChainMap({}, shared))

    def here(self) -> Any:
        """The dictionary of who calls."""
        worker = worker_unless_importing()
        if worker is None:
            return self.shared
        own = worker.process_state.get(self._key)
        return worker.process_state.setdefault(self._key, self._make()) if own is None else own

    def __getitem__(self, key: Any) -> Any:
        return self.here()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.here()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.here()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.here())

    def __len__(self) -> int:
        return len(self.here())

    def copy(self) -> dict[Any, Any]:
        """All entries that who calls sees."""
        return dict(self.here())

    def clear(self) -> None:
        """Take away those of who calls."""
        self.here().clear()


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _guard
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
