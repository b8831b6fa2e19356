"""Draws a `Plot` in HTML: a picture for each shard, outlined in its owner's colour, and axes. Pure.

The pictures are placed by percent of the drawing; without styles what is left are the pictures
with their descriptions, and the labels.
"""

from __future__ import annotations

from ..formats import format_ranks
from ..parts import Heat, Outline, Plot
from .html_base import escaped, rank_colour
from .html_heat import heat_source

_HATCH = "repeating-linear-gradient(135deg,rgba(128,128,128,.4) 0 2px,transparent 2px 8px)"
_LABELLED = 22  # pixels that a label needs


def plot_html(plot: Plot) -> str:
    """Lower a plot to HTML."""
    height, width = plot.drawn
    tall, wide = plot.size
    inner = "".join(_outline(plot, outline) for outline in plot.outlines)
    down, across = (escaped(words) for words in plot.axes)
    ends = f"<span>0</span><span>{across}</span><span>{wide}</span>"
    words = ends if plot.joined else f"<span>{across} of each</span>"
    foot = f'<div class="m" style="{_ROW};width:{width}px">{words}</div>'
    side = ""
    if down:
        words = f"<span>0</span><span>{down}</span><span>{tall}</span>"
        style = f"{_ROW};flex-direction:column;text-align:right;min-width:4em;height:{height}px"
        side = f'<div class="m" style="{style}">{words}</div>'
    box = (
        f'<div role="img" aria-label="{escaped(plot.alt)}" style="position:relative;'
        f'width:{width}px;height:{height}px;flex:none">{inner}</div>'
    )
    return (
        f'<div style="display:flex;gap:6px;margin:6px 0;line-height:1.2">{side}'
        f"<div>{box}{foot}</div></div>"
    )


_ROW = "display:flex;justify-content:space-between;font-size:11px"


def _outline(plot: Plot, outline: Outline) -> str:
    picture = ""
    if outline.levels and outline.levels[0]:
        source = heat_source(Heat(outline.levels, "", plot.diverging))
        picture = f'<img class="h" alt="" src="{source}" style="{_inside(outline)}">'
    colour = rank_colour(outline.owners[0])
    fill = "" if picture else f";background:{_HATCH}"
    place = _placed(plot, outline.place)
    height, width = (
        drawn * (outline.place[axis + 2] - outline.place[axis]) / plot.size[axis]
        for axis, drawn in enumerate(plot.drawn)
    )
    label = format_ranks(outline.owners)
    words = escaped(f"{label}: {outline.state}" if outline.state else label)
    fits = height >= _LABELLED - 6 and width >= _LABELLED
    said = f'<span class="y" style="font-size:11px">{words}</span>' if fits else ""
    return (
        f'<div style="position:absolute;{place};overflow:hidden;box-sizing:border-box{fill}">'
        f'{picture}<div style="position:absolute;inset:0;border:2px solid {colour}">{said}</div>'
        "</div>"
    )


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
