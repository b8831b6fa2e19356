"""torch.profiler on every worker, merged into their traces on the same clock.

A process has one profiler, so the first of its workers runs it for all of them, on its own thread.
Its events name the operating system's thread, or for kernels the call that has launched them, from
which follows whose they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from ..isolation.profiler import NOISE, Part
from ..isolation.quiet import without_lines
from ..runtime import accelerators
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.interrupts import shield
from ..runtime.session import Session
from ..runtime.worker import Worker, current_worker
from .control import tracing
from .events import CPU, DONE, GPU
from .metrics import native_id
from .recorder import CAPACITY, OWN_WORDS, recorder_of
from .result import Trace

MOST = 200_000  # events of torch that a worker keeps
_KEY = "discolab.trace.profiler"
_PAIRS = 9
# calls by which kernels are launched: cuda_runtime, xpu_driver ...
_LAUNCHES = ("runtime", "driver")


@contextmanager
def profile(
    session: Session, capacity: int = CAPACITY, timeout: float | None = None
) -> Iterator[Trace]:
    """As `tracing`, with what torch.profiler sees on each worker merged in.

    Waits until all workers profile before the block begins.

    Raises
    ------
    WorkerError
        If a profiler could not be started, for instance because one is running already.
    """
    with tracing(session, capacity, timeout, finish=_finish) as trace:
        session.fetch(session.call_packed(begin_profile), timeout=timeout)
        try:
            yield trace
        except BaseException:
            if not session.closed:
                session.call_without_result(end_profile)
            raise


def _finish(session: Session, timeout: float | None) -> None:
    session.fetch(session.call_packed(end_profile), timeout=timeout)


@worker_function(OWN_WORDS)
def begin_profile() -> None:
    """Start the profiler of this process (a worker function)."""
    worker = current_worker()
    if worker.worker_id != min(worker.peers):
        return
    activities = {ProfilerActivity.CPU}
    if accelerators.on_accelerator(worker.device):
        activities = torch.profiler.supported_activities()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with shield():
        made = torch.profiler.profile(activities=activities, experimental_config=config)
        with without_lines(NOISE):
            made.start()
        worker.shared[_KEY] = made


@worker_function(OWN_WORDS)
def end_profile() -> None:
    """Stop it, and give each worker of this process its events (a worker function)."""
    worker = current_worker()
    if worker.worker_id != min(worker.peers):
        return
    made = worker.shared.pop(_KEY, None)
    if made is None:
        return
    with shield():
        with without_lines(NOISE):
            made.stop()
        _share(made, list(worker.peers.values()))


def merge_profiler(profiler: torch.profiler.profile) -> int:
    """Merge the events of a torch.profiler that you have run yourself in this worker's trace.

    To be called on a worker that records, when the profiler has stopped; how many there were.

    Raises
    ------
    ArgumentError
        If nothing is recorded here, or the profiler has no events.
    """
    worker = current_worker()
    if recorder_of(worker) is None:
        raise ArgumentError("merge_profiler: this worker has no trace: discolab.trace.start(sess)")
    return _share(profiler, [worker])


def _share(profiler: torch.profiler.profile, workers: list[Worker]) -> int:
    inner = getattr(profiler, "profiler", None)
    results = getattr(inner, "kineto_results", None)
    if results is None:
        raise ArgumentError("merge_profiler: this profiler has no events; stop it first")
    events = results.events_of_all() if isinstance(results, Part) else results.events()
    of_worker = _by_worker(events, workers, _clocks())
    for worker in workers:
        recorder = recorder_of(worker)
        if recorder is not None:  # a new list: it may be read beside
            mine = of_worker[worker.worker_id]
            recorder.profiled = [*recorder.profiled, *mine][-MOST:]
    return sum(map(len, of_worker.values()))


def _by_worker(
    events: Iterable[Any], workers: list[Worker], shift: int
) -> dict[int, list[tuple[Any, ...]]]:
    """The events of each worker, as `Event` has them."""
    threads = {native_id(worker): worker.worker_id for worker in workers}
    placed = [worker for worker in workers if accelerators.on_accelerator(worker.device)]
    devices = {worker.device.index or 0: worker.worker_id for worker in placed}
    of_rank: dict[int, list[tuple[Any, ...]]] = {worker.worker_id: [] for worker in workers}
    launched: dict[int, int] = {}
    kernels = []
    for event in events:
        if event.device_type() != torch.profiler.DeviceType.CPU:
            kernels.append(event)
            continue
        rank = threads.get(event.device_resource_id())
        if rank is not None:
            if event.activity_type().endswith(_LAUNCHES):  # the numbers of operators are others
                launched[event.correlation_id()] = rank
            of_rank[rank].append(_plain(event, CPU, "", shift))
    for event in kernels:
        rank = launched.get(event.correlation_id(), devices.get(event.device_index()))
        if rank is not None:
            device = f"{accelerators.kind()}:{event.device_index()}"
            stream = f"{device} stream {event.device_resource_id()}"
            of_rank[rank].append(_plain(event, GPU, stream, shift))
    for mine in of_rank.values():
        mine.sort(key=lambda values: (values[3], -values[4]))
    return of_rank


def _plain(event: Any, kind: str, detail: str, shift: int) -> tuple[Any, ...]:
    begin = event.start_ns() - shift
    end = begin + max(event.duration_ns(), 1)
    return 0, kind, event.name(), begin, end, DONE, "", -1, 0, -1, [], detail, 0, "", False


def _clocks() -> int:
    """How far the profiler's clock, the time of day, is ahead of `perf_counter_ns`."""
    best = None
    for _ in range(_PAIRS):
        before, there, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        if best is None or after - before < best[0]:
            best = after - before, there - (before + after) // 2
    assert best is not None
    return best[1]
