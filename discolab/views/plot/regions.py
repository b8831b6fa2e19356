"""Reads a region of a tensor where it lies, shrunk to the pixels of a picture.

Runs on the worker that holds the tensor. A pixel is the block of elements that falls on it: of
each the mean, the lowest and highest value and the share that is not finite leave the worker, or
the value itself where a pixel is one element: 8 bytes each, at most `MOST_CELLS` of them. Works
in chunks on the tensor's own device; of a large region it reads a sample, evenly spread. No
collective, no random number, nothing recorded for autograd; what fails is said in the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from ...runtime.functions import worker_function
from ...runtime.regions import array_of
from ...runtime.worker import current_worker
from ..facts.guard import FAILURES, Record, error_text, type_name
from ..facts.tensors import describe_array, describe_tensor, is_dtensor, why_no_data
from ..facts.thumbnails import histogram
from ..formats import format_bytes

READING = "reading a picture"  # what status calls what the workers do for it
MOST_CELLS = 12_000  # 96 KB
_MOST_READ = 50_000_000  # elements; of more a sample is read
_SAMPLE = 4_000_000
_CHUNK = 2**20
_SMALL = 64 * 2**20  # bytes that may be copied to be read at all
_LARGEST = 3.0e38
_DRAWN = -1  # in an index: this dim is drawn

Cut: TypeAlias = tuple[tuple[int, ...], tuple[int, int], tuple[int, ...], tuple[int, ...]]
"""What is asked of a worker: (index, dims, edges, blocks).

`index` has a number for each local dim, -1 for those drawn; `dims` are the local dims that run
down and across, -1 for one that is not there; `edges` are the first and last row and column,
local, half open, then how far local row and column 0 are from those of the picture; `blocks` are
the elements down and across one pixel.
"""


@worker_function(READING)
def read_facts(value: object) -> Record:
    """What a plan of the picture needs: shape, dtype, DTensor layout; a digest of what is small."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value, "auto", pictures=False)
    if isinstance(value, np.ndarray):
        return describe_array(value, "auto", pictures=False)
    return {"kind": "other", "type": "None" if value is None else type_name(value)}


@worker_function(READING)
def read_regions(value: object, cuts: list[Cut | None]) -> Record | None:
    """Shrink this worker's region.

    Parameters
    ----------
    value : tensor or array
    cuts : list of Cut or None
        One a worker; None: nothing is asked of it.

    Returns
    -------
    dict or None
        ``top`` and ``left``: numbers of the first pixel; ``rows``, ``columns``; ``every``: one
        element of so many was read. With blocks of one element ``values`` (bytes) and ``dtype``;
        else ``mean`` (3 bytes a pixel), ``low``, ``high`` (2 each), ``bad`` (1: 255 times the
        share that is not finite, at least 1 if there is one). Or ``error``.
    """
    cut = cuts[current_worker().worker_id]
    return None if cut is None else read_region(value, cut)


def read_region(value: object, cut: Cut) -> Record:
    """As `read_regions`, of one cut."""
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return _read(_plane(value, cut), cut)
    except FAILURES as error:
        return {"error": error_text(error)}


@worker_function(READING)
def read_histograms(
    value: object, cuts: list[Cut | None], low: float, high: float
) -> Record | None:
    """Count the finite values of this worker's region in 24 bins: ``counts``, or ``error``."""
    cut = cuts[current_worker().worker_id]
    if cut is None:
        return None
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plane = _plane(value, cut)
            row_step, column_step = _steps(*plane.shape, *plane.shape)
            return {"counts": histogram(_chunks(plane[::row_step, ::column_step]), low, high)}
    except FAILURES as error:
        return {"error": error_text(error)}


