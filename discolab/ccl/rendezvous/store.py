"""The key-value store of a session, as torch's process groups see it.

Where workers are threads, all of a session and their threads use one `SessionStore`, in
`Worker.shared`; where they have processes of their own each has a `CoordinatorStore`, and the
coordinator keeps everything. torch's own stores wait in C++, where nothing can interrupt them; here
a worker waits as it does for everything else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d

from ...runtime.errors import CollectiveError, SessionError, WaitTimeoutError
from ...runtime.interrupts import TICK, plain_lock, reentrant_lock
from ...runtime.worker import Worker, current_worker_or_none
from ..call import of_script
from ..coordinator import protocol
from ..coordinator.store import SETTLED, KeyValues
from .client import CoordinatorClient, client_of, has_coordinator

_Store: Any = torch.distributed.distributed_c10d.Store  # its trampoline has no types
_STORE = "discolab.ccl.distributed.store"


class WorkerStore(_Store):  # type: ignore[misc] # Any, see above
    """What torch calls, by the names that it calls; a store adds how it asks and how it waits."""

    def _ask(self, what: str, keys: Sequence[str], *args: Any) -> Any:
        """Do what a method of `KeyValues` does."""
        raise NotImplementedError

    def _wait(self, what: str, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        """As `_ask`, but wait until all keys are there."""
        raise NotImplementedError

    def set(self, key: str, value: Any) -> None:
        """Store a value, and wake the threads that wait for it."""
        self._ask("set", [key], [_as_bytes(value)])

    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first; the sum."""
        return int(self._ask("add", [key], value))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Store a value if the present one is as expected; the value that is there then."""
        values = _as_bytes(expected_value), _as_bytes(desired_value)
        return bytes(self._ask("compare_set", [key], *values))

    def append(self, key: str, value: Any) -> None:
        """Put bytes behind those that are there."""
        self._ask("append", [key], _as_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys; waits until there are all."""
        return [bytes(value) for value in self._wait("get", list(keys), self.timeout)]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Store several values."""
        self._ask("set", list(keys), [_as_bytes(value) for value in values])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there; does not wait for them."""
        return bool(self._ask("check", list(keys)))

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch calls
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", [key]))

    delete_key = deleteKey

    def getNumKeys(self) -> int:  # noqa: N802 - the name that torch calls
        """How many keys there are."""
        return int(self._ask("count", []))

    num_keys = getNumKeys

    def has_extended_api(self) -> bool:
        """That there are append, multi_get and multi_set."""
        return True

    def clone(self) -> WorkerStore:
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
        self._wait("wait", list(keys), timeout or self.timeout)


class SessionStore(WorkerStore):
    """A store for workers of one process, in memory. `_lock` guards `_values`.

    `_waiting` has of each worker that waits the keys, and since when; each changes its own entry.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = KeyValues()
        self._lock = plain_lock()
        self._waiting: dict[Worker, tuple[Sequence[str], float]] = {}

    def _ask(self, what: str, keys: Sequence[str], *args: Any) -> Any:
        keys = _of_script(current_worker_or_none(), keys)
        with self._lock:
            answer = getattr(self._values, what)(keys, *args)
        for worker in tuple(self._waiting):
            worker.wake()
        return answer

    def _wait(self, what: str, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        worker, words = current_worker_or_none(), _waited_for(keys)
        seconds, keys = timeout.total_seconds(), _of_script(worker, keys)
        try:
            if worker is None or worker.thread_id != threading.get_ident():
                self._poll(keys, seconds, words)
            else:
                self._wait_on_worker(worker, keys, seconds, words)
        except WaitTimeoutError as exc:
            raise torch.distributed.DistStoreError(str(exc)) from None
        return self._values.get(keys) or ()

    def _wait_on_worker(
        self, worker: Worker, keys: Sequence[str], seconds: float, words: str
    ) -> None:
        def check() -> None:
            others = [peer for peer in worker.peers.values() if peer is not worker]
            left = [p for p in others if not (p.ended or p.executed > worker.executed)]
            before = time.monotonic() - SETTLED  # they have waited since, all at once
            if left and (len(left) == len(others) or not self._in_vain([worker, *left], before)):
                return
            if not self._values.check(keys):
                raise CollectiveError(_nobody_left(worker, words))

        self._waiting[worker] = keys, time.monotonic()
        try:
            worker.wait_for(lambda: self._values.check(keys), words, seconds, check)
        finally:
            self._waiting.pop(worker, None)

    def _in_vain(self, workers: Sequence[Worker], before: float) -> bool:
        """Whether all of them wait since `before`, for keys that are not there."""
        waits = [self._waiting.get(worker) for worker in workers]
        return all(
            wait is not None and wait[1] <= before and not self._values.check(wait[0])
            for wait in waits
        )

    def _poll(self, keys: Sequence[str], seconds: float, words: str) -> None:
        """Wait on a thread that is no worker's own."""
        deadline = time.monotonic() + seconds
        while not self._values.check(keys):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"gave up after {seconds:g} s waiting for {words}")
            time.sleep(TICK / 10)


