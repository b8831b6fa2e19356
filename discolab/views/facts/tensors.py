"""Describes tensors and arrays where they lie: metadata, statistics, digest, first values.

Runs on the worker that holds the value. Works through the tensor in chunks on its own device, so
that no more than a few values and sums leave it; runs no collective, draws no random number and
records nothing for autograd. Every step is guarded on its own: what fails leaves a note.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

from ...layouts.text import read_placements
from ...runtime.functions import worker_function
from ...runtime.worker import current_worker, current_worker_or_none
from .guard import FAILURES, Record, attempt, plain, type_name
from .thumbnails import histogram, places_of_nonfinite, thumbnail

if TYPE_CHECKING:
    import numpy

Stats: TypeAlias = Literal["auto"] | bool

#: Statistics and a digest are taken unasked up to this many bytes.
SMALL_BYTES = 4 * 2**20
_LIMIT = "discolab.views.statistics_limit"  # in `Worker.shared`: another limit than SMALL_BYTES

_CHUNK = 2**19  # elements; float64 temporaries of 4 MiB
_HEAD = 4
_MASK = 2**64 - 1
_NOISE = 1e-12  # a mean or deviation below this share of the largest magnitude is rounding
_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_IN_FLIGHT = "a collective is in flight: data not read"
_UNREADABLE = re.compile(r"u?int[1-7]$|bits|float4")  # torch has no arithmetic for these
_RAGGED = re.compile(r"^j\d+$")
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@worker_function("setting a limit")
def limit_statistics(nbytes: int) -> None:
    """Have this worker's pictures read tensors of up to so many bytes (a worker function)."""
    current_worker().shared[_LIMIT] = nbytes


def _statistics_limit() -> int:
    worker = current_worker_or_none()
    limit = SMALL_BYTES if worker is None else worker.shared.get(_LIMIT, SMALL_BYTES)
    return int(limit)


def describe_tensor(tensor: torch.Tensor, stats: Stats, pictures: bool = True) -> Record:
    """Describe one tensor of any dtype, layout and device.

    Parameters
    ----------
    tensor : torch.Tensor
        A DTensor is described by its local shard, with its placements in words.
    stats : bool or "auto"
        Whether to read the data; "auto" reads up to 4 MiB, and of more only a few values.
    pictures : bool
        Whether to take a thumbnail and a histogram of the data that is read.

    Returns
    -------
    dict
        Kind "tensor"; see `describe`.
    """
    if is_dtensor(tensor):
        return _describe_dtensor(tensor, stats, pictures)
    record: Record = {"kind": "tensor", "type": type_name(tensor)}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        attempt(record, "dtype", lambda: {"dtype": dtype_name(tensor.dtype)})
        if is_lazy(tensor):
            return record | {"note": why_no_data(tensor)}
        attempt(record, "shape", lambda: {"shape": shape_of(tensor)})
        attempt(record, "device", lambda: {"device": str(tensor.device)})
        attempt(record, "layout", lambda: _layout(tensor))
        attempt(record, "requires_grad", lambda: _requires_grad(tensor))
        in_flight = type(tensor).__name__ == "AsyncCollectiveTensor"
        if why := _IN_FLIGHT if in_flight else why_no_data(tensor):
            record["note"] = why
            attempt(record, "nbytes", lambda: {"nbytes": _bytes_of([tensor])})
            return record
        if "shape" not in record:
            return record
        attempt(record, "nbytes", lambda: {"nbytes": _bytes_of(_stored(tensor, copy=False))})
        attempt(record, "data", lambda: _content(tensor.detach(), stats, pictures))
    return record


