"""Measure one runtime whose workers are processes, in a process of its own.

Started by engines.py; what it prints is in rounds_child.py. Everything here runs on the main
thread, which is the controller.
"""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from engines_sides import SIDES, WORKERS, Side, make_big
from rounds_child import Clock, Say, repeat, run, time_calls

AGAIN = 5  # starts after the first one, at most
BATCH = 40_000  # commands of a pipelined batch, at most


def time_start(side: Side) -> float:
    """Seconds until all workers have answered."""
    begin = Clock()
    side.start()
    side.call()
    return Clock() - begin


def time_starts(side: Side, seconds: float) -> dict[str, float | None]:
    """The first start of this process, and the median of some more; the last one is left on."""
    first, again = time_start(side), []
    while side.restarts and (len(again) < 2 or (sum(again) < seconds and len(again) < AGAIN)):
        side.stop()
        again.append(time_start(side))
    return {"first_s": first, "again_s": statistics.median(again) if again else None}


def time_pipelined(side: Side, seconds: float) -> float:
    """Commands per second, each to all workers, without waiting between; median of 3 batches."""

    def batch(count: int) -> float:
        begin = Clock()
        sent = [handle for _ in range(count) if (handle := side.send()) is not None]
        side.wait(sent)
        return Clock() - begin

    count = 50
    while (taken := batch(count)) < seconds / 4 and count < BATCH:
        count = min(BATCH, int(count * min(8.0, max(1.5, seconds / 2 / taken))))
    return count / statistics.median(batch(count) for _ in range(3))


def time_big(fetch: Callable[[], torch.Tensor], seconds: float) -> dict[str, float]:
    """Median seconds of a fetch and of a clone here, each also with a look at every element.

    The look (a sum) is there because a fetch may give memory that is filled, or mapped, only
    when it is read. The four take turns. Every clone has fresh memory, as the last was freed.
    """
    source = make_big()
    wanted = source.sum()
    if not torch.equal(fetch(), source):
        raise ValueError("the fetched tensor is not the one that the worker holds")
    acts: dict[str, Callable[[], Any]] = {
        "fetch_s": fetch,
        "clone_s": source.clone,
        "fetch_sum_s": lambda: fetch().sum(),
        "clone_sum_s": lambda: source.clone().sum(),
    }
    taken: dict[str, list[float]] = {name: [] for name in acts}
    end = Clock() + seconds
    while len(taken["fetch_s"]) < 3 or (Clock() < end and len(taken["fetch_s"]) < 30):
        for name, act in acts.items():
            begin = Clock()
            result = act()
            taken[name].append(Clock() - begin)
            if name.endswith("sum_s") and result != wanted:
                raise ValueError("the sum of the fetched tensor is wrong")
            del result  # its memory is given back outside the time taken
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(name: str, calls: int, seconds: float, say: Say) -> None:
    """Measure one side, and say all that was found after each figure.

    A figure that can't be had is left out, and told in ``errors``.
    """
    side = SIDES[name]()
    found: dict[str, Any] = {"side": name, "version": side.version, "errors": {}}
    found["start"] = time_starts(side, 3 * seconds)
    say(found)

    def small() -> None:
        if side.fetch_small() != list(range(WORKERS)):
            raise ValueError("the fetched values are not those that the workers hold")

    def noop() -> dict[str, Any]:
        return time_calls(side.call, calls, seconds)

    def others() -> dict[str, Any]:
        return {n: time_calls(act, calls, seconds) for n, act in side.other_calls().items()}

    def pipelined() -> float | None:
        return time_pipelined(side, seconds) if side.pipelines else None

    def fetch() -> dict[str, Any]:
        side.hold_small()
        return time_calls(small, calls, seconds)

    def big() -> dict[str, Any]:
        side.hold_big()
        return {way: time_big(act, 2 * seconds) for way, act in side.big_ways().items()}

    for figure in (noop, others, fetch, pipelined, big):
        try:
            found[figure.__name__] = figure()
        except Exception:
            found["errors"][figure.__name__] = traceback.format_exc()[-1000:]
        say(found)
    side.stop()


def measure_in_turns(name: str, say: Say) -> None:
    """Measure a no-op once for each line that comes in."""
    side = SIDES[name]()
    time_start(side)
    repeat(side.call, 1.0, least=10, most=500)
    for _ in sys.stdin:
        say(time_calls(side.call, calls=300, seconds=1.0))
    side.stop()


if __name__ == "__main__":
    run(__doc__ or "", SIDES, 2.0, measure, measure_in_turns)
