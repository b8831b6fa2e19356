"""Draws how one parameter is cut: its boxes to scale, in the colours of the workers that hold them.

Pure. Unlike the pictures of DRefs it needs nobody's tensor, and knows segments, heads and padding.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from ...layouts.layout import Layout, Workers, chunk, cut
from ...views.formats import format_shape
from ...views.parts import Grid, Part, Text, Tile
from ..catalog import Entry

_MOST_TILES = 64
_THINNEST = 12  # parts of the whole: so high is a box at least, that its label fits
_LONGEST = 2  # times the other side
_Runs = list[list[tuple[int, int]]]  # for each dimension begin and end of what a worker holds


def draw(entry: Entry, layout: Layout, workers: Workers) -> Part:
    """A parameter as a rectangle (a bar if it has one dimension), cut as the layout says.

    Parameters
    ----------
    entry
        Of any number of dimensions: those that are cut are drawn, then the last ones.

    Returns
    -------
    Part
        A `Grid`; words where there is nothing to draw, or more than can be seen.

    Raises
    ------
    ArgumentError
        If the layout does not fit the parameter.
    """
    dtype = str(entry.dtype).removeprefix("torch.")
    caption = f"{entry.name}: {dtype}{format_shape(entry.shape)}, {layout}"
    held = {
        rank: runs
        for rank in range(workers.count)
        if (runs := _runs(entry, layout, workers, rank)) is not None
    }
    if not entry.shape or not entry.numel:
        return Text(caption)
    edges = [
        sorted({0, size, *(end for runs in held.values() for run in runs[dim] for end in run)})
        for dim, size in enumerate(entry.shape)
    ]
    cut_dims = [dim for dim, found in enumerate(edges) if len(found) > 2]
    rest = [dim for dim in reversed(range(len(edges))) if dim not in cut_dims]
    dims = sorted([*cut_dims, *rest][:2])
    if len(edges) > 2:
        caption += f"; dimensions {dims[0]} and {dims[1]} drawn"
    rows = list(pairwise(edges[dims[0]])) if len(dims) == 2 else [(0, 0)]
    columns = list(pairwise(edges[dims[-1]]))
    if len(rows) * len(columns) > _MOST_TILES:
        return Text(f"{caption}: {len(rows) * len(columns)} boxes, too many to draw", "muted")
    tiles = []
    for row in rows:
        line = []
        for column in columns:
            where = {dims[-1]: column} | ({dims[0]: row} if len(dims) == 2 else {})
            owners = tuple(rank for rank, runs in held.items() if _holds(runs, where))
            line.append(Tile(_label(entry, where), owners))
        tiles.append(tuple(line))
    if not all(tile.owners for line in tiles for tile in line):
        return Text(f"{caption}: some of it is on no worker", "warning")
    heights, thick = _thicker(rows)
    widths, wide = _thicker(columns)
    if thick or wide:
        caption += " (not to scale)"
    return Grid(caption, *_squarer(heights, widths), tuple(tiles))


def _thicker(spans: list[tuple[int, int]]) -> tuple[list[int], bool]:
    """Sizes to draw, in elements, and whether any had to be made larger for its label to fit."""
    sizes = [end - begin for begin, end in spans]
    seen = [max(size, sum(sizes) // _THINNEST) for size in sizes]
    return seen, seen != sizes


def _squarer(heights: list[int], widths: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same, the whole being made less long and thin."""
    tall, wide = sum(heights), sum(widths)
    if tall > _LONGEST * wide:
        widths = [n * tall // (_LONGEST * wide) for n in widths]
    elif 0 < tall * _LONGEST < wide:
        heights = [n * wide // (_LONGEST * tall) for n in heights]
    return tuple(heights), tuple(widths)


def _runs(entry: Entry, layout: Layout, workers: Workers, rank: int) -> _Runs | None:
    """What a worker holds along each dimension, padding included; None: nothing."""
    found = cut(layout, entry.shape, workers, rank)
    if found is None:
        return None
    runs = [
        sorted({(box.start[dim], box.start[dim] + box.shape[dim]) for box in found.boxes})
        for dim in range(len(entry.shape))
    ]
    if layout.pad_to:
        dims = (None,) * (len(workers.sizes) - len(layout.dims)) + layout.dims
        axis = next(i for i, dim in enumerate(dims) if dim is not None)
        dim = (dims[axis] or 0) % len(entry.shape)
        full = -(-entry.shape[dim] // layout.pad_to) * layout.pad_to
        first, length = chunk(full, workers.sizes[axis], workers.coordinate(rank)[axis])
        runs = [[(0, size)] for size in entry.shape]
        runs[dim] = [(first, first + length)] if length else []
    return runs if all(runs) else None


def _holds(runs: _Runs, where: dict[int, tuple[int, int]]) -> bool:
    """Whether a worker holds the box: edges are those of all workers, so it has all or nothing."""
    for dim, (begin, _) in where.items():
        place = bisect_right(runs[dim], (begin, 1 << 62)) - 1
        if place < 0 or runs[dim][place][1] <= begin:
            return False
    return True


def _label(entry: Entry, where: dict[int, tuple[int, int]]) -> str:
    words = []
    padding = False
    for dim, size in enumerate(entry.shape):
        begin, end = where.get(dim, (0, size))
        words.append(":" if (begin, end) == (0, size) else f"{begin}:{end}")
        padding |= begin >= size
    return f"[{', '.join(words)}]" + (" padding" if padding else "")
