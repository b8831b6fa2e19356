"""The frame of a child that measures one side: its command line, its clock, and what it tells.

It prints the figures so far as one JSON object on one line, again after each figure: a runtime
that takes the process down with it leaves those before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

Say = Callable[[dict[str, Any]], None]

Clock = time.perf_counter


def repeat(act: Callable[[], Any], seconds: float, least: int, most: int) -> list[float]:
    """Sorted seconds of each of `least` to `most` calls of `act`, as many as fit in `seconds`."""
    taken: list[float] = []
    end = Clock() + seconds
    while len(taken) < most and (len(taken) < least or Clock() < end):
        begin = Clock()
        act()
        taken.append(Clock() - begin)
    return sorted(taken)


def time_calls(act: Callable[[], Any], calls: int, seconds: float) -> dict[str, float]:
    """Median and 99th percentile, in microseconds, after a warm-up."""
    repeat(act, seconds / 4, least=10, most=300)
    taken = repeat(act, seconds, least=50, most=calls)
    middle, late = statistics.median(taken), taken[int(len(taken) * 0.99)]
    return {"median_us": middle * 1e6, "p99_us": late * 1e6, "calls": len(taken)}


def run(
    about: str,
    sides: Iterable[str],
    seconds: float,
    measure: Callable[[str, int, float, Say], None],
    measure_in_turns: Callable[[str, Say], None],
) -> None:
    """Measure as the command line says.

    Parameters
    ----------
    seconds
        For each figure, if the command line does not say.
    measure
        Called with the side, the most calls to time one by one, the seconds, and what tells.
    measure_in_turns
        Called with the side and what tells; measures once for each line that comes in.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("side", choices=sides)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=seconds, help="for each figure, about")
    parser.add_argument("--turns", action="store_true", help="measure once a line of input")
    args = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # what the runtimes write must not come between the figures

    def say(found: dict[str, Any]) -> None:
        os.write(out, (json.dumps(found) + "\n").encode())

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    with tempfile.TemporaryDirectory(prefix="discolab-benchmark-") as folder:
        tempfile.tempdir = folder  # for keys
        os.environ["IPYTHONDIR"] = folder  # ipyparallel writes its profile there
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if args.turns:
            measure_in_turns(args.side, say)
        else:
            measure(args.side, args.calls, args.seconds, say)
    sys.stdout.flush()
