"""Lowers parts to renderables of rich, for a terminal with colours.

Needs the package rich, which is imported here and nowhere else; `views` imports this module when
somebody prints with rich. The parts are those of text and HTML, so the facts are the same; what has
the same lines in plain text is taken from there and coloured. Tables wrap in their columns, ranks
have their colours, and thumbnails are drawn in half blocks, two of their cells a character.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import assert_never

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from ..formats import format_bars, format_ranks, format_workers, printable
from ..parts import (
    Badge,
    Bars,
    Box,
    Card,
    Cell,
    ComparisonRow,
    ComparisonTable,
    Details,
    Grid,
    Heat,
    HStack,
    Lanes,
    Legend,
    Line,
    Part,
    Plot,
    Role,
    Source,
    Span,
    Table,
    Text,
    Tile,
    Tracks,
    VStack,
)
from .program import (
    CHANGED,
    DIFFERS,
    MOST_COLUMNS,
    label_of,
    listed,
    marks_are_used,
    runs_of,
)
from .style import colour_at, rank_colour
from .text import Segment, Styled, styled_lines

_STYLES: dict[Role, str] = {
    "plain": "",
    "title": "bold",
    "muted": "dim",
    "good": "green",
    "warning": "bold yellow",
    "error": "bold red",
    "code": "",
}
_GRID_WIDTH = 48  # characters
_GRID_HEIGHT = 12  # lines; one is as high as two characters are wide
_THINNEST = 3  # characters of a tile
_MOST_TILES = 16  # that get a line of their own
_GRADIENT = 16  # characters of a legend


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


def _rich(part: Part) -> RenderableType:
    match part:
        case Text() | Line():
            return RichText("\n").join(map(_coloured, styled_lines(part)))
        case Tracks() | Plot():
            margin = RichText("  ")
            return RichText("\n").join(margin + _coloured(line) for line in styled_lines(part))
        case Source():
            lines = map(_coloured, styled_lines(part))
            uncut = [RichText.assemble(line, no_wrap=True) for line in lines]
            return Padding(Group(*uncut), (0, 0, 0, 2))
        case Table():
            return _table(part)
        case Grid():
            return _grid(part)
        case Lanes():
            return _lanes(part)
        case ComparisonTable():
            return _across(part)
        case Legend():
            return _legend(part)
        case Heat() | Bars():
            return _cell(part)
        case VStack(children):
            return Group(*map(_rich, children))
        case HStack(children):
            return _SideBySide(tuple(map(_rich, children)))
        case Card(title, children):
            return Group(_rich(title), *map(_rich, children))
        case Details(extra=True):
            return Group()
        case Details(summary, body):
            return Group(RichText(printable(summary), "dim"), Padding(_rich(body), (0, 0, 0, 2)))
        case _:
            assert_never(part)


def _coloured(line: Styled) -> RichText:
    return RichText.assemble(*map(_segment, line))


def _segment(segment: Segment) -> RichText:
    if segment.ranks:
        return _on_colours(segment.text, segment.ranks)
    return RichText(segment.text, _STYLES[segment.role])


def _on_colours(words: str, ranks: Sequence[int]) -> RichText:
    """Words on the colours of the workers, each with its share of them."""
    drawn = RichText(words, Style(color="black"))
    for place in range(len(words)):
        owner = ranks[place * len(ranks) // len(words)]
        drawn.stylize(Style(bgcolor=rank_colour(owner)), place, place + 1)
    return drawn


def _cell(cell: Cell) -> RenderableType:
    match cell:
        case Text():
            return _segment(Segment(printable(cell.text), cell.role))
        case Badge(letter, odd):
            style = Style(bold=True, reverse=odd)
            return RichText.assemble(
                (f" {printable(letter)} " if odd else printable(letter), style)
            )
        case Bars(heights):
            return RichText(format_bars(heights), "cyan")
        case Heat():
            return _heat(cell)
        case _:
            assert_never(cell)


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
    rows = table.folded()
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
    return _on_colours(words, box.owners)


# -- values side by side ---------------------------------------------------------------------------


def _across(across: ComparisonTable) -> RenderableType:
    """A column a worker; of many workers, and of one that are all equal, one column."""
    ranks, marks = across.ranks, marks_are_used(across)
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    if marks:
        drawn.add_column("", no_wrap=True)
    drawn.add_column(across.heads[0], no_wrap=True)
    drawn.add_column(across.heads[1], style="dim")
    columns = len(ranks) <= MOST_COLUMNS
    for rank in ranks if columns else ():
        drawn.add_column(RichText.assemble("worker ", _on_colours(str(rank), (rank,))))
    if not columns:
        drawn.add_column(f"{len(ranks)} workers")
    for row in across.rows:
        front = [_marks(row)] if marks else []
        cells = _cells(row, ranks) if columns else [_list(row, ranks)]
        drawn.add_row(*front, printable(row.name), printable(row.about), *cells)
    return Padding(drawn, (0, 0, 0, 2))


def _marks(row: ComparisonRow) -> RichText:
    loud = any(span.words.role in ("warning", "error") for span in row.spans)
    differs = (DIFFERS if row.differs else " ", "bold yellow" if loud else "dim")
    return RichText.assemble(differs, CHANGED if row.changed else " ")


def _cells(row: ComparisonRow, ranks: Sequence[int]) -> list[RenderableType]:
    """Rich has no cells over several columns: the first says for whom it speaks."""
    cells: list[RenderableType] = []
    for span, covered in runs_of(row, ranks):
        cells.append(_content(span, label_of(covered, ranks)))
        cells += [RichText("″", "dim")] * (len(covered) - 1)
    return cells


def _content(span: Span | None, label: str) -> RenderableType:
    if span is None:
        return RichText("")
    note = f" · {printable(span.note)}" if span.note else ""
    words = (printable(span.words.text), _STYLES[span.words.role])
    text = RichText.assemble((label, "dim"), words, (note, "dim"))
    return text if span.heat is None else Group(text, _heat(span.heat))


def _list(row: ComparisonRow, ranks: Sequence[int]) -> RenderableType:
    if len(row.spans) == 1 and len(row.spans[0].ranks) == len(ranks):
        return _content(row.spans[0], label_of(ranks, ranks))
    shown, more = listed(row)
    items: list[RenderableType] = [
        _content(span, f"{format_ranks(span.ranks)}: ") for span in shown
    ]
    return Group(*items, *([f"and {more} more values"] if more else []))


# -- rectangles and thumbnails ---------------------------------------------------------------------


def _colour(level: int, diverging: bool) -> str:
    red, green, blue = colour_at(level, diverging)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _heat(heat: Heat) -> RichText:
    """Two rows of a thumbnail a line: the upper half of a block in front, the lower behind."""
    rows: list[bytes | None] = [*heat.levels, None]
    lines = []
    for number in range(0, len(rows) - 1, 2):
        upper, lower = rows[number], rows[number + 1]
        pairs = zip(upper or b"", lower or itertools.repeat(None), strict=False)
        lines.append(_half_blocks(pairs, heat.diverging))
    return RichText("\n").join(lines)


def _half_blocks(pairs: Iterable[tuple[int, int | None]], diverging: bool) -> RichText:
    """One line: levels of the upper and of the lower row; None: there is no lower row."""
    line = RichText()
    for (over, under), run in itertools.groupby(pairs):
        behind = None if under is None else _colour(under, diverging)
        line.append("▀" * len(list(run)), Style(color=_colour(over, diverging), bgcolor=behind))
    return line


def _legend(legend: Legend) -> RichText:
    drawn = RichText(f"{printable(legend.low)} ")
    for step in range(_GRADIENT):
        level = round(step * 254 / (_GRADIENT - 1))
        drawn.append(" ", Style(bgcolor=_colour(level, legend.diverging)))
    drawn.append(f" {printable(legend.high)}")
    if legend.nonfinite:
        drawn.append("  ")
        drawn.append(" ", Style(bgcolor=_colour(255, legend.diverging)))
        drawn.append(" not finite")
    if legend.words:
        drawn.append(f"  {printable(legend.words)}", "dim")
    return drawn


def _grid(grid: Grid) -> RenderableType:
    """The tiles as coloured rectangles, about to scale; below it what had no room in them."""
    caption = RichText(printable(grid.caption), "dim")
    widths, heights = _characters(grid)
    apart = grid.apart is not None
    drawn = RichText()
    for number, row in enumerate(grid.tiles):
        tall = heights if apart else [heights[number]] * len(row)
        blocks = [
            _tile(tile, width, height, grid.partial)
            for tile, width, height in zip(row, widths, tall, strict=True)
        ]
        for line in range(max(map(len, blocks))):
            drawn.append("\n" if drawn else "")
            for place, (block, width) in enumerate(zip(blocks, widths, strict=True)):
                drawn.append("  " if apart and place else "")
                drawn.append_text(block[line] if line < len(block) else RichText(" " * width))
    return Group(caption, Padding(drawn, (0, 0, 0, 2)), *_unlabelled(grid, widths))


def _characters(grid: Grid) -> tuple[list[int], list[int]]:
    """Widths in characters and heights in lines."""
    wide = sum(grid.widths) or 1
    tall = max(grid.heights) if grid.apart is not None else sum(grid.heights)
    scale = min(_GRID_WIDTH / wide, 2 * _GRID_HEIGHT / tall if tall else math.inf)
    least = min(_THINNEST, _GRID_WIDTH // max(len(grid.widths), 1)) or 1
    widths = [max(round(size * scale), least) for size in grid.widths]
    return widths, [max(round(size * scale / 2), 1) for size in grid.heights]


def _tile(tile: Tile, width: int, height: int, partial: bool) -> list[RichText]:
    """The lines of one tile: who its owners are, in their colours, and its thumbnail if it has one.

    The thumbnail stands below a line with the owners; else that line is in the middle of the tile.
    """
    fill = "╱" if partial else " "
    words = _label(tile, width)
    if tile.heat is not None:
        drawn = [_heat_line(tile.heat, width, number, height) for number in range(height)]
        return [_striped(tile, words, width, fill), *drawn]
    middle = (height - 1) // 2
    return [
        _striped(tile, words if number == middle else "", width, fill) for number in range(height)
    ]


def _striped(tile: Tile, words: str, width: int, fill: str) -> RichText:
    owners = tile.owners or (0,)
    line = RichText(words.center(width, fill), Style(color="black"))
    for number, owner in enumerate(owners[:width]):
        count = min(len(owners), width)
        first, last = number * width // count, (number + 1) * width // count
        line.stylize(Style(bgcolor=rank_colour(owner)), first, last)
    return line


def _heat_line(heat: Heat, width: int, number: int, height: int) -> RichText:
    """One line of a thumbnail that is stretched to fill a tile."""
    rows, columns = len(heat.levels), len(heat.levels[0])
    upper, lower = (heat.levels[(2 * number + k) * rows // (2 * height)] for k in (0, 1))
    pairs = (
        (upper[place * columns // width], lower[place * columns // width]) for place in range(width)
    )
    return _half_blocks(pairs, heat.diverging)


def _label(tile: Tile, width: int) -> str:
    words, label = format_ranks(tile.owners), printable(tile.label)
    if not _all(tile) and len(words) + len(label) + 3 <= width:
        return f" {words} {label} "
    return f" {words} "[:width]


def _all(tile: Tile) -> bool:
    """Whether a tile is the whole tensor."""
    return set(tile.label) <= set("[:, ]")


def _unlabelled(grid: Grid, widths: Sequence[int]) -> Iterable[RichText]:
    """What the tiles had no room to say."""
    pairs = [
        pair for row in grid.tiles for pair in zip(row, widths, strict=True) if not _all(pair[0])
    ]
    if len(pairs) > _MOST_TILES or all(t.label in _label(t, width) for t, width in pairs):
        pairs = pairs[:_MOST_TILES] if len(pairs) > _MOST_TILES else []
    for tile, _ in pairs:
        yield RichText(f"    {printable(tile.label)}  {format_workers(tile.owners)}")
