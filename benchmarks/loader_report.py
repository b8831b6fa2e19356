"""Tables and the verdict for loader.py. Pure functions of `Results`.

A ratio is taken between two sides of one round and state; the tables show the median over the
rounds with the least and the greatest. They are Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane_report import Row, Sample, show_ratio, table

STATES = ("warm", "cold")
NAMES = {
    "bound": "bound: each byte read once",
    "discolab": "discolab, threads",
    "discolab-processes": "discolab, processes",
    "get-slice": "safetensors get_slice, 4 threads",
    "load-file": "safetensors load_file, then cut",
    "fastsafetensors": "fastsafetensors, then cut",
    "fastsafetensors-sharded": "fastsafetensors get_sharded, 4 processes",
    "tvm": "TVM presharded, threads",
    "scatter-discolab": "load_file on worker 0, then ccl.scatter",
    "scatter-gloo": "load_file on worker 0, then Gloo's scatter",
    "scatter-torch-load": "torch.load on worker 0, then Gloo's scatter",
    "bound-touched": "bound, into touched memory",
    "discolab-into": "discolab into=, threads",
    "discolab-processes-into": "discolab into=, processes",
}
TOUCHED = ("bound-touched", "discolab-into", "discolab-processes-into")
COLD_MOST, WARM_LEAST = 0.01, 0.99  # of the pages that are in the cache


@dataclass
class Results:
    """Everything that was measured: a sample is one child process.

    Samples of round -1 were watched and are not timed.
    """

    machine: dict[str, Any]
    weights: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def seconds(self, side: str, state: str) -> dict[int, float]:
        """The time of a side by round."""
        found = (s for s in self.samples if s["side"] == side and s["state"] == state)
        return {s["round"]: s["seconds"] for s in found if s["round"] >= 0}

    def watched(self, side: str, state: str) -> Sample | None:
        """The sample that was watched."""
        wanted = (side, state, -1)
        return next((s for s in self.samples if _key(s) == wanted), None)

    def ratios(self, side: str, ours: str, state: str) -> list[float]:
        """The time of `side` / that of `ours`, for each round that has both."""
        theirs, mine = self.seconds(side, state), self.seconds(ours, state)
        return [theirs[turn] / mine[turn] for turn in mine if turn in theirs]

    def memory(self, side: str, state: str) -> float | None:
        """Greatest anonymous memory of a load / the shards' own size."""
        sample = self.watched(side, state)
        return None if sample is None else sample["memory"] / self.weights["shard_bytes"]

    def late(self, side: str, state: str) -> dict[str, float]:
        """How late the ticker was, in ms."""
        return (self.watched(side, state) or {}).get("late", {})  # type: ignore[no-any-return]

    def states(self) -> list[str]:
        """Those that were measured."""
        found = {sample["state"] for sample in self.samples}
        return [state for state in STATES if state in found]

    def sides(self, state: str) -> list[str]:
        """Those that gave figures, in a fixed order."""
        return [side for side in NAMES if self.seconds(side, state)]


def _key(sample: Sample) -> tuple[str, str, int]:
    return sample["side"], sample["state"], sample["round"]


# -- text --------------------------------------------------------------------------------------


def show_seconds(seconds: Sequence[float]) -> str:
    """Median and extremes."""
    if not seconds:
        return "–"
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"


def times_table(results: Results, state: str) -> str:
    """A row for each side."""
    head = ["side", "seconds", "GB/s", "bound / it", "it / discolab"]
    rows: list[Row] = []
    size = results.weights["shard_bytes"]
    for side in results.sides(state):
        seconds = list(results.seconds(side, state).values())
        bound, ours = bound_of(side)
        row = [NAMES[side], show_seconds(seconds), f"{size / statistics.median(seconds) / 1e9:.2f}"]
        row.append("" if side == bound else show_ratio(results.ratios(bound, side, state)))
        row.append("" if side == ours else show_ratio(results.ratios(side, ours, state)))
        rows.append(row)
    return table(head, rows)


def bound_of(side: str) -> tuple[str, str]:
    """The bound and the side of discolab that a side is compared with."""
    return ("bound-touched", "discolab-into") if side in TOUCHED else ("bound", "discolab")


def watch_table(results: Results) -> str:
    """Memory and ticker, a row for each side."""
    states = results.states()
    head = ["side"]
    for state in states:
        head += [f"memory / shards, {state}", f"late p50, {state}", "p99", "max"]
    rows = []
    for side in NAMES:
        if not any(results.watched(side, state) for state in states):
            continue
        row = [NAMES[side]]
        for state in states:
            memory, late = results.memory(side, state), results.late(side, state)
            row.append("–" if memory is None else f"{memory:.3f}")
            row += [f"{late[k]:.1f}" if k in late else "–" for k in ("p50_ms", "p99_ms", "max_ms")]
        rows.append(row)
    return table(head, rows)


