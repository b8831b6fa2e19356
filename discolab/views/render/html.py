"""Lowers parts to HTML for notebooks: no JavaScript, no external file, saved output shows as is.

What must survive where styles are stripped (tables, labels, numbers) is plain markup. Strings are
escaped in one place, `html_base.escaped`. Pure; may be called from any thread; never raises.
"""

from __future__ import annotations

from ..formats import format_bars, format_ranks, format_workers
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
    Lane,
    Lanes,
    Legend,
    Line,
    Part,
    Plot,
    Role,
    Row,
    Source,
    Stack,
    Table,
    Text,
    Tracks,
    fold_rows,
)
from .html_base import escaped, rank_colour, rank_fill
from .html_grid import grid_html
from .html_heat import gradient, heat_source
from .html_plot import plot_html
from .html_program import across_html, source_html, uses_program_style
from .html_style import PROGRAM_STYLE, STYLE
from .html_tracks import tracks_html

_MOST_ROWS = 16
_CLASSES: dict[Role, str] = {
    "title": "t",
    "muted": "m",
    "good": "ok",
    "warning": "w",
    "error": "e",
}


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
        body = f"(this view could not be drawn: {escaped(type(error).__name__)})"
    style = STYLE + PROGRAM_STYLE if uses_program_style(body) else STYLE
    return f'<div class="dl-v"><style>{style}</style>{body}</div>'


def _html(part: Part) -> str:
    match part:
        case Text(text, role):
            css = " ".join(filter(None, ("p", _CLASSES.get(role, ""))))
            return f'<div class="{css}">' + "\n".join(map(escaped, text.split("\n"))) + "</div>"
        case Line(spans):
            return "<div>" + "".join(_span(span) for span in spans) + "</div>"
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
            return source_html(part)
        case Across():
            return across_html(part)
        case Heat() | Bars():
            return f"<div>{_cell(part)}</div>"
        case Legend():
            return _legend(part)
        case Stack(children):
            return "".join(_html(child) for child in children)
        case Beside(children):
            inner = "".join(f"<div>{_html(child)}</div>" for child in children)
            return f'<div class="s">{inner}</div>'
        case Card(title, children):
            head = "".join(map(_span, title.spans))
            inner = "".join(map(_html, children))
            return f'<div class="c"><div class="hd">{head}</div>{inner}</div>'
        case Details(summary, body):
            return f"<details><summary>{escaped(summary)}</summary>{_html(body)}</details>"
    raise TypeError(type(part).__name__)


def _span(span: Text) -> str:
    css = _CLASSES.get(span.role)
    return f'<span class="{css}">{escaped(span.text)}</span>' if css else escaped(span.text)


def _cell(cell: Cell) -> str:
    match cell:
        case Text():
            return _span(cell)
        case Badge(letter, odd):
            if not letter:
                return ""
            css, mark = ("k o", " ≠") if odd else ("k", "")
            return f'<span class="{css}">{letter}{mark}</span>'
        case Heat(alt=alt):
            height, width = len(cell.levels), len(cell.levels[0])
            scale = 48 / max(height, width)
            tall, wide = (max(round(side * scale), 8) for side in (height, width))
            size = f'width="{wide}" height="{tall}" style="height:{tall}px"'
            return f'<img class="h" {size} src="{heat_source(cell)}" alt="{escaped(alt)}">'
        case Bars(heights, alt):
            words = format_bars(heights)
            return f'<span class="n" role="img" aria-label="{escaped(alt)}">{words}</span>'
    raise TypeError(type(cell).__name__)


def _legend(legend: Legend) -> str:
    swatch = f'<span class="l" style="background:{gradient(legend.diverging)}"></span>'
    loud = ' <span class="x">×</span> not finite' if legend.nonfinite else ""
    words = f" · {escaped(legend.words)}" if legend.words else ""
    ends = f"{escaped(legend.low)} {swatch} to {escaped(legend.high)}" if legend.low else ""
    return f'<div class="j">{ends}{loud}<span class="m">{words}</span></div>'


def _table(table: Table) -> str:
    rows = fold_rows(table.rows) if len(table.rows) > _MOST_ROWS else table.rows
    ranked = any(row.ranks for row in rows)
    right = [' class="r"' if column.align == "right" else "" for column in table.columns]
    heads = "".join(
        f'<th scope="col"{css}>{escaped(column.title)}</th>'
        for column, css in zip(table.columns, right, strict=True)
    )
    if ranked:
        heads = f'<th scope="col">rank</th>{heads}'
    body = "".join(
        "<tr>"
        + (_rank_cell(row) if ranked else "")
        + "".join(
            f"<td{css}>{_cell(cell)}</td>" for cell, css in zip(row.cells, right, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="d"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _rank_cell(row: Row) -> str:
    if not row.ranks:
        return '<th scope="row"></th>'
    style = f"border-left:5px solid {rank_colour(row.ranks[0])}"
    return f'<th scope="row" style="{style}">{format_ranks(row.ranks)}</th>'


def _lanes(lanes: Lanes) -> str:
    arrow = '<th scope="col"></th>'
    heads = arrow.join(f'<th scope="col">{escaped(head)}</th>' for head in lanes.heads)
    body = "".join(map(_lane, lanes.lanes))
    return (
        '<table class="d"><thead><tr><th scope="col">rank</th>'
        f"{heads}</tr></thead><tbody>{body}</tbody></table>"
    )


def _lane(lane: Lane) -> str:
    cells = [f'<td class="u">{_boxes(rows)}</td>' for rows in lane.stages]
    stages = '<td class="m">→</td>'.join(cells)
    return f"<tr>{_rank_cell(Row((), (lane.rank,)))}{stages}</tr>"


def _boxes(rows: tuple[tuple[Box, ...], ...]) -> str:
    if not rows:
        return '<span class="m">nothing</span>'
    return "".join("<div>" + " ".join(map(_box, row)) + "</div>" for row in rows)


def _box(box: Box) -> str:
    fill = rank_fill(box.owners) if box.owners else "rgba(128,128,128,.18)"
    origin = f' title="from {format_workers(box.owners)}"' if box.owners else ""
    return f'<span class="b"{origin} style="background:{fill}">{escaped(box.text)}</span>'
