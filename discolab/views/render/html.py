"""Lowers parts to HTML for notebooks: no JavaScript, no external file, saved output shows as is.

What must survive where styles are stripped (tables, labels, numbers) is plain markup. Text is
escaped by construction: elements are made by `markup.tag`, which lets nothing through that is not
HTML by type. Pure; may be called from any thread; never raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import assert_never

from ..formats import format_bars, format_ranks, format_workers
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
    Lane,
    Lanes,
    Legend,
    Line,
    Mark,
    Part,
    Plot,
    Role,
    Source,
    SourceLine,
    Span,
    Table,
    Text,
    Tracks,
    VStack,
)
from .html_drawings import grid_html, plot_html, tracks_html
from .markup import Html, joined, tag
from .program import (
    CHANGED,
    DIFFERS,
    MOST_COLUMNS,
    SIGNS,
    label_of,
    lines_of,
    listed,
    runs_of,
    sizes_of,
)
from .style import (
    PROGRAM_STYLE,
    STYLE,
    gradient,
    heat_source,
    rank_colour,
    rank_fill,
    stacked_style,
)

_MOST_ROWS = 16
_CLASSES: dict[Role, str] = {
    "title": "t",
    "muted": "m",
    "good": "ok",
    "warning": "w",
    "error": "e",
}
_WIDTH_STEP = 40  # pixels
_AROUND, _PADDING, _RANK, _CHARACTER = 28, 12, 40, 7  # of a table, a cell, its ranks, a letter
_FRAME = 12  # around a warning, and what its bold letters take
_LONG = 28  # characters of a cell that is wrapped
_WIDTHS = re.compile(r'<table class="d w(\d+)">')
_CELL_SIDE, _SPAN_SIDE = 48, 28  # pixels of a thumbnail in a table, and of values side by side


def render_html(part: Part) -> str:
    """Draw a part as a self-contained HTML fragment.

    Parameters
    ----------
    part : Part

    Returns
    -------
    str
        One ``<div>``; the same part gives the same string.
    """
    try:
        body = _html(part)
    except Exception as error:  # a view never raises
        body = Html.escape(f"(this view could not be drawn: {type(error).__name__})")
    uses_program_style = '<pre class="q"' in body or '<div class="o">' in body
    rules = STYLE + PROGRAM_STYLE if uses_program_style else STYLE
    style = tag("style", Html(rules + stacked_style(set(map(int, _WIDTHS.findall(body))))))
    return str(tag("div", style, body, class_="dl-v"))


def _html(part: Part) -> Html:
    match part:
        case Text(text, "code"):
            return tag("pre", Html("\n").join(text.split("\n")), class_="q")
        case Text(text, role):
            css = " ".join(filter(None, ("p", _CLASSES.get(role))))
            return tag("div", Html("\n").join(text.split("\n")), class_=css)
        case Line(spans):
            return tag("div", *map(_span, spans))
        case Table():
            return _table(part)
        case Grid():
            return grid_html(part)
        case Plot():
            return plot_html(part)
        case Lanes():
            return _lanes(part)
        case Tracks():
            return tracks_html(part)
        case Source():
            return _source(part)
        case ComparisonTable():
            return _across(part)
        case Heat() | Bars():
            return tag("div", _cell(part))
        case Legend():
            return _legend(part)
        case VStack(children):
            return joined(map(_html, children))
        case HStack(children):
            return tag("div", *(tag("div", _html(child)) for child in children), class_="s")
        case Card(title, children):
            head = tag("div", *map(_span, title.spans), class_="hd")
            return tag("div", head, *map(_html, children), class_="c")
        case Details(summary, body):
            return tag("details", tag("summary", summary), _html(body))
        case _:
            assert_never(part)


def _span(span: Text) -> Html:
    css = _CLASSES.get(span.role)
    return tag("span", span.text, class_=css) if css else Html.escape(span.text)


def _muted(*children: object) -> Html:
    return tag("span", *children, class_="m")


# -- tables ----------------------------------------------------------------------------------------


def _cell(cell: Cell) -> Html:
    match cell:
        case Text(text):
            return _span(cell) if text else Html()  # an empty cell: stacked tables leave it out
        case Badge(letter, odd):
            if not letter:
                return Html()
            return tag("span", letter, " ≠" if odd else "", class_="k o" if odd else "k")
        case Heat():
            return _thumbnail(cell, _CELL_SIDE, 8)
        case Bars(heights, alt):
            return tag("span", format_bars(heights), class_="n", role="img", aria_label=alt)
        case _:
            assert_never(cell)


def _thumbnail(heat: Heat, side: int, least: int) -> Html:
    """A thumbnail with its longer side of so many pixels, the other one of `least` or more."""
    height, width = len(heat.levels), len(heat.levels[0])
    scale = side / max(height, width)
    tall, wide = (max(round(length * scale), least) for length in (height, width))
    return tag(
        "img",
        class_="h",
        width=wide,
        height=tall,
        style=f"height:{tall}px",
        src=heat_source(heat),
        alt=heat.alt,
    )


def _legend(legend: Legend) -> Html:
    swatch = tag("span", class_="l", style=f"background:{gradient(legend.diverging)}")
    ends = Html("{} {} to {}").format(legend.low, swatch, legend.high) if legend.low else ""
    loud = joined((" ", tag("span", "×", class_="x"), " not finite")) if legend.nonfinite else ""
    words = f" · {legend.words}" if legend.words else ""
    return tag("div", ends, loud, _muted(words), class_="j")


def _head(*children: object, style: str | None = None, class_: str | None = None) -> Html:
    return tag("th", *children, scope="col", style=style, class_=class_)


def _data_table(heads: Iterable[Html], rows: Iterable[Html], width: int) -> Html:
    """A table; `width` is what it needs at least, in pixels: where there is less, it is stacked."""
    head = tag("thead", tag("tr", *heads))
    step = -(-width // _WIDTH_STEP) * _WIDTH_STEP
    return tag("table", head, tag("tbody", *rows), class_=f"d w{step}")


def _width_of(cell: Cell) -> int:
    """About how many pixels a cell needs at least."""
    match cell:
        case Text(text, role):
            wide = min(len(text), _LONG) * _CHARACTER
            return wide + _FRAME if role in ("warning", "error") else wide
        case Badge(_, odd):
            return 48 if odd else 26
        case Heat():
            return _CELL_SIDE
        case Bars(heights, _):
            return len(heights) * _CHARACTER
        case _:
            assert_never(cell)


def _table(table: Table) -> Html:
    rows = table.folded() if len(table.rows) > _MOST_ROWS else table.rows
    ranked = any(row.ranks for row in rows)
    right = ["r" if column.align == "right" else None for column in table.columns]
    heads = [
        _head(column.title, class_=css) for column, css in zip(table.columns, right, strict=True)
    ]
    width = _AROUND + (_RANK if ranked else 0)
    for place, column in enumerate(table.columns):
        head = (len(column.title) * _CHARACTER * 9) // 8  # in bold
        width += max([head, *(_width_of(row.cells[place]) for row in rows)]) + _PADDING
    body = []
    for row in rows:
        shown = [
            tag(
                "td",
                _cell(cell),
                class_="lg" if isinstance(cell, Text) and len(cell.text) > _LONG else css,
                data_h=column.title or None,
            )
            for cell, css, column in zip(row.cells, right, table.columns, strict=True)
        ]
        body.append(tag("tr", *([_rank_cell(row.ranks)] if ranked else []), *shown))
    return _data_table([*([_head("rank")] if ranked else []), *heads], body, width)


def _rank_cell(ranks: tuple[int, ...]) -> Html:
    style = f"border-left:5px solid {rank_colour(ranks[0])}" if ranks else None
    return tag("th", format_ranks(ranks), scope="row", style=style)


def _lanes(lanes: Lanes) -> Html:
    heads = _head().join(map(_head, lanes.heads))
    width = _AROUND + _RANK + len(lanes.heads) * 100
    return _data_table([_head("rank"), heads], map(_lane, lanes.lanes), width)


def _lane(lane: Lane) -> Html:
    stages = tag("td", "→", class_="m").join(
        tag("td", _boxes(rows), class_="u") for rows in lane.stages
    )
    return tag("tr", _rank_cell((lane.rank,)), stages)


def _boxes(rows: tuple[tuple[Box, ...], ...]) -> Html:
    if not rows:
        return _muted("nothing")
    return joined(tag("div", Html(" ").join(map(_box, row))) for row in rows)


def _box(box: Box) -> Html:
    fill = rank_fill(box.owners) if box.owners else "rgba(128,128,128,.18)"
    origin = f"from {format_workers(box.owners)}" if box.owners else None
    return tag("span", box.text, class_="b", title=origin, style=f"background:{fill}")


# -- programs and values side by side --------------------------------------------------------------


def _source(source: Source) -> Html:
    """Numbered lines, in front of them who is there in the workers' colours."""
    wide, digits = sizes_of(source)
    gap = (_muted(" " * (wide + 1), "⋮".rjust(digits)),)
    lines = [
        ("ln", gap) if line is None else _source_line(line, wide, digits)
        for line in lines_of(source)
    ]
    ends = [Html("\n")] * (len(lines) - 1) + [Html()]
    shown = [
        tag("span", *pieces, end, class_=look)
        for (look, pieces), end in zip(lines, ends, strict=True)
    ]
    return tag("pre", *shown, class_="q", style=f"--n:{wide + digits + 3}ch")


