"""Tables and the verdict for engines.py. Pure functions of `EngineResults`."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable

from control_plane_report import Row, Sample, table
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

BIG_GB = 64 * 2**20 / 1e9
OURS, RIVAL = "discolab-processes", "tvm-processes"
NAMES = {
    "discolab-processes": "discolab, processes",
    "tvm-processes": "TVM ProcessSession",
    "discolab-sockets": "discolab, sockets",
    "tvm-sockets": "TVM SocketSession",
    "discolab-ray": "discolab, Ray",
    "ray": "Ray actors",
    "torch-rpc": "torch RPC",
    "ipyparallel": "ipyparallel",
    "nbdistributed": "nbdistributed",
}


class EngineResults(Results):
    """What was measured; the turns are of a no-op of two sides."""

    NAMES = NAMES
    OURS = OURS


# -- figures -----------------------------------------------------------------------------------


def of_big(what: Callable[[dict[str, float]], float]) -> Figure:
    """A figure of the fetch of 64 MB: of the quickest way, reading included."""

    def figure(sample: Sample) -> float | None:
        ways = sample.get("big")
        return what(ways[quickest(sample)]) if ways else None

    return figure


def quickest(sample: Sample) -> str:
    """The way to fetch 64 MB and read them that was quickest."""
    ways: dict[str, dict[str, float]] = sample["big"]
    return min(ways, key=lambda way: ways[way]["fetch_sum_s"])


FIRST, AGAIN = of("start", "first_s"), of("start", "again_s")
NOOP, NOOP_LATE = of("noop", "median_us"), of("noop", "p99_us")
PYTHON = of("others", "python", "median_us")
SMALL, SMALL_LATE = of("fetch", "median_us"), of("fetch", "p99_us")
PIPELINED = of("pipelined")
TURN_NOOP, TURN_LATE = of("median_us"), of("p99_us")
FETCH, FETCH_SUM = (
    of_big(operator.itemgetter("fetch_s")),
    of_big(operator.itemgetter("fetch_sum_s")),
)
SPEED = of_big(lambda way: BIG_GB / way["fetch_s"])
TO_CLONE = of_big(lambda way: way["clone_s"] / way["fetch_s"])
SUM_TO_CLONE = of_big(lambda way: way["clone_sum_s"] / way["fetch_sum_s"])


# -- the tables --------------------------------------------------------------------------------


def big_table(results: EngineResults) -> str:
    """The fetch of 64 MB."""
    head = {
        "fetch, ms": lambda s: _scaled(FETCH(s), 1e3),
        "GB/s": SPEED,
        "clone / fetch": TO_CLONE,
        "fetch + sum, ms": lambda s: _scaled(FETCH_SUM(s), 1e3),
        "clone + sum / fetch + sum": SUM_TO_CLONE,
    }
    rows = []
    for side in results.sides():
        ways = {quickest(s) for s in results.samples if s["side"] == side and s.get("big")}
        row = [NAMES[side], " or ".join(sorted(ways)) or "–"]
        row += [show_range([*results.of(side, figure).values()]) for figure in head.values()]
        rows.append(row)
    return table(["4 workers", "as", *head], rows)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# -- the targets -------------------------------------------------------------------------------


def verdicts(results: EngineResults) -> list[Row]:
    """Each target with what was measured, and whether it is met."""
    rows: list[Row] = []
    noop = results.best_ratios(NOOP, TURN_NOOP, OURS, RIVAL)
    for text, ratios, most in (
        ("first start, processes / TVM ProcessSession", results.ratios(FIRST, OURS, RIVAL), 1.0),
        ("start again, processes / TVM ProcessSession", results.ratios(AGAIN, OURS, RIVAL), 1.0),
        ("no-op, processes / TVM ProcessSession", noop, 1.0),
        ("no-op, processes / ipyparallel", results.ratios(NOOP, OURS, "ipyparallel"), 0.1),
    ):
        good = statistics.median(ratios) <= most if ratios else None
        rows.append((text, f"<= {most}", show_ratio(ratios), verdict(good)))
    for text, figure in (
        ("64 MB, processes: clone / fetch", TO_CLONE),
        ("64 MB, processes: clone + sum / fetch + sum", SUM_TO_CLONE),
    ):
        found = [*results.of(OURS, figure).values()]
        good = statistics.median(found) >= 0.5 if found else None
        rows.append((text, ">= 0.5", show_ratio(found), verdict(good)))
    return rows


def turns_table(results: EngineResults) -> str:
    """The no-op of two sides that took turns."""
    rows = []
    for figure, text in ((TURN_NOOP, "median, µs"), (TURN_LATE, "99th percentile, µs")):
        values = {side: [figure(turn[side]) for turn in results.turns] for side in (OURS, RIVAL)}
        sides = [show_range([v for v in found if v is not None]) for found in values.values()]
        rows.append([text, *sides, show_ratio(results.turn_ratios(figure, OURS, RIVAL))])
    return table(["no-op", NAMES[OURS], NAMES[RIVAL], "ours / it"], rows)


def print_engines(results: EngineResults) -> None:
    """Print all tables, the targets last."""
    print_head("Workers in processes of their own", results)
    print("\n## Start until all have answered, s (less is better)\n")
    print(figures_table(results, {"first": FIRST, "again": AGAIN}, {"ours / it, first": FIRST}))
    print(
        "\n## No-op on all and wait for all, µs (less is better); commands per second (more is)\n"
    )
    print(
        figures_table(
            results,
            {
                **{"median": NOOP, "99th percentile": NOOP_LATE},
                **{"Python function": PYTHON, "pipelined / s": PIPELINED},
            },
            {"ours / it, median": NOOP, "ours / it, pipelined": PIPELINED},
        )
    )
    if results.turns:
        print(f"\n## The no-op of two, in {len(results.turns)} turns of 300 calls each\n")
        print(turns_table(results))
    print("\n## Fetch of a number from each, µs (less is better)\n")
    print(
        figures_table(
            results, {"median": SMALL, "99th percentile": SMALL_LATE}, {"ours / it": SMALL}
        )
    )
    print("\n## Fetch of 64 MB of float32 from a worker in another process\n")
    print(big_table(results))
    print_verdicts(verdicts(results))
    print_notes(results)
