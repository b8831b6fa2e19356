"""Draws to scale in HTML: tensors cut in tiles, a large picture with axes, and workers' time.

Where styles are stripped, what is left are the labels, in order, and the thumbnails with their
descriptions. A row of a lane of time is one gradient, some 30 bytes a block, so that a saved
notebook stays small; only what is wide enough for its name has an element of its own. Pure.
"""

from __future__ import annotations

import math

from ..formats import cut, format_ranks, format_workers
from ..parts import Grid, Heat, Interval, Outline, Plot, Tile, Track, Tracks
from .markup import Html, joined, tag
from .style import NOT_FINITE, heat_source, rank_colour, rank_fill

# -- tensors cut in tiles --------------------------------------------------------------------------

_SMALLEST_TILE = 20  # pixels; a rank label fits
_USUAL_BOX = (320, 160)  # pixels, width and height
_LARGEST_BOX = (560, 320)
_GAP = 8  # between tiles that stand apart
_LINE = 344  # as wide are those in one line
_MOST_APART = 4  # in one line, unless they are narrow
_LARGEST_APART = 140
_MOST_TOLD = 16
_NARROW = 300  # pixels that a drawing has at least
_BESIDE = 28  # pixels of a card's sides, which a drawing does not have
_BAR = 26  # how thick a tensor of one dimension is drawn


def grid_html(grid: Grid) -> Html:
    """Draw a grid; its caption says so if it is not to scale."""
    if grid.apart is not None:
        return _apart(grid)
    heights, widths, to_scale = _pixels(grid)
    rows = [
        [(tile, width, height) for tile, width in zip(tiles, widths, strict=True)]
        for tiles, height in zip(grid.tiles, heights, strict=True)
    ]
    wide = sum(widths) + 4 * len(widths) + 2  # with the lines and the space between the tiles
    least = min(1, _NARROW / wide)  # what is left of a pixel in a narrow window
    fits = all(
        _label(tile, round(width * least), round(height * least)) is not None
        for row in rows
        for tile, width, height in row
    )
    drawn, untold = [], []
    for row in rows:
        cells = []
        for tile, width, height in row:
            words = _label(tile, width, height) if fits else None
            if words is None:
                words = Html.escape(_owner_words(tile, width))
                told = f"{format_ranks(tile.owners)}: {tile.label}"
                untold.append(Html("&nbsp;").join(told.split(" ")))
            cells.append(_tile(tile, words, width, height, grid.partial))
        drawn.append(tag("tr", *cells))
    below = ""
    if untold:
        below = tag("div", Html(", ").join(untold[:_MOST_TOLD]), class_="m z")
    if len(untold) > _MOST_TOLD:
        below += tag("div", f"and {len(untold) - _MOST_TOLD} more", class_="m z")
    table = tag("table", tag("tbody", *drawn), class_="g", style=_unit(wide))
    return joined((_caption(grid, to_scale), table, below))


def _unit(wide: int, beside: int = _BESIDE) -> str:
    """The length that a pixel of a drawing has: less than one where it would be too wide."""
    return f"--u:min(1px,calc((100cqw - {beside}px)/{wide}))"


def _caption(grid: Grid, to_scale: bool) -> Html:
    said = to_scale or "not to scale" in grid.caption
    words = grid.caption + ("" if said else " (not to scale)")
    return tag("div", words, class_="m") if words else Html()