def describe_array(array: numpy.ndarray[Any, Any], stats: Stats, pictures: bool = True) -> Record:
    """Describe a numpy array; the record has the same keys as that of a tensor."""
    record: Record = {
        "kind": "tensor",
        "type": type_name(array),
        "shape": [int(size) for size in array.shape],
        "dtype": str(array.dtype.name),
        "device": "cpu",
        "nbytes": min(int(array.nbytes), 2**63 - 1),
    }
    if array.dtype.kind not in "biufc":
        record["note"] = "no statistics for this dtype"
        return record
    if stats is False or (stats == "auto" and array.nbytes > _statistics_limit()):
        return record

    def read() -> Record:
        # A copy in native byte order: torch warns of read-only arrays, refuses negative strides.
        native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True, subok=False)
        with torch.no_grad():
            return _content(torch.from_numpy(native), stats, pictures)

    attempt(record, "statistics", read)
    masks = sys.modules.get("numpy.ma")
    if masks is not None and isinstance(array, masks.MaskedArray) and "digest" in record:
        record["note"] = "masked: statistics are of all values, also of those below the mask"
        mask = _digest([torch.from_numpy(masks.getmaskarray(array).copy())])
        record["digest"] = f"{int(cast(str, record['digest']), 16) ^ int(mask, 16):016x}"
    return record


def is_dtensor(value: object) -> bool:
    """Tell whether `value` is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def shape_of(tensor: torch.Tensor) -> list[object]:
    """Give the shape as a list; sizes that are not integers (ragged tensors) as strings.

    torch numbers ragged sizes, ``j3``, as they are made in a process: that says nothing.
    """
    return [size if type(size) is int else _RAGGED.sub("j", str(size)) for size in tensor.shape]


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype without its module: ``float32``."""
    return str(dtype).removeprefix("torch.")


def _describe_dtensor(tensor: Any, stats: Stats, pictures: bool) -> Record:
    record = describe_tensor(tensor._local_tensor, stats, pictures)
    record["type"] = type_name(tensor)
    attempt(record, "requires_grad", lambda: _requires_grad(tensor))
    attempt(record, "placements", lambda: {"placements": _placements(tensor.placements)})
    attempt(record, "logical shape", lambda: {"logical_shape": shape_of(tensor)})
    attempt(record, "mesh", lambda: {"sharding": sharding_of(tensor)})
    return record


def sharding_of(tensor: Any) -> Record:
    """What a drawing needs of a DTensor: its placements, and its mesh's sizes and ranks."""
    mesh = tensor.device_mesh.mesh
    return {
        "placements": list(map(list, read_placements(tensor.placements))),
        "mesh": list(mesh.shape),
        "ranks": mesh.flatten().tolist(),
    }


def _placements(placements: Any) -> str:
    return ", ".join(f"{name}({detail})" for name, detail in read_placements(placements))


def _layout(tensor: torch.Tensor) -> Record:
    if tensor.layout is torch.strided:
        return {}
    return {"layout": str(tensor.layout).removeprefix("torch.")}


def _requires_grad(tensor: torch.Tensor) -> Record:
    return {"requires_grad": True} if tensor.requires_grad else {}


def _stored(tensor: torch.Tensor, copy: bool) -> list[torch.Tensor]:
    """List the dense tensors behind `tensor`: its values first, then its indices.

    Where the values cannot be had without a copy and `copy` is False, `tensor` itself.
    """
    if tensor.layout is torch.sparse_coo:
        if copy and _bytes_of(_stored(tensor, copy=False)) <= SMALL_BYTES:
            tensor = tensor.coalesce()  # entries of one place are summed; else itself
        return [tensor._values(), tensor._indices()]
    if tensor.layout in _COMPRESSED:
        return [tensor.values(), *(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])]
    if tensor.layout is torch.jagged:
        return [tensor.values(), cast(Any, tensor).offsets()]
    if not copy:
        return [tensor]
    if tensor.is_quantized:
        return [tensor.dequantize(), tensor.int_repr()]
    if tensor.is_nested:
        return [torch.cat([part.reshape(-1) for part in tensor.unbind()])]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _bytes_of(stored: list[torch.Tensor]) -> int:
    return min(sum(part.numel() * part.element_size() for part in stored), 2**63 - 1)


