"""Which bytes of which file land where in a worker's tensor. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..layouts.layout import Cut
from .catalog import Entry, Shape


@dataclass(frozen=True, slots=True)
class Copy:
    """A box in a file that lands in a box of a worker's tensor.

    Attributes
    ----------
    file
        Index in `Catalog.files`.
    offset
        Bytes to its first element.
    shape, strides
        Of the box as it lies in the file, in elements of the stored dtype.
    at
        Where it begins in the worker's tensor.
    """

    file: int
    offset: int
    shape: Shape
    strides: Shape
    at: Shape

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow each other in the file."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def copies(entry: Entry, cut: Cut) -> list[Copy]:
    """All that a worker with this cut reads of `entry`; none overlap in its tensor."""
    found = []
    for piece in entry.pieces:
        strides = piece.strides or c_strides(piece.shape)
        for box in cut.boxes:
            start = tuple(map(max, piece.start, box.start))
            ends = (
                min(p + n, b + m)
                for p, n, b, m in zip(piece.start, piece.shape, box.start, box.shape, strict=True)
            )
            shape = tuple(end - begin for begin, end in zip(start, ends, strict=True))
            if any(size <= 0 for size in shape):
                continue
            into = sum(
                (s - p) * step for s, p, step in zip(start, piece.start, strides, strict=True)
            )
            at = tuple(a + s - b for a, s, b in zip(box.at, start, box.start, strict=True))
            offset = piece.offset + into * entry.stored.itemsize
            found.append(Copy(piece.file, offset, shape, strides, at))
    return found


def c_strides(shape: Shape) -> Shape:
    """Strides of a tensor whose elements follow each other, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