def _source_line(line: SourceLine, wide: int, digits: int) -> tuple[str, tuple[object, ...]]:
    """How a line looks, and what stands there."""
    number = _muted(f"{line.number:>{digits}}")
    text = line.text.expandtabs(4)
    if not line.marks:
        return "ln", (" " * (wide + 1), number, "  ", text)
    width = sum(len(format_ranks(mark.ranks)) + 3 for mark in line.marks) - 1
    marks = Html(" ").join(map(_mark, line.marks))
    look = "ln at" if any(mark.look != "waiting" for mark in line.marks) else "ln by"
    return look, (" " * (wide - width), marks, " ", number, "  ", text)


def _mark(mark: Mark) -> Html:
    return joined((_rank_badge(mark.ranks), f" {SIGNS.get(mark.look, '?')}"))


def _rank_badge(ranks: tuple[int, ...]) -> Html:
    """The ranks on the colours of the workers."""
    return tag("b", format_ranks(ranks), style=f"background:{rank_fill(ranks)}")


def _across(across: ComparisonTable) -> Html:
    """A column a worker; of many workers the values of each row in a list."""
    ranks = across.ranks
    columns = len(ranks) <= MOST_COLUMNS
    marks = any(row.differs for row in across.rows)
    about = any(row.about for row in across.rows)
    heads = [tag("th")] if marks else []
    heads += map(_head, across.heads[: 2 if about else 1])
    if columns:
        heads += [
            _head(f"worker {rank}", style=f"border-bottom:3px solid {rank_colour(rank)}")
            for rank in ranks
        ]
    else:
        heads.append(_head(f"{len(ranks)} workers"))
    rows = (_across_row(row, ranks, columns, marks, about) for row in across.rows)
    names = max((len(row.name) for row in across.rows), default=0) * _CHARACTER
    width = _AROUND + min(names, 240) + (100 if about else 0) + (24 if marks else 0)
    width += _span_width(across) * (len(ranks) if columns else 1)
    return tag("div", _data_table(heads, rows, width), class_="o")