def _content(tensor: torch.Tensor, stats: Stats, pictures: bool) -> Record:
    """Read the data, as far as `stats` asks for."""
    record: Record = {}
    if stats is False:
        return record
    whole = stats is True or _bytes_of(_stored(tensor, copy=False)) <= _statistics_limit()
    stored = _stored(tensor, copy=whole)
    if _UNREADABLE.match(dtype_name(tensor.dtype)):
        record["note"] = "no statistics for this dtype"
    else:
        attempt(record, "first values", lambda: {"head": _head(stored[0])})
        if whole:
            attempt(record, "statistics", lambda: {"stats": _statistics(stored[0])})
            if tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED:
                record["note"] = "statistics are of the stored entries"
        if pictures and tensor.layout is torch.strided and not tensor.is_nested:
            # Means of a large tensor with gaps would take a copy of it.
            means = whole and (stored[0].is_contiguous() or _bytes_of(stored) <= SMALL_BYTES)
            attempt(record, "thumbnail", lambda: thumbnail(stored[0], means))
            if isinstance(record.get("stats"), dict):
                found = cast(Record, record["stats"])
                attempt(record, "histogram", lambda: _spread(stored[0], found))
    if whole:
        attempt(record, "digest", lambda: {"digest": _digest(stored)})
    return record


def _head(values: torch.Tensor) -> list[object]:
    """Give the first few values in row-major order, touching no others."""
    need = _HEAD
    for dim in reversed(range(values.dim())):
        size = values.shape[dim]
        values = values.narrow(dim, 0, min(size, need))
        need = -(-need // max(size, 1))
    values = values.reshape(-1)[:_HEAD]
    if values.is_quantized:
        values = values.dequantize()
    if values.is_floating_point() and values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    # Complex values have no place in a record: they go as strings.
    return [str(item) if isinstance(item, complex) else plain(item) for item in values.tolist()]


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor into flat pieces in row-major order, copying no more than a piece at once."""
    if tensor.numel() <= _CHUNK:
        if tensor.numel():
            yield tensor.resolve_conj().resolve_neg().reshape(-1)
    elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield from torch.split(tensor.view(-1), _CHUNK)
    else:
        step = max(_CHUNK * tensor.shape[0] // tensor.numel(), 1)
        for start in range(0, tensor.shape[0], step):
            rows = tensor.narrow(0, start, min(step, tensor.shape[0] - start))
            yield from _chunks(rows[0] if step == 1 else rows)


@dataclass
class _Running:
    """Mean and deviation of finite values over chunks, by Chan's update."""

    count: int = 0
    nonfinite: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float | int | None = None
    high: float | int | None = None

    def add(self, chunk: torch.Tensor) -> None:
        if not chunk.is_floating_point() and not chunk.is_complex():
            self._join(chunk.to(torch.float64), *_ends(chunk))
            return
        wide = chunk.to(torch.complex128).abs() if chunk.is_complex() else chunk.to(torch.float64)
        finite = torch.isfinite(wide)
        bad = wide.numel() - int(finite.sum().item())
        self.nonfinite += bad
        if bad:
            wide = wide[finite]
        if wide.numel():
            low, high = torch.stack(torch.aminmax(wide)).tolist()
            self._join(wide, low, high)

    def _join(self, wide: torch.Tensor, low: float | int, high: float | int) -> None:
        middle = wide.mean()
        mean, squares = torch.stack((middle, (wide - middle).square_().sum())).tolist()
        count = wide.numel()
        total, shift = self.count + count, mean - self.mean
        self.squares += squares
        if self.count and shift:
            self.squares += shift * shift * self.count * count / total
        self.mean += shift * count / total
        self.count = total
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)


def _ends(chunk: torch.Tensor) -> tuple[int, int]:
    """The lowest and the highest of integers; those of uint64 are shifted to the range of int64."""
    shift = 2**63 if chunk.dtype == torch.uint64 else 0
    whole = chunk.view(torch.int64) ^ -shift if shift else chunk.to(torch.int64)
    low, high = torch.stack(torch.aminmax(whole)).tolist()
    return low + shift, high + shift


def _statistics(values: torch.Tensor) -> Record:
    """Take mean, std (n - 1), min and max of the finite values, and count the others."""
    running = _Running()
    for chunk in _chunks(values):
        running.add(chunk)
    found: Record = {"mean": None, "std": None, "min": None, "max": None}
    if running.low is not None and running.high is not None:
        noise = _NOISE * max(abs(running.low), abs(running.high))
        mean = 0.0 if abs(running.mean) < noise else running.mean
        found = {"mean": mean, "std": None, "min": plain(running.low), "max": plain(running.high)}
        if running.count > 1:
            deviation = float((running.squares / (running.count - 1)) ** 0.5)
            found["std"] = 0.0 if deviation < noise else deviation
    if values.is_complex():
        found["of"] = "magnitude"
    if values.is_complex() or values.is_floating_point():
        found["nonfinite"] = running.nonfinite
    return found


