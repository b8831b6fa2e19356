"""What text, HTML and rich need alike to lower `ComparisonTable` and `Source`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..formats import format_ranks
from ..parts import ComparisonRow, ComparisonTable, Mark, Source, SourceLine, Span

MOST_COLUMNS = 8  # workers with a column each; of more the values are listed
MOST_LISTED = 8  # values of a row that is listed
DIFFERS, CHANGED = "≠", "•"
SIGNS = {"paused": "→", "waiting": "…", "running": "~", "failed": "✗"}


def runs_of(row: ComparisonRow, ranks: Sequence[int]) -> list[tuple[Span | None, tuple[int, ...]]]:
    """Cut a row in cells: what neighbouring columns have alike, and the ranks of those columns.

    None stands for workers of which the row says nothing.
    """
    span_of = {rank: span for span in row.spans for rank in span.ranks}
    runs: list[tuple[Span | None, tuple[int, ...]]] = []
    for rank in ranks:
        span = span_of.get(rank)
        if runs and runs[-1][0] is span:
            runs[-1] = span, (*runs[-1][1], rank)
        else:
            runs.append((span, (rank,)))
    return runs


def label_of(covered: Sequence[int], ranks: Sequence[int]) -> str:
    """Whom a cell speaks for, if not just the worker above it."""
    if len(ranks) == 1:
        return ""
    if len(covered) == len(ranks):
        return "all: "
    return f"{format_ranks(covered)}: " if len(covered) > 1 else ""


def listed(row: ComparisonRow) -> tuple[list[Span], int]:
    """The spans of a row that is listed, at most 8, and how many more there are.

    Those that stand out are among them.
    """
    first = sorted(row.spans, key=lambda span: span.words.role not in ("warning", "error"))
    kept = {id(span) for span in first[:MOST_LISTED]}
    shown = [span for span in row.spans if id(span) in kept]
    return shown, len(row.spans) - len(shown)


def marked(row: ComparisonRow) -> str:
    """The marks of a row, each in its place."""
    return (DIFFERS if row.differs else " ") + (CHANGED if row.changed else " ")


def marks_are_used(across: ComparisonTable) -> bool:
    """Whether any row is marked."""
    return any(row.differs or row.changed for row in across.rows)


def sign(mark: Mark) -> str:
    """Who is at a line, and how: ``0-2 →``."""
    return f"{format_ranks(mark.ranks)} {SIGNS.get(mark.look, '?')}"


def lines_of(source: Source) -> Iterator[SourceLine | None]:
    """The lines, None where some are left out."""
    last: int | None = None
    for line in source.lines:
        if last is not None and line.number != last + 1:
            yield None
        yield line
        last = line.number


def sizes_of(source: Source) -> tuple[int, int]:
    """How wide the marks and the numbers are, in characters."""
    marks = [" ".join(map(sign, line.marks)) for line in source.lines]
    numbers = [len(str(line.number)) for line in source.lines]
    return max(map(len, marks), default=0), max(numbers, default=1)
