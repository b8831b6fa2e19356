"""Tables and the verdict for rpc.py. Pure functions of `RpcResults`.

As in engines_report.py, a ratio is taken between two sides of one round, and the tables show the
median over the rounds with the least and the greatest. The tables are Markdown.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane_report import Row, Sample, table
from engines_report import BIG_GB, Figure, of, show_range, show_ratio

OURS, THREADS, TENSORPIPE, RAY = "discolab-processes", "discolab-threads", "torch-rpc", "ray"
NAMES = {
    OURS: "discolab, processes",
    THREADS: "discolab, threads",
    TENSORPIPE: "torch RPC (TensorPipe)",
    RAY: "Ray actors",
}


@dataclass
class RpcResults:
    """Everything that was measured: one sample is one side in one round."""

    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    turns: list[dict[str, Sample]] = field(default_factory=list)  # each side once, in turns
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

    def turn_ratios(self, figure: Figure, side: str, peer: str) -> list[float]:
        """`side` / `peer` of two that ran within a second or two, one for each turn."""
        pairs = [(figure(turn[side]), figure(turn[peer])) for turn in self.turns if side in turn]
        return [mine / theirs for mine, theirs in pairs if mine and theirs]

    def best_ratios(self, figure: Figure, side: str, peer: str) -> list[float]:
        """Those of the turns, where the two took turns; else those of the rounds."""
        if any({side, peer} <= turn.keys() for turn in self.turns):
            return self.turn_ratios(figure, side, peer)
        return self.ratios(figure, side, peer)


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
TURN_NOOP, TURN_LATE, TURN_ARGUMENT = of("median_us"), of("p99_us"), ARGUMENT


# -- the tables --------------------------------------------------------------------------------


def figures_table(
    results: RpcResults, head: dict[str, Figure], ratios: dict[str, Figure] | None = None
) -> str:
    """One row for each side: figures, and discolab's processes beside it (ours / it)."""
    rows = []
    for side in results.sides():
        row = [NAMES[side]]
        row += [show_range([*results.of(side, figure).values()]) for figure in head.values()]
        for figure in (ratios or {}).values():
            row.append("" if side == OURS else show_ratio(results.ratios(figure, OURS, side)))
        rows.append(row)
    return table(["4 workers", *head, *(ratios or {})], rows)


def turns_table(results: RpcResults) -> str:
    """The figures that the targets are about, of the sides that took turns."""
    sides = [side for side in NAMES if side in results.turns[0]]
    pairs = [(ours, TENSORPIPE) for ours in (OURS, THREADS) if {ours, TENSORPIPE} <= {*sides}]
    rows = []
    for text, figure in (
        ("no-op, median, µs", TURN_NOOP),
        ("no-op, 99th percentile, µs", TURN_LATE),
        ("64 MB argument, ms", TURN_ARGUMENT),
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
    rows: list[Row] = []
    turns = bool(results.turns)
    noop, argument = (TURN_NOOP, TURN_ARGUMENT) if turns else (NOOP, ARGUMENT)
    most = results.best_ratios(noop, OURS, TENSORPIPE)
    rows.append(_row("no-op, processes / TensorPipe", "<= 1.0", most, operator.le, 1.0))
    for text, wanted, ratios in (
        ("64 MB argument, throughput, processes / TensorPipe", 2.0, (argument, TENSORPIPE, OURS)),
        ("no-op, TensorPipe / threads", 10.0, (noop, TENSORPIPE, THREADS)),
    ):
        found = results.best_ratios(*ratios)
        rows.append(_row(text, f">= {wanted:g}", found, operator.ge, wanted))
    found = results.ratios(NOOP, RAY, THREADS)
    rows.append(_row("no-op, Ray / threads", ">= 10", found, operator.ge, 10.0))
    return rows


def _row(
    text: str,
    wanted: str,
    found: Sequence[float],
    good: Callable[[float, float], bool],
    limit: float,
) -> Row:
    verdict = "not measured"
    if found:
        verdict = "met" if good(statistics.median(found), limit) else "MISSED"
    return (text, wanted, show_ratio(found), verdict)


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


def all_notes(results: RpcResults) -> list[str]:
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


def print_report(results: RpcResults) -> None:
    """Print all tables, the targets last."""
    machine = results.machine
    versions = {NAMES[s["side"]]: s["version"] for s in results.samples}
    rounds = len({sample["round"] for sample in results.samples})
    loads = [sample["load"] for sample in results.samples if sample["load"] is not None]
    print("\n# Remote calls\n")
    print("; ".join(f"{name} {version}" for name, version in versions.items()))
    print(
        f"Python {machine['python']}, {machine['system']}, {machine['cores']} cores"
        + (f", load {min(loads)} to {max(loads)} as sides were started" if loads else "")
    )
    print(f"{rounds} rounds: median (min–max) over the rounds; ours is discolab, processes")
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
    print("\n## Targets\n")
    print(table(["target", "wanted", "found", "verdict"], verdicts(results)))
    if rows := others(results):
        print("\n## Other ratios of times\n")
        print(table(["", "found"], rows))
    for note in all_notes(results):
        print(f"\nNote: {note}")
