"""torch's profiler, of which a process has one: worker threads share a run of it.

The first worker that starts it has all threads recorded, the last one that stops it ends the run.
Each gets of the run what happened on threads that are no other worker's, from its own start to its
own stop. What it gets it waits for when it asks for it, not when it stops; whoever waits longer
than `_PATIENCE` seconds for others ends the run for all.

`_lock` guards `_run`, `_runs`, `_threads` and what is in them; it is held while torch starts and
stops. Of a run of all threads torch says on each of them that no profiler is enabled: `shared`
tells who is.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..runtime.errors import SessionError, WaitTimeoutError
from ..runtime.failures import name_ranks
from ..runtime.interrupts import reentrant_lock, waiter_here
from ..runtime.restart import at_replaced
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches
from .quiet import without_lines
from .table import Row, Treatment

_PATIENCE = 60.0  # seconds
NOISE = (b"USDT:", b"must run in same thread as registerClient")  # C++ prints it at each start
_LOOK = 0.005  # seconds between two looks of a thread that can't be woken
_SETTINGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")

shared: set[Worker] = set()
"""The workers that profile in a shared run."""

_lock = reentrant_lock()


class _Run:
    """One time that torch's profiler runs, for one worker or more.

    Attributes
    ----------
    settings
        What the first one wants to have recorded; None: a configuration of its own, for it alone.
    joined
        The workers that have not stopped, and since when each has been recorded; None: it has only
        prepared.
    threads
        Of all workers of the process that have lived meanwhile, and the main one, by their numbers
        in events.
    result
        Of torch, once the run has ended.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.joined: dict[Worker, int | None] = {}
        self.left: set[Worker] = set()
        self.threads = {threading.main_thread().native_id, *_threads.values()}
        self.started = False
        self.waiting: set[Worker] = set()
        self.result: Any = None

    def await_end(self, disable: Callable[[], Any]) -> None:
        """Wait until all have stopped, not for ever; then the run has ended."""
        waiter, until = waiter_here(), time.monotonic() + _PATIENCE
        others = sorted(peer.worker_id for peer in list(self.joined))
        try:
            if isinstance(waiter, Worker):
                self.waiting.add(waiter)
                what = f"{name_ranks(others)} to stop torch's profiler"
                waiter.wait_for(lambda: self.result is not None, what, _PATIENCE)
            while self.result is None and time.monotonic() < until:
                time.sleep(_LOOK)
        except WaitTimeoutError:
            pass
        finally:
            if isinstance(waiter, Worker):
                self.waiting.discard(waiter)
        with _lock:
            self.end(disable)

    def end(self, disable: Callable[[], Any]) -> None:
        """Stop torch's profiler, if nobody has; under the lock."""
        global _run
        if self.result is None:
            with without_lines(NOISE):
                self.result = disable()
            shared.difference_update(self.joined)
            if _run is self:
                _run = None
        for worker in list(self.waiting):
            worker.wake()


_run: _Run | None = None
_runs: dict[Worker, _Run] = {}  # of each worker that has not stopped
_threads: dict[Worker, int] = {}  # of all sessions, by the number that is in events
_elsewhere = False  # whether the notebook profiles
_torchs: list[Callable[[], Any]] = []  # what ends torch's profiler


def _enter(worker: Worker) -> None:
    with _lock:
        _threads[worker] = thread = threading.get_native_id()
        if _run is not None:
            _run.threads.add(thread)


def _end(worker: Worker) -> None:
    with _lock:
        _threads.pop(worker, None)
        _leave(worker)


def _leave(worker: Worker) -> None:
    """A worker that ends has stopped."""
    with _lock:
        run = _runs.pop(worker, None)
        if run is not None:
            run.joined.pop(worker, None)
            shared.discard(worker)
            if not run.joined:
                run.end(_torchs[-1])


def _replaced(_: Worker) -> None:
    """A worker has a lost one's place: if that was left behind as it profiled, it has stopped.

    A run for it alone is its thread's, and goes on until that ends.
    """
    for worker, run in _runs.copy().items():
        if worker.ended and run.settings is not None:
            _leave(worker)


at_replaced.append(_replaced)


def _after_fork() -> None:
    """A child has no profiler, and must not wait for a thread that only its parent has."""
    global _lock, _run, _elsewhere
    _lock, _run, _elsewhere = reentrant_lock(), None, False
    shared.clear()
    _runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Part:
    """What a worker has of a run; torch's `_ProfilerResult` but for the events of others."""

    def __init__(
        self, run: _Run, worker: Worker, since: int, until: int, disable: Callable[[], Any]
    ) -> None:
        self._run, self._worker, self._disable = run, worker, disable
        self._since, self._until = since, until  # nanoseconds of the clock, as in events
        self._own = _threads.get(worker)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ended(), name)

    def events(self) -> list[Any]:
        """Those of this worker's time that no other worker's thread has made."""
        result = self._ended()
        others = self._run.threads - {self._own}
        return [
            event
            for event in result.events()
            if event.device_resource_id() not in others
            and self._since <= event.start_ns() <= self._until
        ]

    def events_of_all(self) -> list[Any]:
        """Those of all threads, for as long as the run has lasted."""
        return list(self._ended().events())

    def _ended(self) -> Any:
        self._run.await_end(self._disable)
        return self._run.result


