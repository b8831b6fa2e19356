"""Tables and the verdict for rpc.py. Pure functions of `RpcResults`."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from control_plane_report import Row, Sample, table
from engines_report import BIG_GB
from rounds_report import (
    Figure,
    Results,
    figures_table,
    of,
    print_head,
    print_notes,
    print_verdicts,
    show_range,
    show_ratio,
    verdict,
)

OURS, THREADS, TENSORPIPE, RAY = "discolab-processes", "discolab-threads", "torch-rpc", "ray"
NAMES = {
    OURS: "discolab, processes",
    THREADS: "discolab, threads",
    TENSORPIPE: "torch RPC (TensorPipe)",
    RAY: "Ray actors",
}


class RpcResults(Results):
    """What was measured; the turns are of a no-op and 64 MB of the sides that targets compare."""

    NAMES = NAMES
    OURS = OURS


# -- figures -----------------------------------------------------------------------------------


def of_ways(
    what: Callable[[dict[str, float]], float], *path: str, by: str = "call_s", scale: float = 1.0
) -> Figure:
    """A figure of the type as which 64 MB travel quickest."""

    def figure(sample: Sample) -> float | None:
        ways: Any = sample
        for key in path:
            ways = (ways or {}).get(key)
        return scale * what(min(ways.values(), key=operator.itemgetter(by))) if ways else None

    return figure


def seconds(*path: str, what: str = "call_s", scale: float = 1.0) -> Figure:
    """Seconds of the type that was quickest in just this."""
    return of_ways(operator.itemgetter(what), *path, by=what, scale=scale)


def speed(*path: str) -> Figure:
    """GB/s of the type that was quickest."""
    return of_ways(lambda way: BIG_GB / way["call_s"], *path)


START = of("start_s")
NOOP, NOOP_LATE = of("noop", "median_us"), of("noop", "p99_us")
THERE, THERE_LATE = of("there", "noop", "median_us"), of("there", "noop", "p99_us")
ALL, REMOTE, SMALL = of("all", "median_us"), of("remote", "median_us"), of("small", "median_us")
PIPELINED, PIPELINED_THERE = of("pipelined", "each_us"), of("there", "pipelined", "each_us")
MANY = of("many", "seconds")
ARGUMENT, ARGUMENT_READ = (
    seconds("argument", scale=1e3),
    seconds("argument", what="call_sum_s", scale=1e3),
)
ARGUMENT_SPEED, THERE_SPEED = speed("argument"), speed("there", "argument")
RESULT, RESULT_READ = (
    seconds("result", scale=1e3),
    seconds("result", what="call_sum_s", scale=1e3),
)
RESULT_SPEED = speed("result")
SEND, COMPUTE, BOTH = (
    of_ways(operator.itemgetter(what), "overlap", by="send_s", scale=1e3)
    for what in ("send_s", "compute_s", "both_s")
)
OVERLAP = of_ways(
    lambda way: (way["send_s"] + way["compute_s"]) / way["both_s"], "overlap", by="send_s"
)
TURN_NOOP, TURN_LATE = of("median_us"), of("p99_us")


# -- the tables --------------------------------------------------------------------------------


def turns_table(results: RpcResults) -> str:
    """The figures that the targets are about, of the sides that took turns."""
    sides = [side for side in NAMES if side in results.turns[0]]
    pairs = [(ours, TENSORPIPE) for ours in (OURS, THREADS) if {ours, TENSORPIPE} <= {*sides}]
    rows = []
    for text, figure in (
        ("no-op, median, µs", TURN_NOOP),
        ("no-op, 99th percentile, µs", TURN_LATE),
        ("64 MB argument, ms", ARGUMENT),
    ):
        row = [text]
        for side in sides:
            values = [figure(turn[side]) for turn in results.turns]
            row.append(show_range([value for value in values if value is not None]))
        row += [show_ratio(results.turn_ratios(figure, ours, peer)) for ours, peer in pairs]
        rows.append(row)
    names = [NAMES[side] for side in sides]
    return table(["", *names, *(f"{NAMES[a]} / {NAMES[b]}" for a, b in pairs)], rows)


# -- the targets -------------------------------------------------------------------------------


def verdicts(results: RpcResults) -> list[Row]:
    """Each target with what was measured, and whether it is met."""
    best = results.best_ratios
    return [
        _row("no-op, processes / TensorPipe", "<=", 1.0, best(NOOP, TURN_NOOP, OURS, TENSORPIPE)),
        _row(
            "64 MB argument, throughput, processes / TensorPipe",
            ">=",
            2.0,
            best(ARGUMENT, ARGUMENT, TENSORPIPE, OURS),
        ),
        _row("no-op, TensorPipe / threads", ">=", 10.0, best(NOOP, TURN_NOOP, TENSORPIPE, THREADS)),
        _row("no-op, Ray / threads", ">=", 10.0, results.ratios(NOOP, RAY, THREADS)),
    ]


def _row(text: str, sign: str, limit: float, found: Sequence[float]) -> Row:
    good = {"<=": operator.le, ">=": operator.ge}[sign]
    met = good(statistics.median(found), limit) if found else None
    return (text, f"{sign} {limit:g}", show_ratio(found), verdict(met))


def others(results: RpcResults) -> list[Row]:
    """Ratios that no target is about."""
    rows: list[Row] = []
    for text, figure, peer, side in (
        ("no-op, Ray / processes", NOOP, RAY, OURS),
        ("no-op worker to worker, TensorPipe / processes", THERE, TENSORPIPE, OURS),
        ("no-op worker to worker, TensorPipe / threads", THERE, TENSORPIPE, THREADS),
        ("no-op worker to worker, Ray / threads", THERE, RAY, THREADS),
        ("64 MB argument, Ray / processes", ARGUMENT, RAY, OURS),
        ("64 MB argument and reading it, TensorPipe / processes", ARGUMENT_READ, TENSORPIPE, OURS),
        ("64 MB argument and reading it, Ray / processes", ARGUMENT_READ, RAY, OURS),
        ("64 MB argument, TensorPipe / threads", ARGUMENT, TENSORPIPE, THREADS),
        ("64 MB argument, Ray / threads", ARGUMENT, RAY, THREADS),
        ("64 MB result, TensorPipe / processes", RESULT, TENSORPIPE, OURS),
        ("64 MB result and reading it, TensorPipe / processes", RESULT_READ, TENSORPIPE, OURS),
    ):
        if found := results.ratios(figure, peer, side):
            rows.append((text, show_ratio(found)))
    return rows


def print_report(results: RpcResults) -> None:
    """Print all tables, the targets last."""
    print_head("Remote calls", results)
    print("\n## No-op, round trip, µs (less is better)\n")
    head = {"median": NOOP, "99th percentile": NOOP_LATE}
    head |= {"worker to worker": THERE, "its 99th percentile": THERE_LATE}
    print(figures_table(results, head, {"ours / it": NOOP, "ours / it, worker to worker": THERE}))
    print("\n## Other small calls (less is better)\n")
    head = {"pipelined, µs each": PIPELINED, "the same, worker to worker": PIPELINED_THERE}
    head |= {"on all 4, µs": ALL, "remote + to_here, µs": REMOTE, "1 KB tensor, µs": SMALL}
    head |= {"10,000 in flight, s": MANY, "start to first answer, s": START}
    print(figures_table(results, head))
    print("\n## 64 MB of float32\n")
    head = {"argument, ms": ARGUMENT, "GB/s": ARGUMENT_SPEED, "and reading it, ms": ARGUMENT_READ}
    head |= {"worker to worker, GB/s": THERE_SPEED}
    head |= {"result, ms": RESULT, "result, GB/s": RESULT_SPEED, "and reading, ms": RESULT_READ}
    print(figures_table(results, head, {"ours / it, argument": ARGUMENT}))
    print("\n## 64 MB sent while the caller computes\n")
    head = {"send alone, ms": SEND, "compute alone, ms": COMPUTE, "both, ms": BOTH}
    print(figures_table(results, {**head, "(send + compute) / both": OVERLAP}))
    if results.turns:
        print(f"\n## In {len(results.turns)} turns of 300 no-ops and some 64 MB each\n")
        print(turns_table(results))
    print_verdicts(verdicts(results))
    if rows := others(results):
        print("\n## Other ratios of times\n")
        print(table(["", "found"], rows))
    print_notes(results)
