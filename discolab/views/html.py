"""Lowers parts to HTML for notebooks: no JavaScript, no external file, saved output shows as is.

One scoped ``<style>`` uses JupyterLab's theme variables with neutral fallbacks; what must survive
where styles are stripped (tables, labels, numbers) is plain markup. Strings are escaped in one
place, `_escape`. Pure; may be called from any thread; never raises.
"""

from __future__ import annotations

import math
from html import escape

from .formats import format_ranks, format_workers, printable
from .parts import (
    Box,
    Details,
    Grid,
    Lane,
    Lanes,
    Line,
    Part,
    Role,
    Row,
    Stack,
    Table,
    Text,
    Tile,
    fold_rows,
)

# Okabe-Ito, black replaced by grey so that it shows on a dark page.
RANK_COLOURS = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#D55E00",
    "#0072B2",
    "#CC79A7",
    "#F0E442",
    "#999999",
)
_MOST_ROWS = 16
_MOST_STRIPES = 16
_SMALLEST_TILE = 20  # pixels; a rank label fits
_USUAL_BOX = (320, 140)  # pixels, width and height
_LARGEST_BOX = (560, 320)

_CLASSES: dict[Role, str] = {"title": "t", "muted": "m", "warning": "w", "error": "e"}
_STYLE = (
    ".dl-v{font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);"
    "color:var(--jp-ui-font-color1,inherit);font-variant-numeric:tabular-nums;overflow-x:auto}"
    ".dl-v .t{font-weight:600}"
    ".dl-v div+.p.t,.dl-v table+.p.t{margin-top:8px}"
    ".dl-v .m{opacity:.72}"
    ".dl-v .w{background:rgba(230,159,0,.28);border-radius:3px;padding:0 3px}"
    ".dl-v .e{background:rgba(213,60,0,.22);border-radius:3px;padding:0 3px}"
    ".dl-v .p{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0}"
    ".dl-v table{margin:4px 0;width:auto;border-collapse:collapse;font-size:inherit;"
    "table-layout:auto}"
    ".dl-v table.d th,.dl-v table.d td{padding:2px 10px 2px 6px;text-align:left;border:0;"
    "white-space:nowrap;font-weight:400}"
    ".dl-v table.d thead th{font-weight:600;"
    "border-bottom:1px solid var(--jp-border-color1,rgba(128,128,128,.5))}"
    ".dl-v table.d .r{text-align:right}"
    ".dl-v table.g{border-collapse:separate;border-spacing:1px}"
    ".dl-v table.g tr{background:none!important}"
    ".dl-v table.g td{padding:0;text-align:center;vertical-align:middle;font-size:11px;"
    "line-height:1.2;white-space:nowrap;overflow:hidden}"
    ".dl-v table.d td.s{padding:4px 6px}"
    ".dl-v .b{display:inline-block;min-width:2.4em;margin:1px;padding:1px 5px;border-radius:3px;"
    "text-align:center}"
    ".dl-v summary{cursor:pointer}"
)


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
        body = f"(this view could not be drawn: {_escape(type(error).__name__)})"
    return f'<div class="dl-v"><style>{_STYLE}</style>{body}</div>'


def _escape(text: str) -> str:
    return escape(printable(text), quote=True)


def _html(part: Part) -> str:
    match part:
        case Text(text, role):
            css = " ".join(filter(None, ("p", _CLASSES.get(role, ""))))
            return f'<div class="{css}">' + "\n".join(map(_escape, text.split("\n"))) + "</div>"
        case Line(spans):
            return "<div>" + "".join(_span(span) for span in spans) + "</div>"
        case Table():
            return _table(part)
        case Grid():
            return _grid(part)
        case Lanes():
            return _lanes(part)
        case Stack(children):
            return "".join(_html(child) for child in children)
        case Details(summary, body):
            return f"<details><summary>{_escape(summary)}</summary>{_html(body)}</details>"
    raise TypeError(type(part).__name__)


def _span(span: Text) -> str:
    css = _CLASSES.get(span.role)
    return f'<span class="{css}">{_escape(span.text)}</span>' if css else _escape(span.text)


