"""Lowers parts to plain text: for terminals, ``text/plain`` and golden tests.

Deterministic, no terminal colours, no blanks at line ends. Strings are made printable in one
place, `_clean`. Pure; may be called from any thread; never raises.
"""

from __future__ import annotations

from typing import TypeVar

from ..formats import format_bars, format_ranks, format_workers, printable
from ..parts import (
    Across,
    Badge,
    Bars,
    Beside,
    Box,
    Card,
    Cell,
    Column,
    Details,
    Grid,
    Heat,
    Lanes,
    Legend,
    Line,
    Part,
    Plot,
    Row,
    Source,
    Stack,
    Table,
    Text,
    Tracks,
    fold_rows,
)
from .text_program import across_lines, source_lines
from .text_tracks import track_lines

_Item = TypeVar("_Item")
_MOST_TILES = 16
_MARGIN = "  "


def render_text(part: Part) -> str:
    """Draw a part as plain text.

    Parameters
    ----------
    part : Part

    Returns
    -------
    str
        Lines joined by newlines, without one at the end.

    Examples
    --------
    >>> print(render_text(Details("more", Text("one\\ntwo"))))
    more
      one
      two
    """
    try:
        lines = _lines(part)
    except Exception as error:  # a view never raises
        lines = [f"(this view could not be drawn: {type(error).__name__})"]
    return "\n".join(line.rstrip() for line in lines)


def _clean(text: str) -> str:
    return printable(text)


def _lines(part: Part) -> list[str]:
    match part:
        case Text(text):
            return [_clean(line) for line in text.split("\n")]
        case Line(spans):
            return ["".join(_clean(span.text) for span in spans)]
        case Table():
            return _table_lines(part)
        case Grid():
            return _grid_lines(part)
        case Plot(lines=lines):
            return [f"{_MARGIN}{line}" for line in lines]
        case Lanes():
            return _table_lines(_as_table(part))
        case Tracks():
            return [_MARGIN + line for line in track_lines(part)]
        case Source():
            return [_MARGIN + line for line in source_lines(part)]
        case Across():
            return [_MARGIN + line for line in across_lines(part)]
        case Heat() | Legend():
            return []
        case Bars():
            return [_MARGIN + _words(part)]
        case Stack(children) | Beside(children):
            return [line for child in children for line in _lines(child)]
        case Card(title, children):
            return [line for child in (title, *children) for line in _lines(child)]
        case Details(extra=True):
            return []
        case Details(summary, body):
            return [_clean(summary), *(_MARGIN + line for line in _lines(body))]
    raise TypeError(type(part).__name__)


def _rank_label(row: Row) -> str:
    label = format_ranks(row.ranks)
    return label if len(row.ranks) == 1 else f"[{label}]"


def _words(cell: Cell) -> str:
    match cell:
        case Text(text):
            return _clean(text)
        case Badge(letter):
            return _clean(letter)
        case Bars(heights):
            return format_bars(heights)
    return ""


def _table_lines(table: Table) -> list[str]:
    table = _without_pictures(table)
    heads = [_clean(column.title) for column in table.columns]
    right = [column.align == "right" for column in table.columns]
    rows = fold_rows(table.rows)
    body = [[_words(cell) for cell in row.cells] for row in rows]
    if any(row.ranks for row in rows):
        heads, right = ["rank", *heads], [False, *right]
        body = [[_rank_label(row), *cells] for row, cells in zip(rows, body, strict=True)]
    lines = [heads, *body]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    return [
        _MARGIN
        + _MARGIN.join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        )
        for line in lines
    ]


def _without_pictures(table: Table) -> Table:
    """Drop the columns that hold nothing but thumbnails."""
    drawn = [place for place in range(len(table.columns)) if _pictured(table.rows, place)]
    if not drawn:
        return table

    def kept(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
        return tuple(item for place, item in enumerate(items) if place not in drawn)

    rows = tuple(Row(kept(row.cells), row.ranks) for row in table.rows)
    return Table(kept(table.columns), rows)


def _pictured(rows: tuple[Row, ...], place: int) -> bool:
    cells = [row.cells[place] for row in rows]
    pictures = [isinstance(cell, Heat) for cell in cells]
    return any(pictures) and all(
        picture or not _words(cell) for cell, picture in zip(cells, pictures, strict=True)
    )


def _as_table(lanes: Lanes) -> Table:
    rows = [Row(tuple(map(_stage, lane.stages)), (lane.rank,)) for lane in lanes.lanes]
    return Table(tuple(map(Column, lanes.heads)), tuple(rows))


def _stage(rows: tuple[tuple[Box, ...], ...]) -> Text:
    words = [f"[{', '.join(box.text for box in row)}]" for row in rows]
    return Text(words[0] if len(words) == 1 else f"[{', '.join(words)}]" if words else "-")


def _grid_lines(grid: Grid) -> list[str]:
    if grid.apart is not None and not grid.partial:
        return []
    tiles = [tile for row in grid.tiles for tile in row]
    if len(tiles) == 1 or grid.apart is not None:
        owners = [rank for tile in tiles for rank in tile.owners]
        return [f"{_MARGIN}{_clean(grid.caption)}: {format_workers(owners)}"]
    shown = tiles[:_MOST_TILES]
    labels = [_clean(tile.label) for tile in shown]
    width = max((len(label) for label in labels), default=0)
    lines = [
        f"{_MARGIN * 2}{label.ljust(width)}  {format_workers(tile.owners)}"
        for tile, label in zip(shown, labels, strict=True)
    ]
    if len(tiles) > len(shown):
        lines.append(f"{_MARGIN * 2}and {len(tiles) - len(shown)} more")
    return [_MARGIN + _clean(grid.caption), *lines]
