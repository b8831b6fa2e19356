"""The small tree of parts that every view is built from before it is drawn.

A view is a pure function from plain records to parts; `text.render_text` and
`html.render_html` lower the same parts, so text and HTML carry the same facts. The leaves are
`Text`, `Line`, `Table`, `Grid` and `Lanes`; `Stack` and `Details` hold other parts. All are frozen,
comparable, and hold unescaped strings: escaping is the renderers' business alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["plain", "title", "muted", "warning", "error"]
Align: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True)
class Text:
    """A piece of text; as a part of its own it may have several lines."""

    text: str
    role: Role = "plain"


@dataclass(frozen=True)
class Line:
    """Pieces of text on one line, each with its own role."""

    spans: tuple[Text, ...]


@dataclass(frozen=True)
class Column:
    """Heading and alignment of one column of a `Table`."""

    title: str
    align: Align = "left"


@dataclass(frozen=True)
class Row:
    """One row of a `Table`: its cells and the ranks that it speaks for.

    `ranks` is empty in tables that are not about workers. Otherwise renderers put a rank label in
    the workers' colours in front.
    """

    cells: tuple[Text, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table; text folds rows that differ only in rank, HTML only beyond 16 rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Tile:
    """One rectangle of a `Grid`: which slice of the logical tensor, and who holds it."""

    label: str
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """A logical tensor cut in rectangles, to be drawn to scale.

    `heights` and `widths` are in elements. A height of 0 marks a one-dimensional tensor, drawn as
    a bar of fixed thickness. `tiles[i][j]` is in row i and column j. `partial` says that the
    owners hold terms of a reduction, not the value itself.
    """

    caption: str
    heights: tuple[int, ...]
    widths: tuple[int, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    partial: bool = False


@dataclass(frozen=True)
class Box:
    """One value in a `Lane`, and the workers that it comes from; none if that is not known."""

    text: str
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lane:
    """What one worker holds at each stage: rows of boxes, no row where it holds nothing."""

    rank: int
    stages: tuple[tuple[tuple[Box, ...], ...], ...]


@dataclass(frozen=True)
class Lanes:
    """Values on each worker at several stages, side by side, in the colours of their origin."""

    heads: tuple[str, ...]
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Stack:
    """Parts below each other."""

    children: tuple[Part, ...]


@dataclass(frozen=True)
class Details:
    """A section with a summary line; collapsed in HTML until opened, always open in text."""

    summary: str
    body: Part


Part: TypeAlias = Text | Line | Table | Grid | Lanes | Stack | Details


def fold_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Join rows whose cells are equal; the joined row stands where its first row stood.

    Parameters
    ----------
    rows : tuple of Row
        Rows without ranks are left alone, and two rows of one rank are never joined.

    Returns
    -------
    tuple of Row
    """
    folded: dict[object, Row] = {}
    for number, row in enumerate(rows):
        key: object = row.cells if row.ranks else number
        held = folded.get(key)
        if held and set(held.ranks) & set(row.ranks):
            key, held = number, None
        folded[key] = Row(row.cells, held.ranks + row.ranks) if held else row
    return tuple(folded.values())