def rank_colour(rank: int) -> str:
    """Give the colour of a worker, as ``#rrggbb``; the same wherever a worker is drawn."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def _table(table: Table) -> str:
    rows = fold_rows(table.rows) if len(table.rows) > _MOST_ROWS else table.rows
    ranked = any(row.ranks for row in rows)
    right = [' class="r"' if column.align == "right" else "" for column in table.columns]
    heads = "".join(
        f'<th scope="col"{css}>{_escape(column.title)}</th>'
        for column, css in zip(table.columns, right, strict=True)
    )
    if ranked:
        heads = f'<th scope="col">rank</th>{heads}'
    body = "".join(
        "<tr>"
        + (_rank_cell(row) if ranked else "")
        + "".join(
            f"<td{css}>{_span(cell)}</td>" for cell, css in zip(row.cells, right, strict=True)
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
    heads = arrow.join(f'<th scope="col">{_escape(head)}</th>' for head in lanes.heads)
    body = "".join(map(_lane, lanes.lanes))
    return (
        '<table class="d"><thead><tr><th scope="col">rank</th>'
        f"{heads}</tr></thead><tbody>{body}</tbody></table>"
    )


def _lane(lane: Lane) -> str:
    cells = [f'<td class="s">{_boxes(rows)}</td>' for rows in lane.stages]
    stages = '<td class="m">→</td>'.join(cells)
    return f"<tr>{_rank_cell(Row((), (lane.rank,)))}{stages}</tr>"


def _boxes(rows: tuple[tuple[Box, ...], ...]) -> str:
    if not rows:
        return '<span class="m">nothing</span>'
    return "".join("<div>" + " ".join(map(_box, row)) + "</div>" for row in rows)


def _box(box: Box) -> str:
    fill = _fill(box.owners) if box.owners else "rgba(128,128,128,.18)"
    origin = f' title="from {format_workers(box.owners)}"' if box.owners else ""
    return f'<span class="b"{origin} style="background:{fill}">{_escape(box.text)}</span>'


def _grid(grid: Grid) -> str:
    heights, widths, to_scale = _pixels(grid)
    rows = "".join(
        "<tr>"
        + "".join(
            _tile(tile, width, height, grid.partial)
            for tile, width in zip(row, widths, strict=True)
        )
        + "</tr>"
        for row, height in zip(grid.tiles, heights, strict=True)
    )
    said = to_scale or "not to scale" in grid.caption
    caption = _escape(grid.caption) + ("" if said else " (not to scale)")
    return f'<div class="m">{caption}</div><table class="g"><tbody>{rows}</tbody></table>'


def _tile(tile: Tile, width: int, height: int, partial: bool) -> str:
    owners, label = format_ranks(tile.owners), _escape(tile.label)
    words = format_workers(tile.owners) if width >= 90 and len(tile.owners) > 1 else owners
    if set(tile.label) <= set("[:, ]"):
        pass  # the whole tensor: nothing to add
    elif height >= 34 and width >= 7 * len(tile.label):
        words += f"<br><span class=m>{label}</span>"
    elif width >= 7 * (len(tile.label) + len(words) + 2):
        words += f" &nbsp;<span class=m>{label}</span>"
    line = "dashed" if partial else "solid"
    style = (
        f"width:{width}px;min-width:{width}px;max-width:{width}px;height:{height}px;"
        f"border:1px {line} {rank_colour(tile.owners[0])};background:{_fill(tile.owners)}"
    )
    return f'<td title="{format_workers(tile.owners)}: {label}" style="{style}">{words}</td>'


def _fill(owners: tuple[int, ...]) -> str:
    """Give the owner's colour, thinned so that text shows on it; several owners as stripes."""
    colours = [rank_colour(rank) + "66" for rank in owners[:_MOST_STRIPES]]
    if len(colours) == 1:
        return colours[0]
    step = 100 / len(colours)
    stops = (f"{c} {i * step:.4g}% {(i + 1) * step:.4g}%" for i, c in enumerate(colours))
    return f"linear-gradient(90deg,{','.join(stops)})"


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
    heights = [max(round(size * scale), _SMALLEST_TILE) for size in grid.heights]
    return heights, widths, to_scale
