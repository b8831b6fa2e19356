"""What rounds of sides have given, and its parts of a report. Pure functions of `Results`.

As in control_plane_report.py, a ratio is taken between two sides of one round, and the tables
show the median over the rounds with the least and the greatest. The tables are Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from control_plane_report import Sample, show, table

Figure = Callable[[Sample], float | None]


@dataclass
class Results:
    """Everything that was measured: one sample is one side in one round.

    Attributes
    ----------
    NAMES
        Of each side, in the order in which they are told.
    OURS
        The side with which the others are compared.
    turns
        What each of some sides gave once, in turns.
    """

    NAMES: ClassVar[dict[str, str]]
    OURS: ClassVar[str]

    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    turns: list[dict[str, Sample]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def sides(self) -> list[str]:
        """The sides that gave figures, in a fixed order."""
        found = {sample["side"] for sample in self.samples}
        return [side for side in self.NAMES if side in found]

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

    def best_ratios(self, figure: Figure, in_turns: Figure, side: str, peer: str) -> list[float]:
        """Those of the turns, where the two took turns; else those of the rounds."""
        if any({side, peer} <= turn.keys() for turn in self.turns):
            return self.turn_ratios(in_turns, side, peer)
        return self.ratios(figure, side, peer)

    def all_notes(self) -> list[str]:
        """What was noted in the run, and what the samples tell beside their figures."""
        notes = dict.fromkeys(self.notes)  # in order, each once
        for sample in self.samples:
            name = self.NAMES[sample["side"]]
            for figure, text in sample["errors"].items():
                notes[f"{name}: no figure {figure!r}: {text.strip().splitlines()[-1]}"] = None
            if "failed" in sample:
                last = sample["failed"].splitlines()[-1]
                notes[f"{name}: its process did not end well: {last}"] = None
            if sample.get("left_behind"):
                notes[f"{name}: left {sample['left_behind']} processes behind"] = None
        return list(notes)


def of(*path: str, scale: float = 1.0) -> Figure:
    """A number that lies at these keys of a sample."""

    def figure(sample: Sample) -> float | None:
        value: Any = sample
        for key in path:
            value = (value or {}).get(key)
        return None if value is None else float(value) * scale

    return figure


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
    results: Results, head: dict[str, Figure], ratios: dict[str, Figure] | None = None
) -> str:
    """One row for each side: figures, and ours beside it (ours / it)."""
    ratios = ratios or {}
    rows = []
    for side in results.sides():
        row = [results.NAMES[side]]
        row += [show_range([*results.of(side, figure).values()]) for figure in head.values()]
        for figure in ratios.values():
            same = side == results.OURS
            row.append("" if same else show_ratio(results.ratios(figure, results.OURS, side)))
        rows.append(row)
    return table(["4 workers", *head, *ratios], rows)


def print_head(title: str, results: Results) -> None:
    """Print what was measured, and where."""
    machine = results.machine
    versions = {results.NAMES[s["side"]]: s["version"] for s in results.samples}
    rounds = len({sample["round"] for sample in results.samples})
    loads = [sample["load"] for sample in results.samples if sample["load"] is not None]
    print(f"\n# {title}\n")
    print("; ".join(f"{name} {version}" for name, version in versions.items()))
    print(
        f"Python {machine['python']}, {machine['system']}, {machine['cores']} cores"
        + (f", load {min(loads)} to {max(loads)} as sides were started" if loads else "")
    )
    ours = results.NAMES[results.OURS]
    print(f"{rounds} rounds: median (min–max) over the rounds; ours is {ours}")


def verdict(good: bool | None) -> str:
    """Whether a target is met, None: it was not measured."""
    return "not measured" if good is None else "met" if good else "MISSED"


def print_verdicts(rows: Sequence[Sequence[str]]) -> None:
    """Print the targets."""
    print("\n## Targets\n")
    print(table(["target", "wanted", "found", "verdict"], rows))


def print_notes(results: Results) -> None:
    """Print what else is to be said."""
    for text in results.all_notes():
        print(f"\nNote: {text}")
