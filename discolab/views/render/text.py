"""Lowers parts to plain text: for terminals, ``text/plain`` and golden tests.

What reads alike in plain text and in a terminal with colours is made once, as lines of *segments*:
`styled_lines`. Plain text joins them, `rich` colours them. Deterministic, no terminal colours, no
blanks at line ends, at most 100 characters wide where it can be. Strings are made printable here.
Pure; may be called from any thread; never raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar, assert_never

from ..formats import cut, format_bars, format_ranks, format_workers, printable
from ..parts import (
    Badge,
    Bars,
    Box,
    Card,
    Cell,
    Column,
    ComparisonRow,
    ComparisonTable,
    Details,
    Grid,
    Heat,
    HStack,
    Lanes,
    Legend,
    Line,
    Mark,
    Part,
    Plot,
    Role,
    Row,
    Source,
    SourceLine,
    Span,
    Table,
    Text,
    Track,
    Tracks,
    VStack,
)
from .program import (
    MOST_COLUMNS,
    SIGNS,
    label_of,
    lines_of,
    listed,
    marked,
    marks_are_used,
    runs_of,
    sizes_of,
)

_Item = TypeVar("_Item")
_MOST_TILES = 16
_MARGIN = "  "
_WIDTH = 98  # characters, with the margin 100
_GAP = "  "
_BETWEEN = " │ "
_LONGEST_NAME = 24
_PIECES = 60  # that the whole time is cut in, a character each
_IDLE, _BUSY = "·", "█"
_MARKS = {"busy": _BUSY, "move": "▒", "wait": "░", "stopped": "x", "failed": "!"}
_ORDER = tuple(_MARKS)  # what comes later is drawn over what came before
_SMALLEST = 0.5  # of a piece that a interval must cover to be drawn; failures always are
_LEGEND = f"{_BUSY} busy  ░ waiting for others  ▒ in a collective  {_IDLE} idle"


class Segment(NamedTuple):
    """Characters of a line that look alike: by their role, or on the colours of some workers."""

    text: str
    role: Role = "plain"
    ranks: tuple[int, ...] = ()


Styled: TypeAlias = list[Segment]
"""A line, as its segments; all of them printable."""


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


def styled_lines(part: Text | Line | Source | Tracks | Plot) -> list[Styled]:
    """Lower what has the same lines in plain text and in colours."""
    match part:
        case Text(text, role):
            return [[Segment(printable(line), role)] for line in text.split("\n")]
        case Line(spans):
            return [[Segment(printable(span.text), span.role) for span in spans]]
        case Source():
            return _source_lines(part)
        case Tracks():
            return [[Segment(line)] for line in _track_lines(part)]
        case Plot(lines=lines):
            return [[Segment(line)] for line in lines]
        case _:
            assert_never(part)


def _lines(part: Part) -> list[str]:
    match part:
        case Text() | Line():
            return list(map(_joined, styled_lines(part)))
        case Source():
            return [_MARGIN + cut(_joined(line).rstrip(), _WIDTH) for line in styled_lines(part)]
        case Tracks() | Plot():
            return [_MARGIN + _joined(line) for line in styled_lines(part)]
        case Table():
            return _table_lines(part)
        case Grid():
            return _grid_lines(part)
        case Lanes():
            return _table_lines(_as_table(part))
        case ComparisonTable():
            return [_MARGIN + line for line in _across_lines(part)]
        case Heat() | Legend():
            return []
        case Bars():
            return [_MARGIN + _cell_text(part)]
        case VStack(children) | HStack(children):
            return [line for child in children for line in _lines(child)]
        case Card(title, children):
            return [line for child in (title, *children) for line in _lines(child)]
        case Details(extra=True):
            return []
        case Details(summary, body):
            return [printable(summary), *(_MARGIN + line for line in _lines(body))]
        case _:
            assert_never(part)


def _joined(line: Styled) -> str:
    return "".join(segment.text for segment in line)


def _rank_label(row: Row) -> str:
    label = format_ranks(row.ranks)
    return label if len(row.ranks) == 1 else f"[{label}]"


def _cell_text(cell: Cell) -> str:
    match cell:
        case Text(text):
            return printable(text)
        case Badge(letter):
            return printable(letter)
        case Bars(heights):
            return format_bars(heights)
        case Heat():
            return ""
        case _:
            assert_never(cell)


def _table_lines(table: Table) -> list[str]:
    table = _without_pictures(table)
    heads = [printable(column.title) for column in table.columns]
    right = [column.align == "right" for column in table.columns]
    rows = table.folded()
    body = [[_cell_text(cell) for cell in row.cells] for row in rows]
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
    return replace(table, columns=kept(table.columns), rows=rows)


def _pictured(rows: tuple[Row, ...], place: int) -> bool:
    cells = [row.cells[place] for row in rows]
    pictures = [isinstance(cell, Heat) for cell in cells]
    return any(pictures) and all(
        picture or not _cell_text(cell) for cell, picture in zip(cells, pictures, strict=True)
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
        return [f"{_MARGIN}{printable(grid.caption)}: {format_workers(owners)}"]
    shown = tiles[:_MOST_TILES]
    labels = [printable(tile.label) for tile in shown]
    width = max((len(label) for label in labels), default=0)
    lines = [
        f"{_MARGIN * 2}{label.ljust(width)}  {format_workers(tile.owners)}"
        for tile, label in zip(shown, labels, strict=True)
    ]
    if len(tiles) > len(shown):
        lines.append(f"{_MARGIN * 2}and {len(tiles) - len(shown)} more")
    return [_MARGIN + printable(grid.caption), *lines]


# -- programs and values side by side --------------------------------------------------------------


def _source_lines(source: Source) -> list[Styled]:
    """Numbered lines, in front of them who is there."""
    wide, digits = sizes_of(source)
    gap: Styled = [Segment(" " * (wide + 1) + "⋮".rjust(digits), "muted")]
    return [gap if line is None else _source_line(line, wide, digits) for line in lines_of(source)]


def _source_line(line: SourceLine, wide: int, digits: int) -> Styled:
    marks = [segment for mark in line.marks for segment in (*_mark(mark), Segment(" "))][:-1]
    return [
        Segment(" " * (wide - len(_joined(marks)))),
        *marks,
        Segment(f" {line.number:>{digits}}  ", "muted"),
        Segment(printable(line.text.expandtabs(4)), "title" if line.marks else "plain"),
    ]


def _mark(mark: Mark) -> Styled:
    """Who is at a line, and how: ``0-2 →``."""
    ranks = Segment(format_ranks(mark.ranks), ranks=mark.ranks)
    return [ranks, Segment(f" {SIGNS.get(mark.look, '?')}")]


def _across_lines(across: ComparisonTable) -> list[str]:
    """A column a worker; rows that have no room in them, and those of many workers, in a list."""
    fronts, head = _front(across)
    ranks = across.ranks if len(across.ranks) <= MOST_COLUMNS else ()
    rows = [_row_texts(row, ranks) for row in across.rows]
    widths = _widths(ranks, rows, _WIDTH - len(head) - len(_GAP)) if ranks else {}
    lines = [_GAP.join([head, *(_rank_head(rank).ljust(widths[rank]) for rank in widths)])]
    for front, row, cells in zip(fronts, across.rows, rows, strict=True):
        if widths and all(len(text) <= _room(covered, widths) for covered, text in cells):
            texts = [text.ljust(_room(covered, widths)) for covered, text in cells]
            lines.append(_GAP.join([front, *texts]))
        else:
            lines += _listed(front, row, across.ranks)
    return [line.rstrip() for line in lines]


def _rank_head(rank: int) -> str:
    return f"worker {rank}"


def _row_texts(row: ComparisonRow, ranks: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
    return [
        (covered, label_of(covered, ranks) + _span_text(span))
        for span, covered in runs_of(row, ranks)
    ]


def _room(covered: Sequence[int], widths: Mapping[int, int]) -> int:
    return sum(widths[rank] for rank in covered) + len(_GAP) * (len(covered) - 1)


def _widths(
    ranks: Sequence[int], rows: Sequence[Sequence[tuple[tuple[int, ...], str]]], room: int
) -> dict[int, int]:
    """How wide each column is; none if there is no room for columns.

    All are as wide as needed for what is in one column alone, up to an equal share of the room.
    The last one takes what cells over all columns need.
    """
    share = (room + len(_GAP)) // len(ranks) - len(_GAP)
    widths = {rank: len(_rank_head(rank)) for rank in ranks}
    if share < max(widths.values()):
        return {}
    for row in rows:
        for covered, text in row:
            if len(covered) == 1 and len(text) <= share:
                widths[covered[0]] = max(widths[covered[0]], len(text))
    whole = max((len(text) for row in rows for covered, text in row if len(covered) > 1), default=0)
    widths[ranks[-1]] += max(0, min(whole, room) - _room(ranks, widths))
    return widths


def _span_text(span: Span | None) -> str:
    if span is None:
        return ""
    return printable(span.words.text) + (f" · {printable(span.note)}" if span.note else "")


def _front(across: ComparisonTable) -> tuple[list[str], str]:
    """Marks, name and type of each row, all as wide; and what stands above them."""
    marks = marks_are_used(across)
    names = [cut(printable(row.name), _LONGEST_NAME) for row in across.rows]
    abouts = [printable(row.about) for row in across.rows]
    name, about = (
        max(map(len, (head, *words)))
        for head, words in zip(across.heads, (names, abouts), strict=True)
    )
    fronts = [
        (marked(row) + " " if marks else "") + f"{name_text:<{name}}{_GAP}{about_text:<{about}}"
        for row, name_text, about_text in zip(across.rows, names, abouts, strict=True)
    ]
    blank = "   " if marks else ""
    head = f"{blank}{across.heads[0]:<{name}}{_GAP}{across.heads[1]:<{about}}"
    if not about:
        return [front.rstrip().ljust(len(head.rstrip())) for front in fronts], head.rstrip()
    return fronts, head


def _listed(front: str, row: ComparisonRow, ranks: Sequence[int]) -> list[str]:
    """The values of a row one after the other; a line ends between two of them."""
    room = max(_WIDTH - len(front) - len(_GAP), 30)
    values: list[str] = []
    for item in _items(row, ranks):
        if values and len(values[-1]) + len(_BETWEEN) + len(item) <= room:
            values[-1] += _BETWEEN + item
        else:
            values.append(cut(item, room))
    blank = " " * len(front)
    return [(front if not place else blank) + _GAP + line for place, line in enumerate(values)]


def _items(row: ComparisonRow, ranks: Sequence[int]) -> list[str]:
    if len(row.spans) == 1 and len(row.spans[0].ranks) == len(ranks):
        return [label_of(ranks, ranks) + _span_text(row.spans[0])]
    shown, more = listed(row)
    items = [f"{format_ranks(span.ranks)}: {_span_text(span)}" for span in shown]
    return [*items, f"and {more} more values"] if more else items


# -- time: a character for each of 60 pieces of it -------------------------------------------------


def _track_lines(tracks: Tracks) -> list[str]:
    """Each worker's time, between its ticks and a line that says what the characters mean."""
    width = max((len(str(track.rank)) for track in tracks.tracks), default=1)
    lines = [f"{track.rank:>{width}} {_track_text(track)}" for track in tracks.tracks]
    words = [words for _, words in tracks.ticks]
    if len(words) > 1:
        lines.append(" " * (width + 1) + words[0] + words[-1].rjust(_PIECES - len(words[0])))
    marks = "".join("".join(line) for line in lines)
    more = [f"{_MARKS[look]} {look}" for look in ("stopped", "failed") if _MARKS[look] in marks]
    return [*lines, "  ".join([_LEGEND, *more])]


def _track_text(track: Track) -> str:
    line = [_IDLE] * _PIECES
    intervals = [interval for row in track.rows for interval in row if interval.look in _MARKS]
    intervals.sort(key=lambda interval: _ORDER.index(interval.look))
    for look in _ORDER:
        covered = [0.0] * _PIECES
        for interval in intervals:
            if interval.look == look:
                _cover(covered, interval.start * _PIECES, interval.end * _PIECES)
        least = 0.0 if look in ("stopped", "failed") else _SMALLEST
        for place, part in enumerate(covered):
            if part > 0 and part >= least:
                line[place] = _MARKS[look]
    return "".join(line)


def _cover(covered: list[float], start: float, end: float) -> None:
    """Add how much of each piece lies between `start` and `end`, both in pieces."""
    end = max(end, start + 1e-9)
    for place in range(max(0, int(start)), min(_PIECES, int(end) + 1)):
        covered[place] += max(0.0, min(end, place + 1) - max(start, place))
