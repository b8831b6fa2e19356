"""Measure what recording costs: of a span, a command, a collective; on and off; and of a look.

Workers are threads of this process. Each figure is the least of several rounds, as other programs
only ever add to it; spans, marks and commands are measured in time on the CPU. For comparison,
`torch.profiler.record_function` around nothing, with and without a profiler that runs. Prints one
JSON object, times in microseconds.

    python benchmarks/trace.py
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from discolab import Session, ccl, make_session, trace
from discolab.trace.recorder import recorder_of

ROUNDS = 7


def least(measure: Callable[[], float]) -> float:
    """The least of several measurements, in microseconds."""
    return round(min(measure() for _ in range(ROUNDS)) * 1e6, 3)


def spans(count: int) -> float:
    """Seconds of one span around nothing (a worker function)."""
    begin = time.thread_time()
    for _ in range(count):
        with trace.span("nothing"):
            pass
    return (time.thread_time() - begin) / count


def marks(count: int) -> float:
    """Seconds of one mark (a worker function)."""
    begin = time.thread_time()
    for _ in range(count):
        trace.mark("nothing")
    return (time.thread_time() - begin) / count


def torch_spans(count: int) -> float:
    """Seconds of torch's own span around nothing (a worker function)."""
    begin = time.thread_time()
    for _ in range(count):
        with record_function("nothing"):
            pass
    return (time.thread_time() - begin) / count


def collectives(count: int) -> float:
    """Seconds of one small all_reduce (a worker function)."""
    tensor = torch.ones(4)
    begin = time.perf_counter()
    for _ in range(count):
        ccl.all_reduce(tensor, out=tensor, op="max")
    return (time.perf_counter() - begin) / count


def commands_on_worker(count: int) -> float:
    """Seconds of one command within the worker's own loop (a worker function)."""
    from discolab import current_worker
    from discolab.runtime.actions import DiscoAction

    worker = current_worker()
    recorder = recorder_of(worker)
    do = worker.dispatch[DiscoAction.CALL_PACKED]
    command = (int(DiscoAction.CALL_PACKED), 0, _nothing, (), {}, 0, (_nothing.__code__, 1))
    current, executed = worker.current, worker.executed
    opened = None if recorder is None else recorder.open
    begin = time.thread_time()
    for _ in range(count):
        if recorder is not None:
            recorder.open = None
        do(command)
    taken = (time.thread_time() - begin) / count
    worker.current, worker.executed, worker.running = current, executed, True
    if recorder is not None:
        recorder.open = opened
    return taken


def _nothing() -> None:
    pass


def first(session: Session, func: Callable[[int], float], count: int) -> float:
    """What worker 0 measures."""
    values: list[Any] = session.call_packed(func, count).debug_get_from_all()
    return float(values[0])


def throughput(session: Session, count: int) -> float:
    """Seconds of one call of nothing, sent and done."""
    session.sync_all()
    begin = time.perf_counter()
    for _ in range(count):
        session.call_packed(_nothing)
    session.sync_all()
    return (time.perf_counter() - begin) / count


def measure(session: Session, count: int) -> dict[str, float]:
    """All figures in the state that the session is in."""
    return {
        "span": least(lambda: first(session, spans, count)),
        "mark": least(lambda: first(session, marks, count)),
        "command on the worker": least(lambda: first(session, commands_on_worker, count)),
        "call, sent and done": least(lambda: throughput(session, count)),
        "all_reduce of 4 numbers": least(lambda: first(session, collectives, count // 10)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    count = options.count
    found: dict[str, Any] = {}
    with make_session(options.workers, "threads", devices="cpu") as session:
        session.init_ccl("auto")
        found["off"] = measure(session, count)
        trace.start(session)
        found["on"] = measure(session, count)
        found["cost of recording"] = {
            name: round(found["on"][name] - found["off"][name], 3) for name in found["on"]
        }
        trace.collect(session)
        follower = trace.Follower(session)
        while follower.poll() or follower.behind:
            pass
        extent = follower.extent()
        found["looks"] = {
            "poll, nothing new": least(lambda: _timed(follower.poll)),
            "fold to 1000 pixels, all workers": least(
                lambda: _timed(lambda: follower.fold(*extent, 1000))
            ),
            "sample, all workers": least(lambda: _timed(lambda: session.look(trace.sample))),
            "events held": sum(map(len, follower.events.values())),
        }
        trace.stop(session)
        found["torch, no profiler"] = least(lambda: first(session, torch_spans, count))
        with trace.profile(session):
            found["torch, profiled"] = round(first(session, torch_spans, count) * 1e6, 3)
    print(json.dumps(found, indent=1))


def _timed(func: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    func()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