def _join(worker: Worker, settings: Any) -> _Run:
    """The run that a worker's profile is part of; under the lock.

    Raises
    ------
    SessionError
        If that can't be.
    """
    global _run
    if _elsewhere or (_run is not None and None in (_run.settings, settings)):
        raise SessionError(
            "torch's profiler is running on another thread, for that alone; a process has only "
            "one. Start it on one worker: with profile() if rank == 0 else "
            "contextlib.nullcontext(), or without an experimental_config"
        )
    if _run is None:
        _run = _Run(settings)
    elif settings != _run.settings:
        raise SessionError(
            f"torch's profiler is running for workers that record {_run.settings}, and worker "
            f"{worker.worker_id} wants {settings} ({', '.join(_SETTINGS)}): a process has only one "
            "profiler, so give all workers the same arguments, or use engine='processes'"
        )
    _run.joined[worker] = None
    _runs[worker] = _run
    return _run


def _profiler(module: ModuleType, patches: Patches) -> None:
    kind = module.profile
    plain = module._ExperimentalConfig().__getstate__()

    def prepare_over(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(prepare)
        def prepare_or_join(self: Any) -> None:
            global _elsewhere
            worker = current_worker_or_none()
            if worker is None:
                with _lock:
                    if _run is not None:
                        raise SessionError(
                            "workers are using torch's profiler, of which a process has only one: "
                            "wait for them first (sess.sync_all())"
                        )
                    prepare(self)
                    _elsewhere = True
                return
            before = _run
            if before is not None and worker in before.left:
                before.await_end(_torchs[-1])
            own = self.experimental_config.__getstate__() != plain
            settings = None if own else [getattr(self, name) for name in _SETTINGS]
            with _lock:
                run = _join(worker, settings)
                if len(run.joined) == 1 and not run.started:
                    if not own:
                        self.experimental_config = module._ExperimentalConfig(
                            profile_all_threads=True
                        )
                    with without_lines(NOISE):
                        prepare(self)
            self.entered = True

        return prepare_or_join

    def start_over(start: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(start)
        def start_or_join(self: Any) -> None:
            worker = current_worker_or_none()
            if worker is None:
                start(self)
                return
            if worker not in _runs:  # what should have prepared it has failed
                self._prepare_trace()
            run = _runs[worker]
            with _lock:
                if not run.started:
                    run.started = True
                    if run.settings is not None:
                        self.experimental_config = module._ExperimentalConfig(
                            profile_all_threads=True
                        )
                    with without_lines(NOISE):
                        start(self)
                run.joined[worker] = time.time_ns()
                shared.add(worker)
            self.profiling_start_time_ns = time.perf_counter_ns()

        return start_or_join

    def disable_over(disable: Callable[[], Any]) -> Callable[[], Any]:
        _torchs[:] = [disable]

        @functools.wraps(disable)
        def disable_or_leave() -> Any:
            global _elsewhere
            worker = current_worker_or_none()
            with _lock:
                run = None if worker is None else _runs.pop(worker, None)
                if worker is not None and run is None and worker.ended:  # what runs is of others
                    raise SessionError("this worker was replaced by another one while it profiled")
                if worker is None or run is None:
                    _elsewhere = _elsewhere and worker is not None
                    return disable()
                since = run.joined.pop(worker, None)
                run.left.add(worker)
                shared.discard(worker)
                part = Part(run, worker, since or 0, time.time_ns(), disable)
                if not run.joined:
                    run.end(disable)
                return part

        return disable_or_leave

    patches.replace(kind, "_prepare_trace", prepare_over)
    patches.replace(kind, "_start_trace", start_over)
    patches.replace(module, "_disable_profiler", disable_over)


table.add(
    Row(
        state="`torch.profiler`",
        treatment=Treatment.SHARED,
        meaning="Workers profile at the same time; each gets what its own threads did. They must "
        "ask for the same (`record_shapes`, `with_stack`, …), since the process has one profiler; "
        "an `experimental_config` is for one worker alone. A trace that is exported has all "
        "threads. What a worker asks of its profile waits until the others have stopped theirs.",
        test="tests/ccl/test_dist_limits.py::test_workers_profile_at_the_same_time",
        on_import={"torch.autograd.profiler": _profiler},
        enter=_enter,
        leave=_end,
    )
)
