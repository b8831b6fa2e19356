"""Medians, ratios, tables and the verdict for control_plane.py. Pure functions of `Results`.

A ratio is taken between the two sides of one round (they ran one right after the other), and
then the median over the rounds is shown with the least and the greatest. The tables are
Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TARGET_WORKERS = 4
Sample = dict[str, Any]
Figure = Callable[[Sample], float]
Row = Sequence[str]


@dataclass
class Results:
    """Everything that was measured: one sample is one child process."""

    machine: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    imports: list[dict[str, float]] = field(default_factory=list)
    cells: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    engines: Any = None  # engines_report.EngineResults, if they were measured

    def of(self, side: str, workers: int, pinned: bool) -> dict[int, Sample]:
        """The samples of one side by round."""
        wanted = (side, workers, pinned)
        return {s["round"]: s for s in self.samples if _key(s) == wanted}

    def settings(self) -> list[tuple[int, bool]]:
        """The pairs of (workers, pinned) that were measured, in order."""
        return list(dict.fromkeys((s["workers"], s["pinned"]) for s in self.samples))

    def ratios(self, workers: int, pinned: bool, ours: Figure, theirs: Figure) -> list[float]:
        """discolab / TVM, one for each round in which both ran."""
        mine = self.of("discolab", workers, pinned)
        peer = self.of("tvm", workers, pinned)
        return [ours(mine[turn]) / theirs(peer[turn]) for turn in mine if turn in peer]


def _key(sample: Sample) -> tuple[str, int, bool]:
    return sample["side"], sample["workers"], sample["pinned"]


def of_call(kind: str, what: str) -> Figure:
    """The figure `what` of a kind of call, ``packed`` or ``python``."""
    return lambda sample: float(sample[kind][what])


def of_start(what: str) -> Figure:
    """A figure of starting."""
    return lambda sample: float(sample[what])


# -- text ------------------------------------------------------------------------------------


def show(value: float) -> str:
    """Three digits that count, thousands as k."""
    if value >= 10_000:
        return f"{value / 1000:.0f} k"
    if value >= 1000:
        return f"{value / 1000:.1f} k"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show_ratio(ratios: Sequence[float]) -> str:
    """Median and extremes."""
    if not ratios:
        return "–"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def show_median(samples: dict[int, Sample], figure: Figure) -> str:
    """The median over the rounds."""
    return show(statistics.median(map(figure, samples.values()))) if samples else "–"


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Row) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


# -- the tables --------------------------------------------------------------------------------


def calls_table(results: Results, what: str) -> str:
    """One figure of the four kinds of call for each setting, and the ratios."""
    head = [
        *("workers", "discolab Python", "discolab packed", "TVM C++", "TVM Python"),
        *("Python / TVM C++", "packed / TVM C++", "Python / TVM Python"),
    ]
    rows = []
    for workers, pinned in results.settings():
        row = [f"{workers}, one core" if pinned else f"{workers}"]
        for side, kind in (
            *(("discolab", "python"), ("discolab", "packed")),
            *(("tvm", "packed"), ("tvm", "python")),
        ):
            row.append(show_median(results.of(side, workers, pinned), of_call(kind, what)))
        for ours, theirs in (("python", "packed"), ("packed", "packed"), ("python", "python")):
            figures = of_call(ours, what), of_call(theirs, what)
            row.append(show_ratio(results.ratios(workers, pinned, *figures)))
        rows.append(row)
    return table(head, rows)


def start_table(results: Results) -> str:
    """Start-up of both sides."""
    sides = ["discolab first", "discolab again", "TVM first", "TVM again"]
    head = ["workers", *sides, "again / again"]
    rows = []
    for workers, pinned in results.settings():
        row = [f"{workers}, one core" if pinned else f"{workers}"]
        for side in ("discolab", "tvm"):
            for what in ("start_first_ms", "start_again_ms"):
                row.append(show_median(results.of(side, workers, pinned), of_start(what)))
        again = of_start("start_again_ms")
        row.append(show_ratio(results.ratios(workers, pinned, again, again)))
        rows.append(row)
    return table(head, rows)


def extras_table(results: Results) -> str:
    """Import and notebook cell."""
    rows = []
    for what, text in (
        ("torch_ms", "import torch"),
        ("after_torch_ms", "import discolab, after torch"),
        ("before_torch_ms", "import discolab, before torch (without torch's share)"),
    ):
        if results.imports:
            taken = [sample[what] for sample in results.imports]
            extremes = f"{show(min(taken))}–{show(max(taken))}"
            rows.append([text, show(statistics.median(taken)), extremes])
    for kind, text in (
        ("plain_ms", "cell `pass`"),
        ("disco_empty_ms", "cell `%%disco`, empty"),
        ("disco_pass_ms", "cell `%%disco`, `pass`"),
    ):
        if results.cells:
            rows.append([text, show(results.cells[kind]), ""])
    return table(["what", "median, ms", "min–max"], rows)


# -- the targets -------------------------------------------------------------------------------


def verdicts(results: Results) -> list[Row]:
    """Each target with what was measured, and whether it is met."""
    rows: list[Row] = []
    for workers, pinned in results.settings():
        if workers != TARGET_WORKERS:
            continue
        where = "one core" if pinned else "all cores"
        for text, what, good in (
            ("latency, Python no-op / TVM C++ no-op", "median_us", lambda r: r <= 1.0),
            ("pipelined, Python no-op / TVM C++ no-op", "per_second", lambda r: r >= 1.0),
        ):
            figures = of_call("python", what), of_call("packed", what)
            ratios = results.ratios(workers, pinned, *figures)
            sign = "<=" if what == "median_us" else ">="
            middle = statistics.median(ratios) if ratios else None
            rows.append(_row(f"{text}, {where}", f"{sign} 1.0", show_ratio(ratios), middle, good))
        first = [s["start_first_ms"] for s in results.of("discolab", workers, pinned).values()]
        middle = statistics.median(first)
        rows.append(
            _row(
                f"first start of {workers}, {where}",
                "< 20 ms",
                f"{show(middle)} ms (at most {show(max(first))})",
                middle,
                lambda ms: ms < 20,
            )
        )
    return rows + _extra_verdicts(results)


def _extra_verdicts(results: Results) -> list[Row]:
    rows = []
    for what, text in (("after_torch_ms", "after torch"), ("before_torch_ms", "before torch")):
        if results.imports:
            middle = statistics.median(sample[what] for sample in results.imports)
            found = f"{show(middle)} ms"
            rows.append(
                _row(f"import discolab, {text}", "< 150 ms", found, middle, lambda ms: ms < 150)
            )
    for kind, text in (("disco_empty", "empty"), ("disco_pass", "`pass`")):
        if results.cells:
            more = results.cells[kind + "_more_ms"]
            name = f"`%%disco` cell, {text}: more than `pass`"
            rows.append(_row(name, "<= 2 ms", f"{more:.2f} ms", more, lambda ms: ms <= 2))
    return rows


def _row(
    text: str, target: str, found: str, value: float | None, good: Callable[[float], bool]
) -> Row:
    verdict = "not measured" if value is None else "met" if good(value) else "MISSED"
    return text, target, found, verdict


def print_report(results: Results) -> None:
    """Print all tables, the targets last."""
    machine = results.machine
    versions = ", ".join(f"{side} {version}" for side, version in results.versions.items())
    rounds = len({sample["round"] for sample in results.samples})
    where = f"{machine['system']}, {machine['cores']} cores, load {machine['load']} at the start"
    print(f"\n{versions}; Python {machine['python']}, {where}")
    print(f"{rounds} rounds; a ratio is discolab / TVM: median (min–max) over the rounds")
    print("\n## Call and sync of all workers: median, µs (less is better)\n")
    print(calls_table(results, "median_us"))
    print("\n## The same: 99th percentile, µs (less is better)\n")
    print(calls_table(results, "p99_us"))
    print("\n## Pipelined commands per second (more is better)\n")
    print(calls_table(results, "per_second"))
    print("\n## Start and sync of all workers, ms (less is better)\n")
    print(start_table(results))
    if results.imports or results.cells:
        print("\n## Import and notebook\n")
        print(extras_table(results))
    print(f"\n## Targets, at {TARGET_WORKERS} workers\n")
    rows = verdicts(results)
    print(table(["target", "wanted", "found", "verdict"], rows) if rows else "none was measured")
    for note in results.notes:
        print(f"\nNote: {note}")
