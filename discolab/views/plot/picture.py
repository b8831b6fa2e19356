"""From what workers read of a region to a picture: numbers a pixel, and levels of colour. Pure.

`Shades` are the levels that one statistic of a `Picture` gives, on one scale for all workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ..formats import format_number
from .regions import lower
from .sheet import Shard, Sheet, Window, sources

Stat: TypeAlias = Literal["mean", "absmax", "nonfinite"]
Array: TypeAlias = np.ndarray[Any, Any]
STATS: tuple[Stat, ...] = ("mean", "absmax", "nonfinite")

NOT_FINITE = 255  # levels
TOP = 254


@dataclass(frozen=True)
class Facts:
    """Of one shard in a picture: the lowest and highest value, pixels that are not all finite."""

    low: float
    high: float
    bad: int


@dataclass(frozen=True)
class Picture:
    """A region of `sheet` in pixels of `blocks` elements; `top` and `left` number the first one.

    `mean`, `low` and `high` are NaN where nothing is known or nothing is finite; `bad` is the share
    that is not finite. `shown` lists the shards that are in it. `exact`: each pixel is one element,
    and `mean` its value. `every`: one element of so many was read.
    """

    sheet: Sheet
    window: Window
    blocks: tuple[int, int]
    top: int
    left: int
    mean: Array
    low: Array
    high: Array
    bad: Array
    known: Array
    shown: Mapping[Shard, Facts]
    states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    every: int = 1
    moved: int = 0

    @property
    def exact(self) -> bool:
        """Whether each pixel is one element."""
        return self.blocks == (1, 1)

    def values(self, stat: Stat) -> Array:
        """One number a pixel."""
        if stat == "absmax":
            return np.maximum(np.abs(self.low), np.abs(self.high))
        if stat == "nonfinite":
            return np.where(self.known, np.ceil(self.bad * math.prod(self.blocks)), np.nan)
        return self.mean

    def cells_of(self, shard: Shard) -> tuple[slice, slice]:
        """The pixels in which a shard is seen."""
        found = []
        for axis, first in ((0, self.top), (1, self.left)):
            block, edge = self.blocks[axis], self.mean.shape[axis]
            start = shard.window[axis] // block - first
            end = -(-shard.window[axis + 2] // block) - first
            found.append(slice(min(max(start, 0), edge), min(max(end, 0), edge)))
        return found[0], found[1]


def make_picture(
    sheet: Sheet,
    window: Window,
    blocks: tuple[int, int],
    choice: str,
    answers: Mapping[int, Mapping[str, Any]],
) -> Picture:
    """Put together what the workers have read.

    Parameters
    ----------
    answers : mapping of rank to record
        From `regions.read_regions`; or a record with ``kind`` and ``message``, as in `states`.
    """
    top, left = window[0] // blocks[0], window[1] // blocks[1]
    shape = -(-window[2] // blocks[0]) - top, -(-window[3] // blocks[1]) - left
    total, weight, bad, area = (np.zeros(shape) for _ in range(4))
    low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
    shown: dict[Shard, Facts] = {}
    states: dict[int, Mapping[str, Any]] = {}
    every = 1
    elements = []
    for shard, wanted in sources(sheet, choice):
        if shard.cut(window, blocks) is None:
            continue
        found = {rank: _readable(answers.get(rank)) for rank, _ in wanted}
        states.update({rank: record for rank, record in found.items() if "rows" not in record})
        if any("rows" not in record for record in found.values()):
            continue
        first = found[wanted[0][0]]
        place = (
            slice(first["top"] - top, first["top"] - top + first["rows"]),
            slice(first["left"] - left, first["left"] - left + first["columns"]),
        )
        part = _join([(_decode(found[rank]), factor) for rank, factor in wanted])
        size = _areas(shard, window, blocks, (first["rows"], first["columns"]))
        good = size * (1 - part.bad)
        some = part.bad < 1
        total[place] += np.where(some, part.mean, 0) * good
        weight[place] += good
        area[place] += size
        bad[place] += size * part.bad
        low[place] = np.where(some, np.minimum(low[place], part.low), low[place])
        high[place] = np.where(some, np.maximum(high[place], part.high), high[place])
        every = max([every, *(record["every"] for record in found.values())])
        shown[shard] = _facts(part)
        if blocks == (1, 1):
            elements.append((place, part))
    known = area > 0
    some = weight > 0
    mean = np.divide(total, weight, out=np.full(shape, np.nan), where=some)
    low, high = np.where(some, low, np.nan), np.where(some, high, np.nan)
    for place, part in elements:
        mean[place] = part.mean  # also what is not finite
    share = np.divide(bad, area, out=np.zeros(shape), where=known)
    moved = sum(len(v) for r in answers.values() for v in r.values() if isinstance(v, bytes))
    return Picture(
        sheet, window, blocks, top, left, mean, low, high, share, known, shown, states, every, moved
    )


def _readable(record: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A record of a state, if there is nothing to be seen."""
    if not record:
        return {"kind": "missing", "message": ""}
    if "error" in record:
        return {"kind": "failure", "message": f"not readable: {record['error']}"}
    return record