def _chunks(plane: torch.Tensor) -> Iterator[torch.Tensor]:
    rows = max(_CHUNK // max(plane.shape[1], 1), 1)
    for start in range(0, plane.shape[0], rows):
        for part in torch.split(plane[start : start + rows], _CHUNK, 1):
            yield part.reshape(-1)


def _plane(value: object, cut: Cut) -> torch.Tensor:
    """The region as a matrix; nothing is copied if that can be helped."""
    index, (down, across), (top, bottom, left, right, *_), _ = cut
    tensor = _local(value)
    kept = [place for place, at in enumerate(index) if at == _DRAWN]
    plane = tensor[tuple(slice(None) if at == _DRAWN else at for at in index)]
    if down == _DRAWN and across == _DRAWN:
        plane = plane.reshape(1, 1)
    elif down == _DRAWN:
        plane = plane.unsqueeze(0)
    else:
        plane = plane.permute(kept.index(down), kept.index(across))
    return plane[top:bottom, left:right]


def _local(value: object) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        if (
            not value.flags.writeable
            or not value.dtype.isnative
            or min(value.strides, default=0) < 0
        ):
            value = value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
        return torch.from_numpy(value)
    local = cast(Any, value)._local_tensor if is_dtensor(value) else value
    tensor = cast(torch.Tensor, local).detach()
    if why := why_no_data(tensor):
        raise ValueError(why)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        size = tensor.numel() * tensor.element_size()
        if size > _SMALL:
            raise ValueError(f"{tensor.layout} of {format_bytes(size)} is too large to be read")
        return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return tensor


def _real(chunk: torch.Tensor) -> torch.Tensor:
    """Floats that hold the values: of 32 bits where they suffice. Of complex ones the magnitude."""
    if chunk.is_complex():
        return chunk.abs()
    if chunk.dtype in (torch.float32, torch.float64):
        return chunk
    small = chunk.element_size() <= 2
    return chunk.to(torch.float32 if small else torch.float64)


@dataclass
class _Sums:
    """What is known of each pixel."""

    mean: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    bad: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> _Sums:
        """For so many pixels."""
        wide = [torch.zeros(rows, columns, dtype=torch.float64, device=device) for _ in range(4)]
        return cls(*wide)

    def enter(self, place: tuple[slice, slice], blocks: torch.Tensor) -> None:
        """Blocks, as (rows of pixels, down a block, columns of pixels, across a block)."""
        real = _real(blocks)
        down = real.sum(1) if real.shape[1] > 1 else real[:, 0]
        total = down.sum(-1)
        count = real.shape[1] * real.shape[3]
        if bool(torch.isfinite(total).all()):
            low, high = (real.amin(1), real.amax(1)) if real.shape[1] > 1 else (down, down)
            low, high = low.amin(-1), high.amax(-1)
            mean = total.to(torch.float64) / count
        else:  # something here is not finite, or the sum is too large
            real = real.to(torch.float64)
            finite = torch.isfinite(real)
            held = finite.sum((1, 3))
            mean = torch.where(finite, real / count, 0.0).sum((1, 3)) * (count / held)
            low = torch.where(finite, real, math.inf).amin((1, 3))
            high = torch.where(finite, real, -math.inf).amax((1, 3))
            self.bad[place] = 1 - held / count
        self.mean[place], self.low[place], self.high[place] = mean, low.double(), high.double()


def _read(plane: torch.Tensor, cut: Cut) -> Record:
    _, _, (top, _, left, _, *shift), (down, across) = cut
    first = top + shift[0], left + shift[1]
    record: Record = {"top": first[0] // down, "left": first[1] // across, "every": 1}
    record["rows"] = -(-(first[0] + plane.shape[0]) // down) - first[0] // down
    record["columns"] = -(-(first[1] + plane.shape[1]) // across) - first[1] // across
    if (down, across) == (1, 1):
        return record | _elements(plane)
    flipped = plane.shape[0] > 1 and abs(plane.stride(0)) < abs(plane.stride(1))
    if flipped:  # what lies close together is read together
        plane, first, (down, across) = plane.t(), first[::-1], (across, down)
    sums, record["every"] = _shrink(plane, first, (down, across))
    found = [(part.t() if flipped else part).cpu().numpy() for part in vars(sums).values()]
    mean, low, high, bad = (np.ascontiguousarray(part) for part in found)
    nothing = bad == 1
    for part in (mean, low, high):
        part[nothing] = 0
    share = np.where(bad > 0, np.clip(np.ceil(bad * 255), 1, np.where(nothing, 255, 254)), 0)
    return record | {
        "mean": _upper(mean, 3),
        "low": _upper(low, 2),
        "high": _upper(high, 2),
        "bad": share.astype(np.uint8).tobytes(),
    }


def _elements(plane: torch.Tensor) -> Record:
    if plane.is_complex():
        plane = plane.abs()
    elif plane.is_floating_point() and plane.dtype != torch.float64:
        plane = plane.to(torch.float32)
    values = array_of(plane.contiguous().cpu())
    return {"values": values.tobytes(), "dtype": values.dtype.str}


def _steps(rows: int, columns: int, down: int, across: int) -> tuple[int, int]:
    """One row and one column of how many to read, at least one of each block."""
    size = rows * columns
    if size <= _MOST_READ:
        return 1, 1
    row_step = min(down, -(-size // _SAMPLE))
    return row_step, max(min(across, size // row_step // _SAMPLE), 1)


def _shrink(
    plane: torch.Tensor, first: tuple[int, int], blocks: tuple[int, int]
) -> tuple[_Sums, int]:
    """Shrink block by block; the first and last of a line may be cut by the region's edge."""
    steps = _steps(plane.shape[0], plane.shape[1], *blocks)
    row_pieces = _pieces(first[0], plane.shape[0], blocks[0])
    column_pieces = _pieces(first[1], plane.shape[1], blocks[1])
    size = [pieces[-1][0] + pieces[-1][2] for pieces in (row_pieces, column_pieces)]
    sums = _Sums.empty(size[0], size[1], plane.device)
    for row, top, count, down in row_pieces:
        for column, left, number, across in column_pieces:
            part = plane[top : top + count * down, left : left + number * across]
            part = part.unflatten(0, (count, down)).unflatten(2, (number, across))
            part = part[:, (min(steps[0], down) - 1) // 2 :: steps[0]]
            part = part[..., (min(steps[1], across) - 1) // 2 :: steps[1]]
            a_block = part.shape[1] * part.shape[3]
            wide = max(_CHUNK // a_block, 1)
            tall = max(wide // number, 1)
            for i in range(0, count, tall):
                for j in range(0, number, wide):
                    chunk = part[i : i + tall, :, j : j + wide]
                    place = (
                        slice(row + i, row + i + chunk.shape[0]),
                        slice(column + j, column + j + chunk.shape[2]),
                    )
                    sums.enter(place, chunk)
    return sums, steps[0] * steps[1]


def _pieces(start: int, length: int, block: int) -> list[tuple[int, int, int, int]]:
    """Cut a line in runs of equal blocks: (first pixel, first element, blocks, block size)."""
    pieces, place, pixel = [], 0, 0
    head = min(-start % block, length)
    for count, size in ((1, head), ((length - head) // block, block)):
        if count and size:
            pieces.append((pixel, place, count, size))
            place, pixel = place + count * size, pixel + count
    if place < length:
        pieces.append((pixel, place, 1, length - place))
    return pieces


def _upper(values: np.ndarray[Any, Any], count: int) -> bytes:
    """The upper bytes of 32-bit floats, rounded."""
    bits = np.clip(values, -_LARGEST, _LARGEST).astype("<f4").view("<u4")
    bits = bits + np.uint32(1 << (31 - 8 * count))
    upper = bits.view(np.uint8).reshape(*bits.shape, 4)[..., 4 - count :]
    return bytes(upper.tobytes())


def lower(data: bytes, count: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Floats from their upper bytes, as the records have them; on the controller."""
    bits = np.zeros((rows, columns, 4), np.uint8)
    bits[..., 4 - count :] = np.frombuffer(data, np.uint8).reshape(rows, columns, count)
    return bits.view("<f4")[..., 0].astype(np.float64)