def verdicts(results: Results) -> list[Row]:
    """Each target with what was measured, and whether it is met."""
    rows: list[Row] = []
    for state in results.states():
        fresh = "discolab"
        for text, side, ours, least in (
            ("bound / discolab", "bound", fresh, 0.85),
            ("into touched memory: bound / discolab", "bound-touched", "discolab-into", 0.8),
            ("ccl.scatter after load_file / discolab", "scatter-discolab", fresh, 4.0),
            ("Gloo's scatter after load_file / discolab", "scatter-gloo", fresh, 4.0),
            ("Gloo's scatter after torch.load / discolab", "scatter-torch-load", fresh, 4.0),
            ("get_slice in 4 threads / discolab", "get-slice", fresh, 1.2),
            ("TVM presharded / discolab", "tvm", fresh, 1.2),
        ):
            ratios = results.ratios(side, ours, state)
            verdict = judge(ratios, lambda value, least=least: value >= least)
            rows.append([f"{state}: {text}", f">= {least:g}", show_ratio(ratios), verdict])
        for side in ("discolab", "discolab-into", "discolab-processes"):
            memory = results.memory(side, state)
            rows.append(
                [
                    f"{state}: {NAMES[side]}: greatest anonymous memory / shards",
                    "<= 1.05",
                    "–" if memory is None else f"{memory:.3f}",
                    judge([memory] if memory is not None else [], lambda value: value <= 1.05),
                ]
            )
        for side in ("discolab", "discolab-into", "discolab-processes"):
            late = results.late(side, state)
            found = [late["p99_ms"]] if late else []
            shown = f"{late['p99_ms']:.1f} ms" if late else "–"
            verdict = judge(found, lambda value: value <= 20)
            rows.append([f"{state}: {NAMES[side]}: ticker late, p99", "<= 20 ms", shown, verdict])
    return rows


def judge(found: Sequence[float], good: Callable[[float], bool]) -> str:
    """By the median."""
    if not found:
        return "not measured"
    return "met" if good(statistics.median(found)) else "MISSED"


def cache_notes(results: Results) -> list[str]:
    """Where the page cache was not as it should be."""
    notes = []
    for sample in results.samples:
        part, state = sample["resident"], sample["state"]
        if part > COLD_MOST if state == "cold" else part < WARM_LEAST:
            notes.append(
                f"{sample['side']}, round {sample['round'] + 1}: {part:.0%} of the pages were in "
                f"the page cache, so this was not {state}"
            )
    return notes


def print_report(results: Results) -> None:
    """Print everything."""
    machine, weights = results.machine, results.weights
    versions = {s["side"]: s["version"] for s in results.samples}
    peers = (
        ("discolab", "discolab"), ("torch", "scatter-gloo"), ("safetensors", "get-slice"),
        ("fastsafetensors", "fastsafetensors"), ("TVM", "tvm"),
    )  # fmt: skip
    found = [f"{name} {versions[side]}" for name, side in peers if side in versions]
    print(
        f"\n{', '.join(found)}, Python {machine['python']}; {machine['system']}, "
        f"{machine['cores']} cores, {machine['cpu'] or 'unknown'}, load {machine['load']} at the "
        f"start\n{weights['bytes'] / 1e9:.2f} GB of bfloat16 in {weights['weights']} parameters "
        f"and {weights['files']} file(s), {weights['column_share']:.0%} of the bytes cut along "
        f"columns; 4 workers; median (min–max) of "
        f"{len({s['round'] for s in results.samples if s['round'] >= 0})} rounds"
    )
    for state in results.states():
        print(f"\n## Page cache {state}: seconds (less is better)\n")
        print(times_table(results, state))
    print("\n## Memory and responsiveness\n")
    print("Anonymous memory beyond that before the load, and how late a 2 ms ticker was, in ms.\n")
    print(watch_table(results))
    firsts = [s["first_s"] for s in results.samples if "first_s" in s]
    if firsts:
        print(
            f"\nA load of 4 KB, the first of a process, imports included: {show_seconds(firsts)} s"
        )
    print("\n## Targets\n")
    print(table(["target", "wanted", "found", "verdict"], verdicts(results)))
    for note in results.notes + cache_notes(results):
        print(f"\nNote: {note}")
