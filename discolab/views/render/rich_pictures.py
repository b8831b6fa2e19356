"""Grids, thumbnails and legends for rich: coloured blocks, two cells of a thumbnail a character."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text as RichText

from ..formats import format_ranks, format_workers, printable
from ..parts import Grid, Heat, Legend, Tile
from .html_base import rank_colour
from .html_heat import colour_at

_GRID_WIDTH = 48  # characters
_GRID_HEIGHT = 12  # lines; one is as high as two characters are wide
_THINNEST = 3  # characters of a tile
_MOST_TILES = 16  # that get a line of their own
_GRADIENT = 16  # characters of a legend


def _colour(level: int, diverging: bool) -> str:
    red, green, blue = colour_at(level, diverging)
    return f"#{red:02x}{green:02x}{blue:02x}"


def draw_heat(heat: Heat) -> RichText:
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


def draw_legend(legend: Legend) -> RichText:
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


def draw_grid(grid: Grid) -> RenderableType:
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
