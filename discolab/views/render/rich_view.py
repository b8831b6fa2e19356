"""Lowers parts to renderables of rich, for a terminal with colours.

Needs the package rich, which is imported here and nowhere else; `views` imports this module when
somebody prints with rich. The parts are those of text and HTML, so the facts are the same; ranks
have their colours, and thumbnails are drawn in half blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from ...runtime.errors import DiscoError
from ...runtime.session import Session
from ..dref.view import draw_dref
from ..formats import format_bars, format_ranks, printable
from ..parts import (
    Across,
    Badge,
    Bars,
    Beside,
    Box,
    Card,
    Cell,
    Details,
    Grid,
    Heat,
    Lanes,
    Legend,
    Line,
    Part,
    Role,
    Source,
    Stack,
    Table,
    Text,
    Tracks,
    fold_rows,
)
from .html_base import rank_colour
from .rich_pictures import draw_grid, draw_heat, draw_legend
from .rich_program import draw_across, draw_source
from .text_tracks import track_lines

_STYLES: dict[Role, str] = {
    "plain": "",
    "title": "bold",
    "muted": "dim",
    "good": "green",
    "warning": "bold yellow",
    "error": "bold red",
}


def render_rich(part: Part) -> RenderableType:
    """Draw a part for rich.

    Parameters
    ----------
    part : Part

    Returns
    -------
    rich.console.RenderableType
        ``rich.print(render_rich(part))`` shows it.
    """
    try:
        return _rich(part)
    except Exception as error:  # a view never raises
        return RichText(f"(this view could not be drawn: {type(error).__name__})", "bold red")


def rich_of(value: Any) -> RenderableType:
    """The picture of a DRef, a session, or what has a `part`, for rich; its repr if there is none.

    It is what their ``__rich__`` gives.
    """
    try:
        if isinstance(value, Session):
            from ..session_view import session_parts

            return render_rich(session_parts(value))
        part = getattr(value, "part", None)
        return render_rich(draw_dref(value) if part is None else part)
    except DiscoError:
        return RichText(repr(value))


def _rich(part: Part) -> RenderableType:
    match part:
        case Text(text, role):
            lines = "\n".join(map(printable, text.split("\n")))
            return RichText(lines, _STYLES.get(role, ""))
        case Line(spans):
            return RichText.assemble(*map(_styled, spans))
        case Table():
            return _table(part)
        case Grid():
            return draw_grid(part)
        case Lanes():
            return _lanes(part)
        case Tracks():
            return RichText("\n".join(f"  {line}" for line in track_lines(part)))
        case Source():
            return draw_source(part)
        case Across():
            return draw_across(part)
        case Heat():
            return draw_heat(part)
        case Legend():
            return draw_legend(part)
        case Bars():
            return _cell(part)
        case Stack(children):
            return Group(*map(_rich, children))
        case Beside(children):
            return _SideBySide(tuple(map(_rich, children)))
        case Card(title, children):
            return Group(_rich(title), *map(_rich, children))
        case Details(summary, body, extra):
            if extra:
                return Group()
            return Group(RichText(printable(summary), "dim"), Padding(_rich(body), (0, 0, 0, 2)))
    raise TypeError(type(part).__name__)


def _styled(span: Text) -> RichText:
    return RichText(printable(span.text), _STYLES.get(span.role, ""))


def _cell(cell: Cell) -> RenderableType:
    match cell:
        case Text():
            return _styled(cell)
        case Badge(letter, odd):
            style = Style(bold=True, reverse=odd)
            return RichText.assemble(
                (f" {printable(letter)} " if odd else printable(letter), style)
            )
        case Bars(heights):
            return RichText(format_bars(heights), "cyan")
        case Heat():
            return draw_heat(cell)
    raise TypeError(type(cell).__name__)


class _SideBySide:
    """Renderables beside each other if the console is wide enough, else below each other."""

    def __init__(self, children: Sequence[RenderableType]) -> None:
        self._children = children

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [Measurement.get(console, options, child).maximum for child in self._children]
        if sum(widths) + 3 * (len(widths) - 1) > options.max_width:
            yield from self._children
            return
        grid = RichTable.grid(padding=(0, 3, 0, 0))
        grid.add_row(*self._children)
        yield grid

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


# -- tables ---------------------------------------------------------------------------------------


def _table(table: Table) -> RenderableType:
    rows = fold_rows(table.rows)
    ranked = any(row.ranks for row in rows)
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if ranked:
        drawn.add_column("rank", no_wrap=True)
    for column in table.columns:
        drawn.add_column(printable(column.title), justify=column.align, overflow="fold")
    for row in rows:
        cells = [_cell(cell) for cell in row.cells]
        drawn.add_row(*([_ranks(row.ranks)] if ranked else []), *cells)
    return Padding(drawn, (0, 0, 0, 2))


def _ranks(ranks: Sequence[int]) -> RichText:
    """A bar in the colour of each worker, and the ranks."""
    bars = [("▌", rank_colour(rank)) for rank in ranks[:4]]
    return RichText.assemble(*bars, " ", format_ranks(ranks)) if ranks else RichText("")


def _lanes(lanes: Lanes) -> RenderableType:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("rank", *lanes.heads):
        drawn.add_column(printable(head))
    for lane in lanes.lanes:
        drawn.add_row(_ranks((lane.rank,)), *map(_boxes, lane.stages))
    return Padding(drawn, (0, 0, 0, 2))


def _boxes(rows: tuple[tuple[Box, ...], ...]) -> RichText:
    if not rows:
        return RichText("nothing", "dim")
    lines = (RichText(" ").join(map(_box, row)) for row in rows)
    return RichText("\n").join(lines)


def _box(box: Box) -> RichText:
    words = f" {printable(box.text)} "
    if not box.owners:
        return RichText(words, Style(reverse=True, dim=True))
    drawn = RichText(words, Style(color="black"))
    for place in range(len(words)):
        owner = box.owners[place * len(box.owners) // len(words)]
        drawn.stylize(Style(bgcolor=rank_colour(owner)), place, place + 1)
    return drawn
