"""The key-value store of a session's process groups.

One `SessionStore` a session, in `Worker.shared`, used by all its workers and their threads; where
workers have processes of their own each has a `CoordinatorStore`, which keeps everything at the
coordinator. torch's own stores wait in C++, where nothing can interrupt them; here a worker waits
as it does for everything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d

from ...runtime.errors import CollectiveError, WaitTimeoutError
from ...runtime.interruptible import TICK
from ...runtime.worker import Worker, current_worker_or_none
from ..choose import has_coordinator

_Store: Any = torch.distributed.distributed_c10d.Store  # its trampoline has no types
_STORE = "discolab.ccl.distributed.store"


class SessionStore(_Store):  # type: ignore[misc] # Any, see above
    """A store for workers of one process, in memory. Names of methods are those that torch calls.

    `_lock` guards `_data`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._waiting: set[Worker] = set()

    def set(self, key: str, value: Any) -> None:
        """Store a value and wake who waits for it."""
        with self._lock:
            self._data[key] = _as_bytes(value)
        self._wake()

    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""
        self.wait([key])
        return self._data[key]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first; the sum."""
        with self._lock:
            total = int(self._data.get(key, b"0")) + value
            self._data[key] = str(total).encode()
        self._wake()
        return total

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Store a value if the present one is as expected; the value that is there then."""
        expected, desired = _as_bytes(expected_value), _as_bytes(desired_value)
        with self._lock:
            found = self._data.get(key)
            if found == expected or (found is None and not expected):
                found = self._data[key] = desired
        self._wake()
        return expected if found is None else found

    def append(self, key: str, value: Any) -> None:
        """Put bytes behind those that are there."""
        with self._lock:
            self._data[key] = self._data.get(key, b"") + _as_bytes(value)
        self._wake()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until there are all."""
        self.wait(keys)
        return [self._data[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Store several values."""
        with self._lock:
            self._data.update(zip(keys, map(_as_bytes, values), strict=True))
        self._wake()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; never waits."""
        return all(key in self._data for key in keys)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch calls
        """Forget a key; whether it was there."""
        with self._lock:
            return self._data.pop(key, None) is not None

    delete_key = deleteKey

    def getNumKeys(self) -> int:  # noqa: N802 - the name that torch calls
        """How many keys there are."""
        return len(self._data)

    num_keys = getNumKeys

    def has_extended_api(self) -> bool:
        """That there are append, multi_get and multi_set."""
        return True

    def clone(self) -> SessionStore:
        """Itself: it may be used from any thread."""
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises
        ------
        torch.distributed.DistStoreError
            At the deadline, 300 s unless torch was told otherwise.
        CollectiveError
            If no worker is left that could still store them.
        """
        seconds = (timeout or self.timeout).total_seconds()
        worker = current_worker_or_none()
        what = _waited_for(keys)
        try:
            if worker is None or worker.thread_id != threading.get_ident():
                self._poll(keys, seconds, what)
            else:
                self._wait_on_worker(worker, keys, seconds, what)
        except WaitTimeoutError as exc:
            raise torch.distributed.DistStoreError(str(exc)) from None

    def _wait_on_worker(
        self, worker: Worker, keys: Sequence[str], seconds: float, what: str
    ) -> None:
        def check() -> None:
            others = [peer for peer in worker.peers.values() if peer is not worker]
            gone = all(peer.ended or peer.executed > worker.executed for peer in others)
            if gone and not self.check(keys):
                raise CollectiveError(_nobody_left(worker, what))

        self._waiting.add(worker)
        try:
            worker.wait_for(lambda: self.check(keys), what, seconds, check)
        finally:
            self._waiting.discard(worker)

    def _poll(self, keys: Sequence[str], seconds: float, what: str) -> None:
        """Wait on a thread that is no worker's own."""
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"gave up after {seconds:g} s waiting for {what}")
            time.sleep(TICK / 10)

    def _wake(self) -> None:
        for worker in tuple(self._waiting):
            worker.wake()


class CoordinatorStore(_Store):  # type: ignore[misc] # Any, see above
    """A store for one of the workers of several processes; see `SessionStore` for the methods."""

    def __init__(self, worker: Worker) -> None:
        from ..rendezvous.client import client_of

        super().__init__()
        self._worker, self._client = worker, client_of(worker)

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._ask("set", [key], [_as_bytes(value)])

    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first; the sum."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Store a value if the present one is as expected; the value that is there then."""
        return bytes(
            self._ask("compare_set", key, _as_bytes(expected_value), _as_bytes(desired_value))
        )

    def append(self, key: str, value: Any) -> None:
        """Put bytes behind those that are there."""
        self._ask("append", key, _as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until there are all."""
        return [bytes(value) for value in self._wait("get", keys, self.timeout)]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Store several values."""
        self._ask("set", list(keys), [_as_bytes(value) for value in values])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", list(keys)))

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch calls
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", key))

    delete_key = deleteKey

    def getNumKeys(self) -> int:  # noqa: N802 - the name that torch calls
        """How many keys there are."""
        return int(self._ask("count"))

    num_keys = getNumKeys

    def has_extended_api(self) -> bool:
        """That there are append, multi_get and multi_set."""
        return True

    def clone(self) -> CoordinatorStore:
        """Itself: it may be used from any thread."""
        return self

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises
        ------
        torch.distributed.DistStoreError, CollectiveError
            As that of `SessionStore`.
        """
        self._wait("wait", keys, timeout or self.timeout)

    def _wait(self, what: str, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        words = _waited_for(keys)
        try:
            found = self._ask(what, list(keys), words=words, timeout=timeout.total_seconds())
        except WaitTimeoutError as exc:
            raise torch.distributed.DistStoreError(str(exc)) from None
        if found is None:
            raise CollectiveError(_nobody_left(self._worker, words))
        values: Sequence[bytes] = found
        return values

    def _ask(
        self, what: str, *args: Any, words: str = "the store", timeout: float | None = None
    ) -> Any:
        worker = self._worker
        own = worker.thread_id == threading.get_ident()
        return self._client.ask(
            "store", worker.executed if own else -1, "store", what, *args,
            what=words, timeout=timeout,
        )  # fmt: skip


def store_of(worker: Worker) -> Any:
    """The store of a worker's session."""
    store: Any = worker.shared.get(_STORE)
    if store is None:
        made = CoordinatorStore(worker) if has_coordinator(worker) else SessionStore()
        store = worker.shared.setdefault(_STORE, made)
    return store


def _waited_for(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} in the store of the process groups"


def _nobody_left(worker: Worker, what: str) -> str:
    return (
        f"worker {worker.worker_id} waits for {what}, and all other workers have ended this call "
        "without storing it"
    )


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
