"""Tables and the verdict for engines.py. Pure functions of `EngineResults`.

As in control_plane_report.py, a ratio is taken between two sides of one round, and the tables
show the median over the rounds with the least and the greatest.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane_report import Row, Sample, show, table

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

Figure = Callable[[Sample], float | None]


@dataclass
class EngineResults:
    """Everything that was measured: one sample is one side in one round."""

    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    turns: list[dict[str, Sample]] = field(default_factory=list)  # a no-op of two sides, in turns
    notes: list[str] = field(default_factory=list)

    def sides(self) -> list[str]:
        """The sides that gave figures, in a fixed order."""
        found = {sample["side"] for sample in self.samples}
        return [side for side in NAMES if side in found]

    def of(self, side: str, figure: Figure) -> dict[int, float]:
        """A figure of one side by round, where it was found."""
        mine = {s["round"]: figure(s) for s in self.samples if s["side"] == side}
        return {turn: value for turn, value in mine.items() if value is not None}

    def ratios(self, figure: Figure, side: str, peer: str) -> list[float]:
        """`side` / `peer`, one for each round in which both were found."""
        mine, theirs = self.of(side, figure), self.of(peer, figure)
        return [mine[turn] / theirs[turn] for turn in mine if turn in theirs]


def turn_ratios(results: EngineResults, what: str) -> list[float]:
    """Ours / TVM's of two that ran within a second, one for each turn."""
    return [turn[OURS][what] / turn[RIVAL][what] for turn in results.turns]


# -- figures -----------------------------------------------------------------------------------


def of(*path: str, scale: float = 1.0) -> Figure:
    """A number that lies at these keys of a sample."""

    def figure(sample: Sample) -> float | None:
        value: Any = sample
        for key in path:
            value = (value or {}).get(key)
        return None if value is None else float(value) * scale

    return figure


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
FETCH, FETCH_SUM = (
    of_big(operator.itemgetter("fetch_s")),
    of_big(operator.itemgetter("fetch_sum_s")),
)
SPEED = of_big(lambda way: BIG_GB / way["fetch_s"])
TO_CLONE = of_big(lambda way: way["clone_s"] / way["fetch_s"])
SUM_TO_CLONE = of_big(lambda way: way["clone_sum_s"] / way["fetch_sum_s"])


# -- the tables --------------------------------------------------------------------------------


def show_range(values: Sequence[float]) -> str:
    """Median and extremes."""
    if not values:
        return "–"
    return f"{show(statistics.median(values))} ({show(min(values))}–{show(max(values))})"


def show_ratio(ratios: Sequence[float]) -> str:
    """Median and extremes of ratios, small ones with three digits."""
    if not ratios:
        return "–"
    middle, *ends = (
        f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.4f}"
        for ratio in (statistics.median(ratios), min(ratios), max(ratios))
    )
    return f"{middle} ({'–'.join(ends)})"


def figures_table(
    results: EngineResults, head: dict[str, Figure], ratios: dict[str, Figure]
) -> str:
    """One row for each side: figures, and what discolab's processes need or do beside it."""
    rows = []
    for side in results.sides():
        row = [NAMES[side]]
        row += [show_range([*results.of(side, figure).values()]) for figure in head.values()]
        for figure in ratios.values():
            same = side == OURS
            row.append("" if same else show_ratio(results.ratios(figure, OURS, side)))
        rows.append(row)
    return table(["4 workers", *head, *ratios], rows)


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
    noop = turn_ratios(results, "median_us") or results.ratios(NOOP, OURS, RIVAL)
    for text, ratios, most in (
        ("first start, processes / TVM ProcessSession", results.ratios(FIRST, OURS, RIVAL), 1.0),
        ("start again, processes / TVM ProcessSession", results.ratios(AGAIN, OURS, RIVAL), 1.0),
        ("no-op, processes / TVM ProcessSession", noop, 1.0),
        ("no-op, processes / ipyparallel", results.ratios(NOOP, OURS, "ipyparallel"), 0.1),
    ):
        good = statistics.median(ratios) <= most if ratios else None
        rows.append((text, f"<= {most}", show_ratio(ratios), _verdict(good)))
    for text, figure in (
        ("64 MB, processes: clone / fetch", TO_CLONE),
        ("64 MB, processes: clone + sum / fetch + sum", SUM_TO_CLONE),
    ):
        found = [*results.of(OURS, figure).values()]
        good = statistics.median(found) >= 0.5 if found else None
        rows.append((text, ">= 0.5", show_ratio(found), _verdict(good)))
    return rows


def _verdict(good: bool | None) -> str:
    return "not measured" if good is None else "met" if good else "MISSED"


def turns_table(results: EngineResults) -> str:
    """The no-op of two sides that took turns."""
    rows = []
    for what, text in (("median_us", "median, µs"), ("p99_us", "99th percentile, µs")):
        sides = [show_range([turn[side][what] for turn in results.turns]) for side in (OURS, RIVAL)]
        rows.append([text, *sides, show_ratio(turn_ratios(results, what))])
    return table(["no-op", NAMES[OURS], NAMES[RIVAL], "ours / it"], rows)


def all_notes(results: EngineResults) -> list[str]:
    """What was noted in the run, and what the samples tell beside their figures."""
    notes = dict.fromkeys(results.notes)  # in order, each once
    for sample in results.samples:
        name = NAMES[sample["side"]]
        for figure, text in sample["errors"].items():
            notes[f"{name}: no figure {figure!r}: {text.strip().splitlines()[-1]}"] = None
        if "failed" in sample:
            last = sample["failed"].splitlines()[-1]
            notes[f"{name}: its process did not end well: {last}"] = None
        if sample.get("left_behind"):
            notes[f"{name}: left {sample['left_behind']} processes behind"] = None
    return list(notes)


def print_engines(results: EngineResults) -> None:
    """Print all tables, the targets last."""
    machine = results.machine
    versions = {NAMES[s["side"]]: s["version"] for s in results.samples}
    rounds = len({sample["round"] for sample in results.samples})
    print("\n# Workers in processes of their own\n")
    print("; ".join(f"{name} {version}" for name, version in versions.items()))
    loads = [sample["load"] for sample in results.samples if sample["load"] is not None]
    print(
        f"Python {machine['python']}, {machine['system']}, {machine['cores']} cores"
        + (f", load {min(loads)} to {max(loads)} as sides were started" if loads else "")
    )
    print(f"{rounds} rounds: median (min–max) over the rounds; ours is discolab, processes")
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
    print("\n## Targets\n")
    print(table(["target", "wanted", "found", "verdict"], verdicts(results)))
    for note in all_notes(results):
        print(f"\nNote: {note}")
