"""Measure one runtime, in a process of its own, with one number of workers.

Started by control_plane.py; prints one JSON object on one line. All state is local to the
process. Everything here runs on the main thread, which is the controller.

The two runtimes give the same interface to what is measured: a session that can sync all
workers and shut down, and no-op functions by kind:

- ``packed``: a function of the runtime, by its global name (``runtime.disco.worker_id``), held
  as a DPackedFunc. In TVM it is written in C++, in discolab in Python.
- ``python``: a function of the user, written in Python. discolab takes it as it is; TVM must
  be given it by a registered name.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 200  # calls before any are timed
STARTS = 10  # sessions made after the first one
PACKED = "runtime.disco.worker_id"
PYTHON = "control_plane.noop"

Start = Callable[[int], Any]
Noops = Callable[[Any], dict[str, Callable[[], Any]]]


def noop() -> None:
    """What the workers are asked to do."""


def load_discolab() -> tuple[Start, Noops, str]:
    """How to start a session of discolab, its no-ops, and the version."""
    import discolab

    def noops(session: Any) -> dict[str, Callable[[], Any]]:
        return {
            "python": functools.partial(session.call_packed, noop),
            "packed": session.get_global_func(PACKED),
        }

    return discolab.ThreadedSession, noops, discolab.__version__


def load_disco() -> tuple[Any, str]:
    """TVM's module of Disco and the version; the wheel has it only if libraries come before."""
    import tvm_ffi  # noqa: F401  # the libraries need it

    spec = importlib.util.find_spec("tvm")
    assert spec is not None
    assert spec.origin is not None
    for name in ("libtvm_runtime.*", "libtvm_runtime_extra.*"):
        for path in sorted(Path(spec.origin).parent.rglob(name)):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import tvm
    from tvm.runtime import disco

    return disco, tvm.__version__


def load_tvm() -> tuple[Start, Noops, str]:
    """The same of TVM."""
    import tvm_ffi

    disco, version = load_disco()
    tvm_ffi.register_global_func(PYTHON)(noop)

    def noops(session: Any) -> dict[str, Callable[[], Any]]:
        return {
            "python": session.get_global_func(PYTHON),
            "packed": session.get_global_func(PACKED),
        }

    return disco.ThreadedSession, noops, version


def time_start(start: Start, workers: int) -> tuple[float, Any]:
    """Milliseconds until a new session's workers have all answered, and the session."""
    begin = time.perf_counter()
    session = start(workers)
    session._sync_all()
    return (time.perf_counter() - begin) * 1e3, session


def time_latency(call: Callable[[], Any], sync: Callable[[], Any], calls: int) -> list[float]:
    """Microseconds of each call + sync of all workers, sorted."""
    clock = time.perf_counter
    for _ in range(WARM_UP):
        call()
        sync()
    taken = []
    for _ in range(calls):
        begin = clock()
        call()
        sync()
        taken.append((clock() - begin) * 1e6)
    return sorted(taken)


def time_pipelined(call: Callable[[], Any], sync: Callable[[], Any], calls: int) -> float:
    """Commands per second when the controller does not wait between them; median of 3."""
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        sync()
        found.append(calls / (time.perf_counter() - begin))
    return statistics.median(found)


def measure(side: str, workers: int, calls: int) -> dict[str, Any]:
    """All figures of one side for one number of workers."""
    start, noops, version = {"discolab": load_discolab, "tvm": load_tvm}[side]()
    first, session = time_start(start, workers)
    again = []
    for _ in range(STARTS):
        session.shutdown()
        taken, session = time_start(start, workers)
        again.append(taken)
    found: dict[str, Any] = {
        "side": side,
        "version": version,
        "workers": workers,
        "start_first_ms": first,
        "start_again_ms": statistics.median(again),
    }
    for kind, call in noops(session).items():
        latency = time_latency(call, session._sync_all, calls)
        found[kind] = {
            "median_us": statistics.median(latency),
            "p99_us": latency[int(len(latency) * 0.99)],
            "per_second": time_pipelined(call, session._sync_all, 10 * calls),
        }
    session.shutdown()
    return found


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("side", choices=("discolab", "tvm"))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--core", type=int, help="run on this core only")
    args = parser.parse_args()
    if args.core is not None:  # before any thread is made: threads inherit it
        os.sched_setaffinity(0, {args.core})
    print(json.dumps(measure(args.side, args.workers, args.calls)), flush=True)


if __name__ == "__main__":
    main()
