"""How far two tensors are apart, chunk by chunk, on the worker that holds them.

Pure arithmetic: no collective, no temporaries larger than a chunk, nothing recorded for autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from ..dref.differences import place_of
from ..facts.distances import distances
from ..facts.tensors import dtype_name, shape_of

_Row: TypeAlias = dict[str, Any]

_CHUNK = 2**19  # elements; temporaries of 4 MiB each
_TOLERANCES = {  # relative and absolute, as torch.testing has them
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}


def difference_of(a: torch.Tensor, b: torch.Tensor, rtol: float | None, atol: float | None) -> _Row:
    """How far two tensors of one shape are apart; without tolerances those of the dtypes."""
    usual = max(_TOLERANCES.get(a.dtype, (0.0, 0.0)), _TOLERANCES.get(b.dtype, (0.0, 0.0)))
    rtol, atol = usual[0] if rtol is None else rtol, usual[1] if atol is None else atol
    found = _Found(float(rtol), float(atol))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for start, one, other in _chunks(a, b, 0):
            found.add(start, one, other)
        row = found.row(a, b)
    row |= {"shape": shape_of(a), "dtype": dtype_name(a.dtype), "size": a.numel()}
    if a.dtype != b.dtype:
        row["other_dtype"] = dtype_name(b.dtype)
    return row | {"rtol": float(rtol), "atol": float(atol)}


def _chunks(
    a: torch.Tensor, b: torch.Tensor, start: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Cut both alike in flat pieces in row-major order; a piece is copied only if it must be."""
    if a.numel() <= _CHUNK:
        if a.numel():
            yield start, a.reshape(-1), b.reshape(-1).to(a.device)
        return
    rows = a.numel() // a.shape[0]
    step = max(_CHUNK // rows, 1)
    for first in range(0, a.shape[0], step):
        count = min(step, a.shape[0] - first)
        one, other = a.narrow(0, first, count), b.narrow(0, first, count)
        if step == 1:
            one, other = one[0], other[0]
        yield from _chunks(one, other, start + first * rows)


class _Found:
    """What is known of two tensors after some of their chunks."""

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.place: int | None = None
        self.max_abs = self.max_rel = self.total = 0.0
        self.over = self.differ = self.nan_one = self.counted = 0

    def add(self, start: int, one: torch.Tensor, other: torch.Tensor) -> None:
        """Take in the elements from `start` on."""
        same, nan, gap = distances(one, other)
        self.counted += same.numel() - int(nan.sum())
        if bool(same.all()):
            return
        gap.masked_fill_(same | nan, 0.0)
        self.differ += gap.numel() - int(same.sum())
        self.nan_one += int(nan.sum())
        size = other.to(torch.complex128 if other.is_complex() else torch.float64).abs()
        near = torch.isfinite(gap) & (gap <= size * self.rtol + self.atol)
        self.over += int((nan | ~(same | near)).sum())
        self.total += float(gap.sum())
        largest, place = (found.item() for found in gap.max(0))
        if self.place is None or largest > self.max_abs:
            self.max_abs, self.place = float(largest), start + int(place)
            if not largest:  # all that differs here is NaN in one
                self.place = start + int(nan.to(torch.uint8).argmax())
        rel = (gap / size).nan_to_num_(nan=math.inf, posinf=math.inf)  # also of all but zero
        self.max_rel = max(self.max_rel, float(rel.masked_fill_(gap == 0, 0.0).max()))

    def row(self, a: torch.Tensor, b: torch.Tensor) -> _Row:
        """The findings as a record, with both values at the place of the largest difference."""
        found: _Row = {
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "mean_abs": self.total / self.counted if self.counted else 0.0,
            "over": self.over,
            "differ": self.differ,
            "nan_one": self.nan_one,
        }
        if self.place is not None:
            index = place_of(self.place, a.shape)
            found["index"] = list(index)
            for key, tensor in (("a", a), ("b", b)):
                value = tensor[index].item()
                found[key] = str(value) if isinstance(value, complex) else value
        return found
