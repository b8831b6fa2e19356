"""Medians, ratios, the table and the verdict for collectives.py. Pure functions of `Results`.

A ratio is taken between two contestants of one round, measured one shortly after the other; the
median over the rounds is shown with the least and the greatest. The tables are Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives_bytes import MEMBERS, touched_bytes
from control_plane_report import Row, show_ratio, table

OURS = "discolab"


@dataclass
class Results:
    """Everything that was measured: a sample is one contestant in one round of one case."""

    machine: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cases(self) -> list[tuple[str, int]]:
        """Operations and sizes that were measured, in order."""
        return list(dict.fromkeys((s["op"], s["size"]) for s in self.samples))

    def seconds(self, op: str, size: int, side: str, what: str = "seconds") -> list[float]:
        """The time of one operation, for each round."""
        wanted = (op, size, side)
        return [s[what] for s in self.samples if (s["op"], s["size"], s["side"]) == wanted]

    def ratios(self, op: str, size: int, side: str, what: str = "seconds") -> list[float]:
        """The time of a side / discolab's, for each round."""
        pairs = zip(self.seconds(op, size, side, what), self.seconds(op, size, OURS), strict=True)
        return [theirs / ours for theirs, ours in pairs]


def show_size(size: int) -> str:
    """``64 MB``; units of 1024."""
    for bits, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.3g} {unit}"
    return f"{size} B"


def show_time(seconds: float) -> str:
    """Three digits that count, with their unit."""
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * factor
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def show_times(seconds: Sequence[float]) -> str:
    """Median and extremes."""
    low, high = show_time(min(seconds)), show_time(max(seconds))
    return f"{show_time(statistics.median(seconds))} ({low}–{high})"


def times_table(results: Results) -> str:
    """Everything, one row for each operation and size."""
    head = [
        *("op", "size", "discolab", "Gloo, processes", "Gloo, threads", "bound", "bound, GB/s"),
        *("Gloo processes / discolab", "Gloo threads / discolab", "bound / discolab"),
    ]
    rows = []
    for op, size in results.cases():
        row = [op, show_size(size)]
        for side in (OURS, "gloo processes", "gloo threads", "bound"):
            row.append(show_times(results.seconds(op, size, side)))
        bound = statistics.median(results.seconds(op, size, "bound"))
        row.append(f"{touched_bytes(op, size)[0] / bound / 1e9:.1f}")
        for side in ("gloo processes", "gloo threads", "bound"):
            row.append(show_ratio(results.ratios(op, size, side)))
        rows.append(row)
    return table(head, rows)


def verdicts(results: Results) -> list[Row]:
    """Each target with what was measured, and whether it is met."""
    rows: list[Row] = []
    for size, side, what, name, least in (
        (64 << 20, "gloo processes", "seconds", "Gloo processes / discolab", 5.0),
        (64 << 20, "bound", "copies", "plain copies / discolab", 0.7),
        (64 << 20, "bound", "seconds", "bound / discolab", 0.7),
        (1 << 10, "gloo processes", "seconds", "Gloo processes / discolab", 15.0),
        (1 << 10, "gloo threads", "seconds", "Gloo threads / discolab", 15.0),
    ):
        ratios = results.ratios("all_reduce", size, side, what)
        verdict = "not measured"
        if ratios:
            verdict = "met" if statistics.median(ratios) >= least else "MISSED"
        text = f"all_reduce, {show_size(size)}: {name}"
        rows.append([text, f">= {least:g}", show_ratio(ratios), verdict])
    return rows


def print_report(results: Results) -> None:
    """Print the table, then the targets."""
    machine = results.machine
    rounds = len({sample["round"] for sample in results.samples})
    print(
        f"\ndiscolab {machine['discolab']}, torch {machine['torch']}, Python {machine['python']}; "
        f"{machine['system']}, {machine['cores']} cores, {machine['cpu'] or 'unknown'}, "
        f"load {machine['load']} at the start"
    )
    print(f"{MEMBERS} workers, float32, {rounds} rounds; median (min–max) over the rounds")
    print("\n## Time of one collective (less is better)\n")
    print(times_table(results))
    print("\n## Targets\n")
    print(table(["target", "wanted", "found", "verdict"], verdicts(results)))
    for note in results.notes:
        print(f"\nNote: {note}")