@dataclass
class _Piece:
    mean: Array
    low: Array
    high: Array
    bad: Array


def _decode(record: Mapping[str, Any]) -> _Piece:
    rows, columns = record["rows"], record["columns"]
    if "values" in record:
        values = np.frombuffer(record["values"], record["dtype"]).reshape(rows, columns)
        values = values.astype(np.float64)
        return _Piece(values, values, values, (~np.isfinite(values)).astype(np.float64))
    mean = lower(record["mean"], 3, rows, columns)
    low, high = (lower(record[name], 2, rows, columns) for name in ("low", "high"))
    bad = np.frombuffer(record["bad"], np.uint8).reshape(rows, columns) / 255
    return _Piece(mean, np.minimum(low, mean), np.maximum(high, mean), bad)


def _join(pieces: Sequence[tuple[_Piece, float]]) -> _Piece:
    """Add what several workers hold; of a difference what differs most stands for all."""
    if len(pieces) == 1:
        return pieces[0][0]
    bad = np.maximum.reduce([piece.bad for piece, _ in pieces])
    with np.errstate(invalid="ignore", over="ignore"):
        sums = [
            np.add.reduce([getattr(piece, name) * factor for piece, factor in pieces])
            for name in ("mean", "low", "high")
        ]
    if pieces[-1][1] < 0:
        stack = np.nan_to_num(np.stack(sums), posinf=0, neginf=0)
        most = np.take_along_axis(stack, np.abs(stack).argmax(0)[None], 0)[0]
        same = pieces[0][0].bad == pieces[1][0].bad
        return _Piece(most, most, most, np.where(same, 0.0, 1.0))
    return _Piece(sums[0], sums[0], sums[0], bad)


def _facts(piece: _Piece) -> Facts:
    some = piece.bad < 1
    low, high = (
        (float(piece.low[some].min()), float(piece.high[some].max()))
        if some.any()
        else (math.nan, math.nan)
    )
    return Facts(low, high, int((piece.bad > 0).sum()))


def _areas(shard: Shard, window: Window, blocks: tuple[int, int], shape: tuple[int, int]) -> Array:
    """How many elements of the shard are in each pixel."""
    sides = []
    for axis in (0, 1):
        first = max(shard.window[axis], window[axis])
        last = min(shard.window[axis + 2], window[axis + 2])
        edges = (first // blocks[axis] + np.arange(shape[axis] + 1)) * blocks[axis]
        sides.append(np.diff(np.clip(edges, first, last)).astype(np.float64))
    return np.outer(*sides)


# -- colours -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shades:
    """Levels of a statistic: 0 the lowest, 254 the highest, 255 not finite (or, there, unknown)."""

    levels: Array
    low: float
    high: float
    diverging: bool
    nonfinite: int
    empty: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """The ends of the scale in words; empty if nothing is on it."""
        if self.empty:
            return "", ""
        return format_number(self.low), format_number(self.high)


def shade(
    picture: Picture,
    stat: Stat,
    vmin: float | None = None,
    vmax: float | None = None,
) -> Shades:
    """Give each pixel its level; the scale ends at `vmin` and `vmax`, else where the values end."""
    values = picture.values(stat)
    finite = np.isfinite(values)
    low, high = (
        (float(edge(values[finite])) for edge in (np.min, np.max)) if finite.any() else (0, 0)
    )
    if stat == "nonfinite":
        low = 0.0
    fixed = vmin is not None and vmax is not None
    low, high = (low if vmin is None else vmin), (high if vmax is None else vmax)
    low, high = min(low, high), max(low, high)
    diverging = low < 0 < high
    if diverging and not fixed:
        high = max(-low, high) if vmax is None else high
        low = -high if vmin is None else low
    # Zero is in the middle of a diverging scale, also where its ends are not alike.
    with np.errstate(invalid="ignore", over="ignore"):
        if diverging:
            share = np.where(values < 0, 0.5 - 0.5 * values / low, 0.5 + 0.5 * values / high)
        elif high > low:
            share = (values / 2 - low / 2) / (high / 2 - low / 2)
        else:
            share = np.full(values.shape, 0.5)
        levels = np.nan_to_num(np.clip(np.rint(share * TOP), 0, TOP)).astype(np.uint8)
    broken = (picture.bad > 0) & picture.known
    if stat != "nonfinite":
        levels[broken] = NOT_FINITE
    empty = not finite.any() and vmin is None and vmax is None
    return Shades(levels, low, high, diverging, int(broken.sum()), empty)
