"""The small tree of parts that every view is built from before it is drawn.

A view is a pure function from plain records to parts; `text.render_text` and
`html.render_html` lower the same parts, so text and HTML carry the same facts. The leaves are
`Text`, `Line`, `Table`, `Grid`, `Plot`, `Lanes`, `Tracks`, `Source`, `ComparisonTable`, `Heat`,
`Bars` and `Legend`; `VStack`, `HStack`, `Card` and `Details` hold other parts. All are frozen,
comparable, and hold unescaped strings: escaping is the renderers' business alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["plain", "title", "muted", "good", "warning", "error", "code"]
Align: TypeAlias = Literal["left", "right"]


@dataclass(frozen=True)
class Text:
    """A piece of text; as a part of its own it may have several lines.

    The role ``code`` is for such a part alone: its letters are equally wide.
    """

    text: str
    role: Role = "plain"


@dataclass(frozen=True)
class Line:
    """Pieces of text on one line, each with its own role."""

    spans: tuple[Text, ...]


@dataclass(frozen=True)
class Heat:
    """A thumbnail of a tensor: rows of levels, 0 the lowest, 254 the highest, 255 not finite.

    All rows are of one length, and all thumbnails of a view are on one scale. `diverging` says
    that 127 stands for zero. `alt` says in words what is seen. Text leaves it out.
    """

    levels: tuple[bytes, ...]
    alt: str
    diverging: bool = False


@dataclass(frozen=True)
class Bars:
    """A small histogram or sparkline; heights from 0 to 1. `alt` says in words what is seen."""

    heights: tuple[float, ...]
    alt: str


@dataclass(frozen=True)
class Badge:
    """A letter for a class of equal contents, in a colour of its own; `odd` ones stand out."""

    letter: str
    odd: bool = False


Cell: TypeAlias = Text | Heat | Bars | Badge


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

    cells: tuple[Cell, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table; text folds rows that differ only in rank, HTML only beyond 16 rows.

    Rows that are `ordered`, as events are, stay as they are: one that is folded into an earlier one
    would stand at the wrong event.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    ordered: bool = False

    def folded(self) -> tuple[Row, ...]:
        """The rows, those that differ only in rank as one."""
        return self.rows if self.ordered else fold_rows(self.rows)


@dataclass(frozen=True)
class Tile:
    """One rectangle of a `Grid`: which slice of the logical tensor, who holds it, its values."""

    label: str
    owners: tuple[int, ...]
    heat: Heat | None = None


@dataclass(frozen=True)
class Grid:
    """A logical tensor cut in rectangles, to be drawn to scale.

    `heights` and `widths` are in elements. A height of 0 marks a one-dimensional tensor, drawn as
    a bar of fixed thickness. `tiles[i][j]` is in row i and column j. `partial` says that the
    owners hold terms of a reduction, not the value itself. `apart` is None for tiles that make up
    one tensor; else there is one row of tiles that stand apart, with that text between them, and
    `heights` holds one height a tile; text leaves those out unless they are `partial`.
    """

    caption: str
    heights: tuple[int, ...]
    widths: tuple[int, ...]
    tiles: tuple[tuple[Tile, ...], ...]
    partial: bool = False
    apart: str | None = None


@dataclass(frozen=True)
class Outline:
    """A shard in a `Plot`: its place in elements (top, left, bottom, right), and who holds it.

    `levels` are as in `Heat` and cover the elements of `covers`, a little more than the place;
    none where nothing is known, and then `state` says why.
    """

    place: tuple[int, int, int, int]
    owners: tuple[int, ...]
    levels: tuple[bytes, ...]
    covers: tuple[int, int, int, int]
    state: str = ""


@dataclass(frozen=True)
class Plot:
    """A large picture of a tensor with axes, the shards outlined.

    `size` is in elements, `drawn` in pixels, down and across; `axes` names what runs there.
    `lines` is the picture in characters, which stands for it in text.
    """

    size: tuple[int, int]
    drawn: tuple[int, int]
    outlines: tuple[Outline, ...]
    axes: tuple[str, str]
    joined: bool
    diverging: bool
    alt: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Legend:
    """What the colours of the thumbnails mean; drawn only where they are, so not in text.

    `low` and `high` are empty if nothing is finite.
    """

    low: str
    high: str
    diverging: bool = False
    nonfinite: bool = False
    words: str = ""


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
class Interval:
    """Some of a worker's time: from `start` to `end`, as parts of the whole from 0 to 1.

    `look` is ``busy`` (in a call), ``span`` (in a part that the user has named), ``wait`` and
    ``move`` (in a collective, before and after its last member came), ``failed`` or ``stopped``.
    """

    start: float
    end: float
    look: str
    label: str = ""


@dataclass(frozen=True)
class Track:
    """One worker's time: calls, named parts and collectives below each other."""

    rank: int
    rows: tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Tracks:
    """What each worker did over one time; `ticks` are places from 0 to 1 with their words."""

    tracks: tuple[Track, ...]
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Mark:
    """Workers that are at a line of a `Source`.

    `look` is ``paused``, ``waiting`` (in a collective, for others), ``running`` or ``failed``.
    """

    ranks: tuple[int, ...]
    look: str


@dataclass(frozen=True)
class SourceLine:
    """A line of a program, and who is there."""

    number: int
    text: str
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Source:
    """Lines of a program with the places of workers; a gap where numbers do not follow on."""

    lines: tuple[SourceLine, ...]


@dataclass(frozen=True)
class Span:
    """What some workers have alike in a row of `ComparisonTable`; `note` is less important."""

    ranks: tuple[int, ...]
    words: Text
    heat: Heat | None = None
    note: str = ""


@dataclass(frozen=True)
class ComparisonRow:
    """A row of `ComparisonTable`: what each worker has under a name.

    `about` is what `name` is, as far as workers agree.
    """

    name: str
    about: str
    spans: tuple[Span, ...]
    differs: bool = False
    changed: bool = False


@dataclass(frozen=True)
class ComparisonTable:
    """Names down, workers across; what is equal in neighbours is one cell.

    With many workers, and in text where columns have no room, the values are listed instead.
    """

    heads: tuple[str, str]
    ranks: tuple[int, ...]
    rows: tuple[ComparisonRow, ...]


@dataclass(frozen=True)
class VStack:
    """Parts below each other."""

    children: tuple[Part, ...]


@dataclass(frozen=True)
class HStack:
    """Parts next to each other where there is room, else below each other, as in text."""

    children: tuple[Part, ...]


@dataclass(frozen=True)
class Card:
    """Parts that belong together, under a line that names them; in text just below each other."""

    title: Line
    children: tuple[Part, ...]


@dataclass(frozen=True)
class Details:
    """A section with a summary line; collapsed in HTML until opened, always open in text.

    Text leaves out a section that `extra` says to go beyond what a reader needs.
    """

    summary: str
    body: Part
    extra: bool = False


Part: TypeAlias = (
    Text
    | Line
    | Table
    | Grid
    | Legend
    | Lanes
    | Tracks
    | Source
    | ComparisonTable
    | Heat
    | Bars
    | VStack
    | HStack
    | Card
    | Details
    | Plot
)


Stack, Beside = VStack, HStack  # their names in earlier versions


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


def without_empty_columns(table: Table) -> Table:
    """Drop the columns in which nothing stands."""
    kept = [
        place
        for place in range(len(table.columns))
        if any(getattr(row.cells[place], "text", "") for row in table.rows)
    ]
    rows = tuple(Row(tuple(row.cells[place] for place in kept)) for row in table.rows)
    return Table(tuple(table.columns[place] for place in kept), rows)
