"""Lowers `Source` and `Across` to lines of text, at most 100 characters wide where it can. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..formats import cut, format_ranks, printable
from ..parts import Across, AcrossRow, Source, Span
from .across import (
    MOST_COLUMNS,
    label_of,
    lines_of,
    listed,
    marked,
    marks_are_used,
    runs_of,
    sign,
    sizes_of,
)

_WIDTH = 98  # characters, with the margin 100
_GAP = "  "
_BETWEEN = " │ "
_LONGEST_NAME = 24


def source_lines(source: Source) -> list[str]:
    """Numbered lines, in front of them who is there."""
    wide, digits = sizes_of(source)
    found = []
    for line in lines_of(source):
        if line is None:
            found.append(" " * (wide + 1) + "⋮".rjust(digits))
            continue
        marks = " ".join(map(sign, line.marks)).rjust(wide)
        text = printable(line.text.expandtabs(4))
        found.append(cut(f"{marks} {line.number:>{digits}}  {text}".rstrip(), _WIDTH))
    return found


def across_lines(across: Across) -> list[str]:
    """A column a worker; rows that have no room in them, and those of many workers, in a list."""
    fronts, head = _front(across)
    ranks = across.ranks if len(across.ranks) <= MOST_COLUMNS else ()
    rows = [_cells(row, ranks) for row in across.rows]
    widths = _widths(ranks, rows, _WIDTH - len(head) - len(_GAP)) if ranks else {}
    lines = [_GAP.join([head, *(_rank_head(rank).ljust(widths[rank]) for rank in widths)])]
    for front, row, cells in zip(fronts, across.rows, rows, strict=True):
        if widths and all(len(text) <= _room(held, widths) for held, text in cells):
            told = [text.ljust(_room(held, widths)) for held, text in cells]
            lines.append(_GAP.join([front, *told]))
        else:
            lines += _listed(front, row, across.ranks)
    return [line.rstrip() for line in lines]


def _rank_head(rank: int) -> str:
    return f"worker {rank}"


def _cells(row: AcrossRow, ranks: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
    return [(held, label_of(held, ranks) + _words(span)) for span, held in runs_of(row, ranks)]


def _room(held: Sequence[int], widths: Mapping[int, int]) -> int:
    return sum(widths[rank] for rank in held) + len(_GAP) * (len(held) - 1)


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
        for held, text in row:
            if len(held) == 1 and len(text) <= share:
                widths[held[0]] = max(widths[held[0]], len(text))
    whole = max((len(text) for row in rows for held, text in row if len(held) > 1), default=0)
    widths[ranks[-1]] += max(0, min(whole, room) - _room(ranks, widths))
    return widths


def _words(span: Span | None) -> str:
    if span is None:
        return ""
    return printable(span.words.text) + (f" · {printable(span.note)}" if span.note else "")


def _front(across: Across) -> tuple[list[str], str]:
    """Marks, name and type of each row, all as wide; and what stands above them."""
    marks = marks_are_used(across)
    names = [cut(printable(row.name), _LONGEST_NAME) for row in across.rows]
    abouts = [printable(row.about) for row in across.rows]
    name, about = (
        max(map(len, (head, *words)))
        for head, words in zip(across.heads, (names, abouts), strict=True)
    )
    fronts = [
        (marked(row) + " " if marks else "") + f"{one:<{name}}{_GAP}{other:<{about}}"
        for row, one, other in zip(across.rows, names, abouts, strict=True)
    ]
    blank = "   " if marks else ""
    head = f"{blank}{across.heads[0]:<{name}}{_GAP}{across.heads[1]:<{about}}"
    if not about:
        return [front.rstrip().ljust(len(head.rstrip())) for front in fronts], head.rstrip()
    return fronts, head


def _listed(front: str, row: AcrossRow, ranks: Sequence[int]) -> list[str]:
    """The values of a row one after the other; a line ends between two of them."""
    room = max(_WIDTH - len(front) - len(_GAP), 30)
    told: list[str] = []
    for item in _items(row, ranks):
        if told and len(told[-1]) + len(_BETWEEN) + len(item) <= room:
            told[-1] += _BETWEEN + item
        else:
            told.append(cut(item, room))
    blank = " " * len(front)
    return [(front if not place else blank) + _GAP + line for place, line in enumerate(told)]


def _items(row: AcrossRow, ranks: Sequence[int]) -> list[str]:
    if len(row.spans) == 1 and len(row.spans[0].ranks) == len(ranks):
        return [label_of(ranks, ranks) + _words(row.spans[0])]
    shown, more = listed(row)
    items = [f"{format_ranks(span.ranks)}: {_words(span)}" for span in shown]
    return [*items, f"and {more} more values"] if more else items
