"""Lowers `Tracks` to HTML: a table with a lane of inline-styled blocks for each worker. Pure.

A row of blocks is one gradient, some 30 bytes a block, so that a saved notebook stays small; only
what is wide enough for its name has an element of its own. Where styles are stripped, the names are
left, in order.
"""

from __future__ import annotations

from ..formats import cut, format_ranks
from ..parts import Stretch, Track, Tracks
from .html_base import escaped, rank_colour

_MOST_LABELS = 64  # in a drawing
_LONGEST = 24  # characters of one
_ENOUGH = 0.07  # of the whole time: a name of five letters fits
_HEIGHTS = (18, 14, 8)  # pixels of the rows of a lane
_GREY = "rgba(128,128,128,.45)"
_FAILED, _STOPPED = "rgba(213,60,0,.75)", "rgba(213,60,0,.3)"


def tracks_html(tracks: Tracks) -> str:
    """Draw the lanes, the ticks below them, and what the colours mean."""
    labels = _MOST_LABELS // (2 * max(1, len(tracks.tracks)))
    lanes = "".join(_lane(track, labels) for track in tracks.tracks)
    return (
        '<table class="d" style="width:100%;max-width:960px"><tbody>'
        f'{lanes}<tr><th></th><td style="padding:0 6px">{_ticks(tracks)}</td></tr></tbody></table>'
        f"{_legend(tracks)}"
    )


def _lane(track: Track, labels: int) -> str:
    colour = rank_colour(track.rank)
    rows = "".join(
        _row(row, colour, height, labels)
        for row, height in zip(track.rows, _HEIGHTS, strict=False)
        if row
    )
    return (
        f'<tr><th scope="row" style="border-left:5px solid {colour};width:1%">'
        f'{format_ranks((track.rank,))}</th><td style="padding:3px 6px">{rows}</td></tr>'
    )


def _row(row: tuple[Stretch, ...], colour: str, height: int, labels: int) -> str:
    stops: list[str] = []
    at = 0.0
    for stretch in row:
        start, end = max(stretch.start, at), max(stretch.end, at)
        paint = _paint(stretch, colour)
        if start > at:
            stops.append(f"transparent 0 {_percent(start)}")
        end = min(1.0, max(end, start + 0.0015))  # the shortest still shows
        stops.append(f"{paint} 0 {_percent(end)}")
        at = end
    stops.append("transparent 0")
    names = "".join(map(_label, _labelled(row, labels))) if height > 10 else ""
    return (
        f'<div style="position:relative;height:{height}px;margin:1px 0;font-size:11px;'
        f"text-indent:4px;white-space:nowrap;line-height:{height}px;"
        f'background:linear-gradient(90deg,{",".join(stops)})">{names}</div>'
    )


def _labelled(row: tuple[Stretch, ...], most: int) -> list[Stretch]:
    """The widest ones that have room for their names, in order."""
    wide = [s for s in row if s.label and s.end - s.start >= _ENOUGH]
    wide = sorted(wide, key=lambda s: s.start - s.end)[:most]
    return sorted(wide, key=lambda s: s.start)


def _label(stretch: Stretch) -> str:
    left, width = _percent(stretch.start), _percent(stretch.end - stretch.start)
    style = f"position:absolute;left:{left};width:{width};overflow:hidden;text-overflow:ellipsis"
    return f'<span style="{style}">{escaped(cut(stretch.label, _LONGEST))} </span>'


def _paint(stretch: Stretch, colour: str) -> str:
    match stretch.look:
        case "failed":
            return _FAILED
        case "stopped":
            return _STOPPED
        case "wait":
            return _GREY
        case "move":
            return colour
        case "span":
            return colour + "33"
    return colour + "80"


def _percent(part: float) -> str:
    return f"{part * 100:.4g}%"


def _ticks(tracks: Tracks) -> str:
    marks = []
    for place, words in tracks.ticks:
        side = f"left:{_percent(place)}" if place < 0.99 else "right:0"
        centred = ";transform:translateX(-50%)" if 0.01 < place < 0.99 else ""
        marks.append(
            f'<span class="m" style="position:absolute;white-space:nowrap;{side}{centred}">'
            f"{escaped(words)} </span>"
        )
    return f'<div style="position:relative;height:18px;font-size:11px">{"".join(marks)}</div>'


def _legend(tracks: Tracks) -> str:
    used = {s.look for track in tracks.tracks for row in track.rows for s in row}
    words = {
        "busy": ("busy", "rgba(128,128,128,.28)"),
        "wait": ("waiting for others", _GREY),
        "move": ("in a collective", "rgba(128,128,128,.9)"),
        "stopped": ("stopped", _STOPPED),
        "failed": ("failed", _FAILED),
    }
    shown = "".join(
        f'<span style="display:inline-block;width:14px;height:10px;margin:0 5px 0 0;background:'
        f'{paint}"></span>{name} &nbsp; '
        for look, (name, paint) in words.items()
        if look in used
    )
    return f'<div class="m" style="font-size:11px">{shown}</div>'