def _span_width(across: ComparisonTable) -> int:
    """About how many pixels a worker's values need."""
    spans = [span for row in across.rows for span in row.spans]
    texts = max((min(len(span.words.text), _LONG // 2) for span in spans), default=0)
    picture = _SPAN_SIDE if any(span.heat for span in spans) else 0
    return max(texts * _CHARACTER + picture, 72) + _PADDING


def _across_row(
    row: ComparisonRow, ranks: Sequence[int], columns: bool, marks: bool, about: bool
) -> Html:
    cells = [tag("td", _differs(row))] if marks else []
    dot = joined((" ", tag("span", CHANGED, class_="ch"))) if row.changed else ""
    cells.append(tag("th", row.name, dot, scope="row", class_="i"))
    if about:
        cells.append(tag("td", row.about, class_="m ab"))
    if columns:
        runs = runs_of(row, ranks)
        cells += [_span_cell(span, covered, ranks) for span, covered in runs]
    else:
        cells.append(tag("td", _list(row, ranks), class_="ls"))
    return tag("tr", *cells)


def _differs(row: ComparisonRow) -> Html:
    """Loud only where somebody stands out: shards always differ."""
    if not row.differs:
        return Html()
    loud = any(span.words.role in ("warning", "error") for span in row.spans)
    return tag("span", DIFFERS, class_="w" if loud else "m")


def _span_cell(span: Span | None, covered: Sequence[int], ranks: Sequence[int]) -> Html:
    several = len(covered) if len(covered) > 1 else None
    if span is None:
        return tag("td", colspan=several)
    label = _label(label_of(covered, ranks))
    css = "f" if several else None
    who = None if label else format_ranks(covered)
    colour = None if label else f"--r:{rank_colour(covered[0])}"
    content = _content(span)
    return tag("td", label, content, colspan=several, class_=css, data_h=who, style=colour)


def _label(label: str) -> Html:
    return _muted(label) if label else Html()


def _content(span: Span) -> Html:
    picture = joined((_thumbnail(span.heat, _SPAN_SIDE, 6), " ")) if span.heat else ""
    note = _muted(f" · {span.note}") if span.note else ""
    return joined((picture, _span(span.words), note))


def _list(row: ComparisonRow, ranks: Sequence[int]) -> Html:
    if len(row.spans) == 1 and len(row.spans[0].ranks) == len(ranks):
        return joined((_label(label_of(ranks, ranks)), _content(row.spans[0])))
    shown, more = listed(row)
    items = [
        tag("span", _rank_badge(span.ranks), " ", _content(span), " ", class_="v") for span in shown
    ]
    return joined((*items, _muted(f"and {more} more values") if more else ""))
