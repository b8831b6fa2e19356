"""The key-value store of a session's process groups, in memory.

One `SessionStore` a session, in `Worker.shared`, used by all its workers and their threads.
`_lock` guards `_data`. torch's own stores wait in C++, where nothing can interrupt them; here a
worker waits as it does for everything else.
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

_Store: Any = torch.distributed.distributed_c10d.Store  # its trampoline has no types
_STORE = "discolab.ccl.distributed.store"


class SessionStore(_Store):  # type: ignore[misc] # Any, see above
    """A store for the workers of one session. Names of methods are those that torch calls."""

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
        what = f"{', '.join(keys)} in the store of the process groups"
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
                raise CollectiveError(
                    f"worker {worker.worker_id} waits for {what}, and all other workers have "
                    "ended this call without storing it"
                )

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


def store_of(worker: Worker) -> SessionStore:
    """The store of a worker's session."""
    store: SessionStore | None = worker.shared.get(_STORE)
    if store is None:
        store = worker.shared.setdefault(_STORE, SessionStore())
    return store


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
