"""`Source` and `Across` for rich: the lines of the text, ranks in the workers' colours. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from ..formats import format_ranks, printable
from ..parts import Across, AcrossRow, Mark, Source, Span
from .across import (
    CHANGED,
    DIFFERS,
    MOST_COLUMNS,
    SIGNS,
    label_of,
    lines_of,
    listed,
    marks_are_used,
    runs_of,
    sizes_of,
)
from .html_base import rank_colour
from .rich_pictures import draw_heat

_STYLES = {"muted": "dim", "warning": "bold yellow", "error": "bold red", "good": "green"}


def draw_source(source: Source) -> RenderableType:
    """Numbered lines, in front of them who is there."""
    wide, digits = sizes_of(source)
    lines = []
    for line in lines_of(source):
        if line is None:
            lines.append(RichText(" " * (wide + 1) + "⋮".rjust(digits), "dim"))
            continue
        marks = RichText(" ").join(map(_mark, line.marks))
        number = (f" {line.number:>{digits}}  ", "dim")
        text = (printable(line.text.expandtabs(4)), "bold" if line.marks else "")
        blank = " " * (wide - len(marks))
        lines.append(RichText.assemble(blank, marks, number, text, no_wrap=True))
    return Padding(Group(*lines), (0, 0, 0, 2))


def _mark(mark: Mark) -> RichText:
    return RichText.assemble(_badge(mark.ranks), f" {SIGNS.get(mark.look, '?')}")


def _badge(ranks: Sequence[int]) -> RichText:
    """The ranks on the colours of the workers."""
    words = format_ranks(ranks)
    drawn = RichText(words, Style(color="black"))
    for place in range(len(words)):
        owner = ranks[place * len(ranks) // len(words)]
        drawn.stylize(Style(bgcolor=rank_colour(owner)), place, place + 1)
    return drawn


def draw_across(across: Across) -> RenderableType:
    """A column a worker; of many workers, and of one that are all equal, one column."""
    ranks, marks = across.ranks, marks_are_used(across)
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if marks:
        drawn.add_column("", no_wrap=True)
    drawn.add_column(across.heads[0], no_wrap=True)
    drawn.add_column(across.heads[1], style="dim")
    columns = len(ranks) <= MOST_COLUMNS
    for rank in ranks if columns else ():
        drawn.add_column(RichText.assemble("worker ", _badge((rank,))))
    if not columns:
        drawn.add_column(f"{len(ranks)} workers")
    for row in across.rows:
        front = [_marks(row)] if marks else []
        cells = _cells(row, ranks) if columns else [_list(row, ranks)]
        drawn.add_row(*front, printable(row.name), printable(row.about), *cells)
    return Padding(drawn, (0, 0, 0, 2))


def _marks(row: AcrossRow) -> RichText:
    loud = any(span.words.role in ("warning", "error") for span in row.spans)
    differs = (DIFFERS if row.differs else " ", "bold yellow" if loud else "dim")
    return RichText.assemble(differs, CHANGED if row.changed else " ")


def _cells(row: AcrossRow, ranks: Sequence[int]) -> list[RenderableType]:
    """Rich has no cells over several columns: the first says for whom it speaks."""
    found: list[RenderableType] = []
    for span, held in runs_of(row, ranks):
        found.append(_content(span, label_of(held, ranks)))
        found += [RichText("″", "dim")] * (len(held) - 1)
    return found


def _content(span: Span | None, label: str) -> RenderableType:
    if span is None:
        return RichText("")
    note = f" · {printable(span.note)}" if span.note else ""
    words = (printable(span.words.text), _STYLES.get(span.words.role, ""))
    text = RichText.assemble((label, "dim"), words, (note, "dim"))
    return text if span.heat is None else Group(text, draw_heat(span.heat))


def _list(row: AcrossRow, ranks: Sequence[int]) -> RenderableType:
    if len(row.spans) == 1 and len(row.spans[0].ranks) == len(ranks):
        return _content(row.spans[0], label_of(ranks, ranks))
    shown, more = listed(row)
    items: list[RenderableType] = [
        _content(span, f"{format_ranks(span.ranks)}: ") for span in shown
    ]
    return Group(*items, *([f"and {more} more values"] if more else []))
