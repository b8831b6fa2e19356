"""Measure one engine, in a process of its own, for gil.py; prints one JSON object on one line.

Whether the interpreter lock is on is said by `PYTHON_GIL`, also to worker processes.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import gil_work
import torch

import discolab

WARM_UP = 200  # calls before any are timed
BATCHES = 5


def programs(session: discolab.Session, seconds: float) -> dict[str, float]:
    """How much all workers together do a second."""
    found = {}
    measures: dict[str, Callable[[float], float]] = {
        "train_32": functools.partial(gil_work.train, 32),
        "train_256": functools.partial(gil_work.train, 256),
        "decode": gil_work.decode,
        "load": gil_work.load,
    }
    for name, measure in measures.items():
        found[name] = sum(session.call_packed(measure, seconds).debug_get_from_all())
    return found


def collectives(session: discolab.Session, seconds: float) -> dict[str, float]:
    """Seconds of one all_reduce."""
    found = {}
    for name, size in (("all_reduce_1k", 256), ("all_reduce_1m", 1 << 18)):
        rates = session.call_packed(gil_work.all_reduce, size, seconds / 2).debug_get_from_all()
        found[name] = 1 / min(rates)
    return found


def control_plane(session: discolab.Session, calls: int) -> dict[str, float]:
    """Seconds of a no-op and a sync of all, the median; and of one of many no-ops."""
    call = functools.partial(session.call_packed, gil_work.noop)
    for _ in range(WARM_UP):
        call()
        session.sync_all()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        session.sync_all()
        times.append(time.perf_counter() - begin)
    batches = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(5 * calls):
            call()
        session.sync_all()
        batches.append((time.perf_counter() - begin) / (5 * calls))
    return {"noop": statistics.median(times), "pipelined": statistics.median(batches)}


def main() -> None:
    """Measure the engine that is named, with so many workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["threads", "processes"])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--calls", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with discolab.make_session(args.workers, args.engine, devices="cpu") as session:
        found: dict[str, Any] = programs(session, args.seconds)
        if args.workers > 1:
            found |= collectives(session, args.seconds)
            found |= control_plane(session, args.calls)
    on = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(json.dumps({**found, "lock": on, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
