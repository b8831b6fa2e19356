"""Draws tensors cut in tiles, to scale, with the values in them as thumbnails. Pure."""

from __future__ import annotations

import math

from ..formats import format_ranks, format_workers
from ..parts import Grid, Tile
from .html_base import escaped, rank_colour, rank_fill
from .html_heat import NOT_FINITE, heat_source

_SMALLEST_TILE = 20  # pixels; a rank label fits
_USUAL_BOX = (320, 160)  # pixels, width and height
_LARGEST_BOX = (560, 320)
_GAP = 8  # between tiles that stand apart
_LINE = 344  # as wide are those in one line
_MOST_APART = 4  # in one line, unless they are narrow
_LARGEST_APART = 140
_MOST_TOLD = 16
_BAR = 26  # how thick a tensor of one dimension is drawn


def grid_html(grid: Grid) -> str:
    """Draw a grid; its caption says so if it is not to scale."""
    if grid.apart is not None:
        return _apart(grid)
    heights, widths, to_scale = _pixels(grid)
    sizes = [[(width, height) for width in widths] for height in heights]
    fits = all(
        _label_words(tile, *size) is not None
        for tiles, line in zip(grid.tiles, sizes, strict=True)
        for tile, size in zip(tiles, line, strict=True)
    )
    rows, untold = [], []
    for tiles, line in zip(grid.tiles, sizes, strict=True):
        cells = ""
        for tile, size in zip(tiles, line, strict=True):
            words = _label_words(tile, *size) if fits else None
            if words is None:
                words = _owner_words(tile, size[0])
                said = f"{format_ranks(tile.owners)}: {escaped(tile.label)}"
                untold.append(said.replace(" ", "&nbsp;"))
            cells += f"<td{_look(tile, *size, grid.partial)}>{_inside(tile, words, *size)}</td>"
        rows.append(f"<tr>{cells}</tr>")
    below = f'<div class="m z">{", ".join(untold[:_MOST_TOLD])}</div>' if untold else ""
    if len(untold) > _MOST_TOLD:
        below += f'<div class="m z">and {len(untold) - _MOST_TOLD} more</div>'
    inner = "".join(rows)
    return f'{_caption(grid, to_scale)}<table class="g"><tbody>{inner}</tbody></table>{below}'


def _caption(grid: Grid, to_scale: bool) -> str:
    said = to_scale or "not to scale" in grid.caption
    words = escaped(grid.caption) + ("" if said else " (not to scale)")
    return f'<div class="m">{words}</div>' if words else ""


def _apart(grid: Grid) -> str:
    tiles = grid.tiles[0]
    tall, wide = max(grid.heights), max(grid.widths)
    side = min((_LINE + _GAP) // min(len(tiles), _MOST_APART) - _GAP, _LARGEST_APART)
    scale = min(side / wide, side / tall if tall else math.inf)
    between = f'<td class="v">{escaped(grid.apart)}</td>' if grid.apart else ""
    lines, room, to_scale = [""], _LINE, True
    for tile, height, width in zip(tiles, grid.heights, grid.widths, strict=True):
        sizes = round(width * scale), round(height * scale) if tall else _BAR
        shown = max(sizes[0], _SMALLEST_TILE), max(sizes[1], _SMALLEST_TILE)
        to_scale = to_scale and shown == sizes
        words = _label_words(tile, *shown) or _owner_words(tile, shown[0])
        if tile is not tiles[0]:
            lines[-1] += between
        if shown[0] > room:
            lines.append("")
            room = _LINE
        room -= shown[0] + _GAP
        cell = _inside(tile, words, *shown)
        lines[-1] += f"<td{_look(tile, *shown, grid.partial)}>{cell}</td>"
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'{_caption(grid, to_scale)}<table class="g a"><tbody>{rows}</tbody></table>'


def _look(tile: Tile, width: int, height: int, partial: bool) -> str:
    line = "dashed" if partial else "solid"
    owner = rank_colour(tile.owners[0]) if tile.owners else "#888"
    fill = "none" if tile.heat else _hatched(tile.owners) if partial else rank_fill(tile.owners)
    return (
        f' style="width:{width}px;min-width:{width}px;max-width:{width}px;height:{height}px;'
        f'border:2px {line} {owner};background:{fill}"'
    )


def _hatched(owners: tuple[int, ...]) -> str:
    over = "repeating-linear-gradient(135deg,rgba(128,128,128,.35) 0 2px,transparent 2px 8px)"
    fill = rank_fill(owners)
    return f"{over},{fill if '(' in fill else f'linear-gradient({fill},{fill})'}"


def _owner_words(tile: Tile, width: int) -> str:
    return (format_workers if width >= 90 and len(tile.owners) > 1 else format_ranks)(tile.owners)


def _label_words(tile: Tile, width: int, height: int) -> str | None:
    """The owners and the label as HTML; None if that does not fit."""
    words, label = _owner_words(tile, width), escaped(tile.label)
    if set(tile.label) <= set("[:, ]"):
        return words  # the whole tensor: nothing to add
    room = width if tile.heat is None else width / 2  # the values must be seen
    beside = room >= (7 if tile.heat is None else 6) * (len(tile.label) + len(words) + 2)
    stacked = height >= (60 if beside or tile.heat else 38)
    if stacked and width >= 7 * len(tile.label) + 8:
        return f"{words}<br><span class=m>{label}</span>"
    return f"{words} <span class=m>{label}</span>" if beside else None


def _inside(tile: Tile, words: str, width: int, height: int) -> str:
    """The words, over the thumbnail where there is one."""
    if tile.heat is None:
        return words
    alt = escaped(tile.heat.alt)
    size = f'width="{width}" height="{height}" style="height:{height}px"'
    picture = f'<img class="h" {size} src="{heat_source(tile.heat)}" alt="{alt}">'
    half = len(tile.heat.levels[0]) // 2 + 1
    top = tile.heat.levels[: len(tile.heat.levels) // 2]
    hides = any(NOT_FINITE in row[:half] for row in top)  # the words would stand on what is loud
    return f'<span class="y{" f" if hides else ""}">{words}</span>{picture}'


def _pixels(grid: Grid) -> tuple[list[int], list[int], bool]:
    """Choose pixel sizes: to scale if every tile can then be seen and the whole is not too big."""
    tall, wide = sum(grid.heights), sum(grid.widths)
    thinnest = min((*grid.widths, *grid.heights) if tall else grid.widths)
    usual, largest = (
        min(box[0] / wide, box[1] / tall if tall else math.inf)
        for box in (_USUAL_BOX, _LARGEST_BOX)
    )
    needed = _SMALLEST_TILE / thinnest
    to_scale = needed <= largest
    scale = max(usual, needed) if to_scale else usual
    widths = [max(round(size * scale), _SMALLEST_TILE) for size in grid.widths]
    if not tall:
        return [_BAR] * len(grid.heights), widths, to_scale
    heights = [max(round(size * scale), _SMALLEST_TILE) for size in grid.heights]
    return heights, widths, to_scale
