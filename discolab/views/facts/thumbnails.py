"""Pictures of a tensor that fit in a record: a thumbnail, a histogram, where it is not finite.

Runs on the worker that holds the tensor. A thumbnail is one byte a cell on a scale of its own,
with the ends of the scale as numbers, so that the controller can put those of all workers on one
scale (`shared_scale`). No collective, no random number; nothing is recorded for autograd.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..parts import Heat
from .guard import Record

MOST_CELLS = 24  # along each side
BINS = 24
_PLACES = 8  # of values that are not finite
_TOP = 254
_NOT_FINITE = 255
_BLOCKWISE = 2**22  # elements
_PLAIN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def thumbnail(values: torch.Tensor, whole: bool) -> Record:
    """Shrink a dense tensor to at most 24 x 24 cells; an empty record if there is nothing to see.

    Parameters
    ----------
    values : torch.Tensor
        Of any number of dims: all but the last are rows. Complex values count by magnitude.
    whole : bool
        True: each cell is the mean of its block, and not finite if one value in it is not.
        False: each cell is one value of its block; no more than 576 are read.

    Returns
    -------
    dict
        ``thumbnail``: ``rows``, ``columns``, ``cells`` (base64), ``low``, ``high`` (None if no
        cell is finite), ``of`` ("values", "means" or "samples").
    """
    columns = values.shape[-1] if values.dim() else 0
    if values.numel() < 2 or not columns:
        return {}
    rows = values.numel() // columns
    across, down = min(columns, MOST_CELLS), min(rows, MOST_CELLS)
    complete = (rows, columns) == (down, across)
    if whole and not complete:
        cells, kind = _means(values, _cuts(rows, down), _cuts(columns, across)), "means"
    else:
        cells, kind = _samples(values, down, across), "values" if complete else "samples"
    flat = cells.reshape(-1).to("cpu", torch.float64)
    finite = torch.isfinite(flat)
    levels = torch.full(flat.shape, _NOT_FINITE, dtype=torch.uint8)
    low = high = None
    if bool(finite.any()):
        kept = flat[finite]
        low, high = (float(edge) for edge in torch.aminmax(kept))
        span = high / 2 - low / 2  # halves: the ends may be as far apart as floats go
        if span:
            levels[finite] = ((kept / 2 - low / 2) / span * _TOP).round_().to(torch.uint8)
        else:
            levels[finite] = 0
    data = b64encode(bytes(levels.tolist())).decode("ascii")
    found = {"rows": down, "columns": across, "cells": data, "low": low, "high": high, "of": kind}
    return {"thumbnail": found}


def _cuts(size: int, count: int) -> list[int]:
    return [place * size // count for place in range(count + 1)]


def _real(values: torch.Tensor) -> torch.Tensor:
    """Values that sums and comparisons work for."""
    if values.is_complex():
        return values.abs().to(torch.float64)
    if values.is_quantized:
        return values.dequantize()
    return values if values.dtype in _PLAIN else values.to(torch.float64)


def _means(values: torch.Tensor, rows: list[int], columns: list[int]) -> torch.Tensor:
    """Mean of each block, a band of rows at a time; NaN where a value is not finite."""
    flat = values.reshape(-1, values.shape[-1])
    if values.numel() > _BLOCKWISE:  # no larger part is held in float64 than a block
        parts = [
            _real(flat[top:bottom, left:right]).sum(dtype=torch.float64)
            / ((bottom - top) * (right - left))
            for top, bottom in pairwise(rows)
            for left, right in pairwise(columns)
        ]
        return torch.stack(parts).view(len(rows) - 1, len(columns) - 1)
    bands = []
    for first, last in pairwise(rows):
        band = _real(flat[first:last])
        bands.append(band.sum(0, dtype=torch.float64) / (last - first))
    found = torch.stack(bands)
    if len(columns) <= found.shape[1]:
        edges = pairwise(columns)
        found = torch.stack([found[:, first:last].mean(1) for first, last in edges], 1)
    return found


def _samples(values: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """The value in the middle of each block, whatever the strides are."""
    *outer, columns = values.shape
    rows = math.prod(outer)
    middle = [(2 * place + 1) * rows // (2 * down) for place in range(down)]
    index: list[torch.Tensor] = []
    for size in reversed(outer):
        index.insert(0, torch.tensor([place % size for place in middle]).view(-1, 1))
        middle = [place // size for place in middle]
    last = [(2 * place + 1) * columns // (2 * across) for place in range(across)]
    index.append(torch.tensor(last).view(1, -1))
    return _real(values[tuple(part.to(values.device) for part in index)]).reshape(down, across)


def histogram(chunks: Iterable[torch.Tensor], low: float, high: float) -> list[int]:
    """Count the finite values in 24 equal bins from the lowest to the highest."""
    total = torch.zeros(BINS, dtype=torch.float64)
    share = 1.0 if math.isfinite((high - low) * BINS) else 1 / 128
    low, high = low * share, high * share
    for chunk in chunks:
        wide = _real(chunk).to(torch.float64)
        if share != 1:
            wide = wide * share
        if wide.device.type == "cpu":
            total += torch.histc(wide, BINS, low, high)  # leaves out what is not finite
        else:  # histc of a GPU is refused where deterministic algorithms are asked for
            edges = [low + (high - low) * place / BINS for place in range(1, BINS)]
            below = [(wide < edge).sum() for edge in edges]
            within = ((wide >= low) & (wide <= high)).sum()
            under = (wide < low).sum()
            marks = torch.stack([under, *below, under + within]).to("cpu", torch.float64)
            total += marks.diff()
    return [int(count) for count in total.tolist()]


def places_of_nonfinite(
    chunks: Iterable[torch.Tensor], shape: Sequence[int]
) -> list[tuple[str, list[int]]]:
    """Find the first 8 values that are not finite, in row-major order: what each is, and where."""
    found: list[tuple[str, list[int]]] = []
    start = 0
    for chunk in chunks:
        places = (~torch.isfinite(chunk)).nonzero().reshape(-1)[: _PLACES - len(found)]
        for place in places.tolist():
            found.append((_kind(chunk[place].item()), _unravel(start + place, shape)))
        if len(found) >= _PLACES:
            break
        start += chunk.numel()
    return found


def _kind(value: Any) -> str:
    if isinstance(value, complex):
        return "nan" if value != value else "inf"
    return str(value)


def _unravel(place: int, shape: Sequence[int]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        place, last = divmod(place, size)
        index.insert(0, last)
    return index


@dataclass(frozen=True)
class Scale:
    """What the darkest and lightest colours of all thumbnails of a view stand for."""

    low: float
    high: float
    nonfinite: bool
    of: str
    empty: bool = False  # nothing is finite

    @property
    def diverging(self) -> bool:
        """Whether there are values of both signs, so that zero is in the middle."""
        return self.low < 0 < self.high

    @property
    def flat(self) -> bool:
        """Whether there is nothing to tell apart."""
        return self.low == self.high and not self.nonfinite

    def level(self, value: float) -> int:
        """The level of a finite value, from 0 to 254."""
        low, high = self.low / 2, self.high / 2
        if self.diverging:
            high = max(-low, high)
            low = -high
        span = high - low
        return min(max(round((value / 2 - low) / span * _TOP), 0), _TOP) if span else _TOP // 2


def shared_scale(records: Iterable[Mapping[str, Any]]) -> Scale | None:
    """One scale for the thumbnails of all records; None if none has one."""
    found = [thumb for record in records if (thumb := _thumbnail(record)) is not None]
    ends = [edge for thumb in found for edge in (thumb["low"], thumb["high"]) if edge is not None]
    if not found:
        return None
    words = sorted({str(thumb["of"]) for thumb in found})
    nonfinite = any(_NOT_FINITE in b64decode(thumb["cells"]) for thumb in found)
    return Scale(
        min(ends, default=0.0), max(ends, default=0.0), nonfinite, " and ".join(words), not ends
    )


def heat_of(record: Mapping[str, Any], scale: Scale, words: str) -> Heat | None:
    """The thumbnail of a record on a scale; `words` say in its description what it shows."""
    thumb = _thumbnail(record)
    if thumb is None:
        return None
    low = 0.0 if thumb["low"] is None else thumb["low"]
    high = 0.0 if thumb["high"] is None else thumb["high"]
    table = [
        scale.level(low + (high / 2 - low / 2) * (level / (_TOP / 2))) for level in range(_TOP + 1)
    ]
    cells = b64decode(thumb["cells"]).translate(bytes([*table, _NOT_FINITE]))
    across = thumb["columns"]
    levels = tuple(cells[start : start + across] for start in range(0, len(cells), across))
    return Heat(levels, words, scale.diverging)


def _thumbnail(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    thumb = record.get("thumbnail")
    return thumb if isinstance(thumb, Mapping) else None
