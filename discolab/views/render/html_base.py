"""What all of the HTML drawing shares: escaping, in this one place, and colours. Pure."""

from __future__ import annotations

from html import escape

from ..formats import printable

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
_MOST_STRIPES = 16


def escaped(text: str) -> str:
    """Make any text safe to stand in HTML, also between quotes."""
    return escape(printable(text), quote=True)


def rank_colour(rank: int) -> str:
    """Give the colour of a worker, as ``#rrggbb``; the same wherever a worker is drawn."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def rank_fill(owners: tuple[int, ...]) -> str:
    """Give the owner's colour, thinned so that text shows on it; several owners as stripes."""
    colours = [rank_colour(rank) + "66" for rank in owners[:_MOST_STRIPES]]
    if len(colours) == 1:
        return colours[0]
    step = 100 / len(colours)
    stops = (f"{c} {i * step:.4g}% {(i + 1) * step:.4g}%" for i, c in enumerate(colours))
    return f"linear-gradient(90deg,{','.join(stops)})"
