"""Tensors of one pickle that look at the same memory: they do so again where it is opened.

A module may hold a weight and its transpose, or slices of one large buffer. What of a storage
several tensors cover becomes one frame, and each of them an ALIAS record on it. Tensors outside
of pickles are copied one by one, as `arguments.private_copy` does. Stateless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from .wire_tensors import SHAPES, Frames, TensorHead, read_shape, tensor_head, usable, view_of
from .wire_types import ALIAS, U32, U64, bad

_ALIGN = 16  # bytes; the largest element


class Region:
    """A stretch of a storage, in bytes, that several tensors cover, and its frame's number."""

    __slots__ = ("first", "high", "low", "number")

    def __init__(self, low: int, high: int, first: torch.Tensor) -> None:
        self.low = low // _ALIGN * _ALIGN
        self.high = high
        self.first = first
        self.number: int | None = None


def find_regions(tensors: list[torch.Tensor]) -> dict[int, Region]:
    """Which of these different tensors overlap another, by `id`, and where."""
    by_storage: defaultdict[int, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            low = int(tensor.storage_offset()) * tensor.itemsize
            high = low + _span(tensor.shape, tensor.stride()) * tensor.itemsize
            by_storage[tensor.untyped_storage()._cdata].append((low, high, tensor))
    found: dict[int, Region] = {}
    for extents in by_storage.values():
        if len(extents) == 1:
            continue
        region: Region | None = None
        for low, high, tensor in sorted(extents, key=lambda extent: extent[:2]):
            if region is None or low >= region.high:
                region = Region(low, high, tensor)
            else:
                region.high = max(region.high, high)
                found[id(region.first)] = found[id(tensor)] = region
    return found


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements it is from the first to the last one, both counted."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def alias_record(tensor: torch.Tensor, region: Region, frames: list[Any]) -> bytes:
    """The record of one tensor of a region; the first one appends the region's bytes."""
    head = tensor_head(ALIAS, tensor)
    assert head is not None, "only plain tensors come here"
    if region.number is None:
        region.number = len(frames)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        size = region.high - region.low
        flat.set_(tensor.detach().untyped_storage(), region.low, (size,), (1,))
        frames.append(view_of(flat.cpu().numpy()))
    dims = tensor.dim()
    offset = tensor.storage_offset() * tensor.itemsize - region.low
    return b"".join(
        (
            head,
            bytes((dims,)),
            SHAPES[dims].pack(*tensor.shape),
            SHAPES[dims].pack(*tensor.stride()),
            U64.pack(offset),
            U32.pack(region.number),
        )
    )


def read_alias(body: bytes, pos: int, frames: Frames) -> tuple[Any, int]:
    """The tensor whose ALIAS record goes on at `pos`, behind its type index."""
    head = TensorHead(body, pos)
    itemsize = head.dtype.itemsize
    shape, at = read_shape(body, head.end, itemsize)
    strides = SHAPES[len(shape)].unpack_from(body, at)
    at += 8 * len(shape)
    offset = U64.unpack_from(body, at)[0]
    number = U32.unpack_from(body, at + 8)[0]
    if 0 in shape:
        bad(f"an alias of shape {shape}, which has no memory", pos)
    known = frames.shared.get(number)
    if known is None:
        known = _base(frames, number, head.device, at)
    base, device = known
    if device != head.device:
        bad(f"an alias on {head.device} of memory on {device}", pos)
    end = offset + _span(shape, strides) * itemsize
    if offset % itemsize or end > frames.all[number].nbytes:
        bad(f"an alias of {head.dtype} on bytes {offset} to {end} of frame {number}", at)
    if frames.dry:
        return None, at + 12
    try:
        whole = base[: len(base) // itemsize * itemsize].view(head.dtype)
        tensor = whole.as_strided(shape, strides, offset // itemsize)
        return head.finish(tensor), at + 12
    except Exception as exc:  # whatever torch raises for it
        head.refuse(shape, exc)


def _base(frames: Frames, number: int, device: torch.device, pos: int) -> tuple[Any, torch.device]:
    """The memory of a frame that aliases share, as a flat tensor of bytes."""
    data = frames.take(number, None, pos)
    if not data.nbytes:
        bad(f"frame {number}, which aliases share, is empty", pos)
    base = None
    if not frames.dry:
        base = torch.frombuffer(usable(data, _ALIGN), dtype=torch.uint8)
        if frames.place is not None and device.type != "cpu":
            base = frames.place(base, device)
    frames.shared[number] = base, device
    return base, device