def _spread(values: torch.Tensor, stats: Record) -> Record:
    """How the finite values are spread, and where the others are."""
    found: Record = {}
    low, high = stats["min"], stats["max"]
    if isinstance(low, int | float) and isinstance(high, int | float) and low < high:
        found["histogram"] = histogram(_chunks(values), float(low), float(high))
    if stats.get("nonfinite"):
        places = places_of_nonfinite(_chunks(values), values.shape)
        found["places"] = [[kind, index] for kind, index in places]
    return found


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_ODD = tuple(
    _signed(value) for value in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9)
)


def _digest(stored: list[torch.Tensor]) -> str:
    """Hash the content: bits and their order, not shape, dtype, strides or device.

    Every element is mixed with its position, then summed modulo 2**64: exact, so independent of
    chunks, threads and device. Not cryptographic. 0.0 and -0.0 differ, as do NaNs of other bits.
    """
    total = 0
    for part in stored:
        start = 0
        total = (total * 0x94D049BB133111EB + part.numel()) & _MASK
        for chunk in _chunks(part):
            lanes = chunk.view(_LANES[chunk.element_size()])
            places = torch.arange(
                start, start + lanes.numel(), dtype=torch.int64, device=lanes.device
            )
            mixed = lanes.to(torch.int64) * _ODD[0] + places.mul_(_ODD[1])
            mixed.bitwise_xor_(mixed >> 31).mul_(_ODD[2])
            mixed.bitwise_xor_(mixed >> 29)
            total = (total + int(mixed.sum().item())) & _MASK
            start += lanes.numel()
    return f"{total:016x}"


def digest_of(tensor: torch.Tensor) -> str:
    """Hash what a tensor holds here, whatever its size; raises where its data can't be read."""
    local: torch.Tensor = cast(Any, tensor)._local_tensor if is_dtensor(tensor) else tensor
    if why := why_no_data(local):
        raise ValueError(why)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return _digest(_stored(local.detach(), copy=True))


# -- whether there is data: to read a tensor whose storage was freed ends the process --------------

_NO_DATA = {
    "FakeTensor": "fake tensor: no data",
    "FunctionalTensor": "tensor under tracing: data not read",
}
_LAZY = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("offsets", "values"),
}


def why_no_data(tensor: torch.Tensor) -> str:
    """Say why a tensor can't be read, of a DTensor what lies here; empty if it can.

    FSDP frees the storage of what it has gathered, and leaves the tensor with its shape.

    Examples
    --------
    >>> x = torch.ones(3)
    >>> why_no_data(x), why_no_data(x.to("meta"))
    ('', 'meta tensor: no data')
    >>> _ = x.untyped_storage().resize_(0)
    >>> why_no_data(x)
    'storage freed: no data'
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    if is_lazy(tensor):
        return "lazy: no data yet"
    name = type(tensor).__name__
    if name in _NO_DATA:
        return _NO_DATA[name]
    if tensor.device.type == "meta":
        return "meta tensor: no data"
    with torch._C.DisableTorchFunctionSubclass():
        parts = [cast(Any, getattr(tensor, name))() for name in _PARTS.get(tensor.layout, ())]
        return "storage freed: no data" if any(map(_freed, parts or [tensor])) else ""


def is_lazy(tensor: object) -> bool:
    """Tell a parameter that gets its shape with the first input, as those of LazyLinear."""
    return isinstance(tensor, _LAZY)


def _freed(part: torch.Tensor) -> bool:
    """Whether the storage is shorter than shape and strides need it to be."""
    try:
        stored = part.untyped_storage().nbytes()
        if part.numel() and part.layout is torch.strided and not part.is_nested:
            steps = zip(part.shape, part.stride(), strict=True)
            end = part.storage_offset() + 1 + sum((size - 1) * step for size, step in steps)
            return bool(stored < end * part.element_size())
        return bool(stored < part.numel() * part.element_size())
    except FAILURES:  # a subclass without storage answers for its own data
        return False