class CoordinatorStore(WorkerStore):
    """A store for one of the workers of several processes."""

    def __init__(self, client: CoordinatorClient) -> None:
        super().__init__()
        self._client = client

    def _ask(self, what: str, keys: Sequence[str], *args: Any) -> Any:
        keys = _of_script(self._client.worker, keys)
        return self._client.ask(
            protocol.STORE, self._ordinal(), "store", what, keys, *args, what="the store"
        )

    def _wait(self, what: str, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        words, keys = _waited_for(keys), _of_script(self._client.worker, keys)
        try:
            values: Sequence[bytes] | None = self._client.ask(
                protocol.STORE, self._ordinal(), "store", what, keys,
                what=words, timeout=timeout.total_seconds(),
            )  # fmt: skip
        except WaitTimeoutError as exc:
            raise torch.distributed.DistStoreError(str(exc)) from None
        if values is None:
            raise CollectiveError(_nobody_left(self._client.worker, words))
        return values

    def _ordinal(self) -> int:
        """Of the worker's command; -1 on a thread that is not its own."""
        worker = self._client.worker
        return worker.executed if worker.thread_id == threading.get_ident() else -1


class GroupStore(WorkerStore):
    """Where the members of one process group find each other, at the coordinator.

    Used on the conductor's thread, and the library's own. Once it is `connected`, whether anybody
    waits for the connection says nothing any more.

    Attributes
    ----------
    seconds
        What the members are given to connect.
    unwanted
        Whether nobody waits for the connection any more.
    """

    connected = False

    def __init__(
        self, client: CoordinatorClient, prefix: str, seconds: float, unwanted: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._client, self._prefix, self.seconds = client, prefix, seconds
        self.unwanted = unwanted

    def _ask(self, what: str, keys: Sequence[str], *args: Any) -> Any:
        return self._client.ask(
            protocol.STORE, -1, "groups", what, [self._prefix + key for key in keys], *args,
            what="the other workers to connect",
            timeout=self.seconds,
            wanted=lambda: self.connected or not self.unwanted(),
        )  # fmt: skip

    def _wait(self, what: str, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        values: Sequence[bytes] = self._ask(what, keys)
        return values

    def has_extended_api(self) -> bool:
        """That the library gets one key at a time, as from torch's own simplest store."""
        return False


class SharedValues(KeyValues):
    """Keys and values with which the members of one process group find each other."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition(reentrant_lock())


class LocalGroupStore(WorkerStore):
    """As `GroupStore`, for one of the members of a process group within this process."""

    connected = False

    def __init__(self, values: SharedValues, seconds: float, unwanted: Callable[[], bool]) -> None:
        super().__init__()
        self._values, self.seconds, self.unwanted = values, seconds, unwanted

    def _ask(self, what: str, keys: Sequence[str], *args: Any) -> Any:
        with self._values.changed:
            answer = getattr(self._values, what)(keys, *args)
            self._values.changed.notify_all()
        return answer

    def _wait(self, what: str, keys: Sequence[str], timeout: timedelta) -> Sequence[bytes]:
        words, deadline = "the other workers to connect", time.monotonic() + self.seconds
        with self._values.changed:
            while (values := self._values.get(keys)) is None:
                self._values.changed.wait(TICK)
                if not self.connected and self.unwanted():
                    raise SessionError(f"nobody waits for {words} any more")
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"gave up after {self.seconds:g} s waiting for {words}")
        return values

    def has_extended_api(self) -> bool:
        return False


def store_of(worker: Worker) -> Any:
    """The store of a worker's session."""
    store: Any = worker.shared.get(_STORE)
    if store is None:
        made = CoordinatorStore(client_of(worker)) if has_coordinator(worker) else SessionStore()
        store = worker.shared.setdefault(_STORE, made)
    return store


def _of_script(worker: Worker | None, keys: Sequence[str]) -> Sequence[str]:
    """Keys of a script are its own: at torchrun each has a new store."""
    return keys if worker is None else [of_script(worker, key) for key in keys]


def _waited_for(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} in the store of the process groups"


def _nobody_left(worker: Worker, what: str) -> str:
    return (
        f"worker {worker.worker_id} waits for {what}, and all other workers have ended this call "
        "without storing it, or wait in the store themselves"
    )


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