def _apart(grid: Grid) -> Html:
    tiles = grid.tiles[0]
    tall, wide = max(grid.heights), max(grid.widths)
    side = min((_LINE + _GAP) // min(len(tiles), _MOST_APART) - _GAP, _LARGEST_APART)
    scale = min(side / wide, side / tall if tall else math.inf)
    lines: list[list[Html]] = [[]]
    room, to_scale = _LINE, True
    for tile, height, width in zip(tiles, grid.heights, grid.widths, strict=True):
        sizes = round(width * scale), round(height * scale) if tall else _BAR
        shown = max(sizes[0], _SMALLEST_TILE), max(sizes[1], _SMALLEST_TILE)
        to_scale = to_scale and shown == sizes
        least = min(1, _NARROW / _LINE)
        words = _label(tile, *(round(size * least) for size in shown)) or Html.escape(
            _owner_words(tile, shown[0])
        )
        if tile is not tiles[0] and grid.apart:
            lines[-1].append(tag("td", grid.apart, class_="v"))
        if shown[0] > room:
            lines.append([])
            room = _LINE
        room -= shown[0] + _GAP
        lines[-1].append(_tile(tile, words, *shown, grid.partial))
    most = max(map(len, lines))
    wide = _LINE + 4 * most + _GAP + (10 * most if grid.apart else 0)
    rows = tag("tbody", *(tag("tr", *line) for line in lines))
    table = tag("table", rows, class_="g a", style=_unit(wide))
    return joined((_caption(grid, to_scale), table))


def _tile(tile: Tile, words: Html, width: int, height: int, partial: bool) -> Html:
    """A cell with the words, over the thumbnail where there is one."""
    line = "dashed" if partial else "solid"
    owner = rank_colour(tile.owners[0]) if tile.owners else "#888"
    fill = "none" if tile.heat else _hatched(tile.owners) if partial else rank_fill(tile.owners)
    look = f"--w:{width};--h:{height};border:2px {line} {owner};background:{fill}"
    if tile.heat is None:
        return tag("td", words, style=look)
    picture = tag(
        "img",
        class_="h",
        width=width,
        height=height,
        style=f"height:{height}px",
        src=heat_source(tile.heat),
        alt=tile.heat.alt,
    )
    half = len(tile.heat.levels[0]) // 2 + 1
    top = tile.heat.levels[: len(tile.heat.levels) // 2]
    hides = any(NOT_FINITE in row[:half] for row in top)  # the words would stand on what is loud
    label = tag("span", words, class_="y f" if hides else "y")
    return tag("td", label, picture, style=look)


def _hatched(owners: tuple[int, ...]) -> str:
    over = "repeating-linear-gradient(135deg,rgba(128,128,128,.35) 0 2px,transparent 2px 8px)"
    fill = rank_fill(owners)
    return f"{over},{fill if '(' in fill else f'linear-gradient({fill},{fill})'}"


def _owner_words(tile: Tile, width: int) -> str:
    return (format_workers if width >= 90 and len(tile.owners) > 1 else format_ranks)(tile.owners)


def _label(tile: Tile, width: int, height: int) -> Html | None:
    """The owners and the label; None if that does not fit."""
    words = _owner_words(tile, width)
    if set(tile.label) <= set("[:, ]"):
        return Html.escape(words)  # the whole tensor: nothing to add
    label = Html("<span class=m>{}</span>").format(tile.label)
    room = width if tile.heat is None else width / 2  # the values must be seen
    beside = room >= (7 if tile.heat is None else 6) * (len(tile.label) + len(words) + 2)
    stacked = height >= (60 if beside or tile.heat else 38)
    if stacked and width >= 7 * len(tile.label) + 8:
        return joined((words, tag("br"), label))
    return joined((words, " ", label)) if beside else None


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


# -- a large picture -------------------------------------------------------------------------------

_HATCH = "repeating-linear-gradient(135deg,rgba(128,128,128,.4) 0 2px,transparent 2px 8px)"
_LABELLED = 22  # pixels that a label needs
_ROW = "display:flex;justify-content:space-between;font-size:11px"


def plot_html(plot: Plot) -> Html:
    """A picture for each shard, outlined in its owner's colour, placed by percent; and axes."""
    height, width = plot.drawn
    tall, wide = plot.size
    down, across = plot.axes
    ends = _ends(across, wide) if plot.joined else [tag("span", f"{across} of each")]
    foot = tag("div", *ends, class_="m", style=f"{_ROW};width:calc(var(--u)*{width})")
    side = ""
    if down:
        tall_as = f"height:calc(var(--u)*{height})"
        style = f"{_ROW};flex-direction:column;text-align:right;min-width:4em;{tall_as}"
        side = tag("div", *_ends(down, tall), class_="m", style=style)
    box = tag(
        "div",
        *(_outline(plot, outline) for outline in plot.outlines),
        role="img",
        aria_label=plot.alt,
        style=f"position:relative;width:calc(var(--u)*{width});height:calc(var(--u)*{height})",
    )
    style = f"display:flex;gap:6px;margin:6px 0;line-height:1.2;{_unit(width, 90)}"
    return tag("div", side, tag("div", box, foot), style=style)


def _ends(words: str, size: int) -> list[Html]:
    """The first element of an axis, what runs there, and how many there are."""
    return [tag("span", "0"), tag("span", words), tag("span", size)]


def _outline(plot: Plot, outline: Outline) -> Html:
    picture = ""
    if outline.levels and outline.levels[0]:
        source = heat_source(Heat(outline.levels, "", plot.diverging))
        picture = tag("img", class_="h", alt="", src=source, style=_inside(outline))
    fill = "" if picture else f";background:{_HATCH}"
    height, width = (
        drawn * (outline.place[axis + 2] - outline.place[axis]) / plot.size[axis]
        for axis, drawn in enumerate(plot.drawn)
    )
    words = format_ranks(outline.owners)
    if outline.state:
        words = f"{words}: {outline.state}"
    fits = height >= _LABELLED - 6 and width >= _LABELLED
    label = tag("span", words, class_="y", style="font-size:11px") if fits else ""
    colour = rank_colour(outline.owners[0])
    border = tag("div", label, style=f"position:absolute;inset:0;border:2px solid {colour}")
    place = _placed(plot, outline.place)
    style = f"position:absolute;{place};overflow:hidden;box-sizing:border-box{fill}"
    return tag("div", picture, border, style=style)


def _placed(plot: Plot, place: tuple[int, int, int, int]) -> str:
    names = ("top", "left", "height", "width")
    sizes = (place[0], place[1], place[2] - place[0], place[3] - place[1])
    return ";".join(
        f"{name}:{100 * size / plot.size[number % 2]:.5g}%"
        for number, (name, size) in enumerate(zip(names, sizes, strict=True))
    )


def _inside(outline: Outline) -> str:
    """Where the picture lies in its shard: it may go beyond, by a part of a pixel."""
    place, covers = outline.place, outline.covers
    tall, wide = place[2] - place[0], place[3] - place[1]
    return (
        f"position:absolute;top:{100 * (covers[0] - place[0]) / tall:.5g}%;"
        f"left:{100 * (covers[1] - place[1]) / wide:.5g}%;"
        f"width:{100 * (covers[3] - covers[1]) / wide:.5g}%!important;"
        f"height:{100 * (covers[2] - covers[0]) / tall:.5g}%!important"
    )


# -- time ------------------------------------------------------------------------------------------

_MOST_LABELS = 64  # in a drawing
_LONGEST = 24  # characters of one
_ENOUGH = 0.07  # of the whole time: a name of five letters fits
_HEIGHTS = (18, 14, 8)  # pixels of the rows of a lane
_GREY = "rgba(128,128,128,.45)"
_FAILED, _STOPPED = "rgba(213,60,0,.75)", "rgba(213,60,0,.3)"


def tracks_html(tracks: Tracks) -> Html:
    """Draw the lanes, the ticks below them, and what the colours mean."""
    labels = _MOST_LABELS // (2 * max(1, len(tracks.tracks)))
    lanes = [_lane(track, labels) for track in tracks.tracks]
    ticks = tag("tr", tag("th"), tag("td", _ticks(tracks), style="padding:0 6px"))
    body = tag("tbody", *lanes, ticks)
    table = tag("table", body, class_="d", style="width:100%;max-width:960px")
    return joined((table, _legend(tracks)))


def _lane(track: Track, labels: int) -> Html:
    colour = rank_colour(track.rank)
    rows = [
        _row(row, colour, height, labels)
        for row, height in zip(track.rows, _HEIGHTS, strict=False)
        if row
    ]
    style = f"border-left:5px solid {colour};width:1%"
    head = tag("th", format_ranks((track.rank,)), scope="row", style=style)
    return tag("tr", head, tag("td", *rows, style="padding:3px 6px"))


def _row(row: tuple[Interval, ...], colour: str, height: int, labels: int) -> Html:
    stops: list[str] = []
    at = 0.0
    for interval in row:
        start, end = max(interval.start, at), max(interval.end, at)
        paint = _paint(interval, colour)
        if start > at:
            stops.append(f"transparent 0 {_percent(start)}")
        end = min(1.0, max(end, start + 0.0015))  # the shortest still shows
        stops.append(f"{paint} 0 {_percent(end)}")
        at = end
    stops.append("transparent 0")
    names = map(_name, _labelled(row, labels)) if height > 10 else ()
    style = (
        f"position:relative;height:{height}px;margin:1px 0;font-size:11px;"
        f"text-indent:4px;white-space:nowrap;line-height:{height}px;"
        f"background:linear-gradient(90deg,{','.join(stops)})"
    )
    return tag("div", *names, style=style)


def _labelled(row: tuple[Interval, ...], most: int) -> list[Interval]:
    """The widest ones that have room for their names, in order."""
    wide = [s for s in row if s.label and s.end - s.start >= _ENOUGH]
    wide = sorted(wide, key=lambda s: s.start - s.end)[:most]
    return sorted(wide, key=lambda s: s.start)


def _name(interval: Interval) -> Html:
    left, width = _percent(interval.start), _percent(interval.end - interval.start)
    style = f"position:absolute;left:{left};width:{width};overflow:hidden;text-overflow:ellipsis"
    return tag("span", cut(interval.label, _LONGEST), " ", style=style)


def _paint(interval: Interval, colour: str) -> str:
    match interval.look:
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


def _ticks(tracks: Tracks) -> Html:
    marks = []
    for place, words in tracks.ticks:
        side = f"left:{_percent(place)}" if place < 0.99 else "right:0"
        centred = ";transform:translateX(-50%)" if 0.01 < place < 0.99 else ""
        style = f"position:absolute;white-space:nowrap;{side}{centred}"
        marks.append(tag("span", words, " ", class_="m", style=style))
    return tag("div", *marks, style="position:relative;height:18px;font-size:11px")


def _legend(tracks: Tracks) -> Html:
    used = {s.look for track in tracks.tracks for row in track.rows for s in row}
    words = {
        "busy": ("busy", "rgba(128,128,128,.28)"),
        "wait": ("waiting for others", _GREY),
        "move": ("in a collective", "rgba(128,128,128,.9)"),
        "stopped": ("stopped", _STOPPED),
        "failed": ("failed", _FAILED),
    }
    swatch = "display:inline-block;width:14px;height:10px;margin:0 5px 0 0;background:"
    shown = [
        joined((tag("span", style=swatch + paint), name, Html(" &nbsp; ")))
        for look, (name, paint) in words.items()
        if look in used
    ]
    return tag("div", *shown, class_="m", style="font-size:11px")
