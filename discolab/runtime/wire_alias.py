"""Tensors with strides of their own, or in memory that others of the message cover too.

A region (regions.py) becomes one frame, and each tensor in it an ALIAS record on that: its shape,
its strides, where it begins. One that was written already is an AGAIN record. Stateless.
"""

from __future__ import annotations

from typing import Any

import torch

from .regions import ALIGN, Region, span, view_in
from .wire_tensors import SHAPES, Frames, TensorHead, read_shape, tensor_head, usable, view_of
from .wire_types import AGAIN, ALIAS, U32, U64, bad


def alias_record(tensor: torch.Tensor, region: Region, frames: list[Any]) -> bytes:
    """The record of one tensor of a region; the first one appends the region's bytes."""
    head = tensor_head(ALIAS, tensor)
    assert head is not None, "only plain tensors come here"
    if region.number is None:
        region.number = len(frames)
        frames.append(view_of(region.memory().cpu().numpy()))
    dims = tensor.dim()
    offset, strides = region.place_of(tensor)
    return b"".join(
        (
            head,
            bytes((dims,)),
            SHAPES[dims].pack(*tensor.shape),
            SHAPES[dims].pack(*strides),
            U64.pack(offset),
            U32.pack(region.number),
        )
    )


def again_record(ordinal: int) -> bytes:
    """The record of a tensor that the message has had already, as its so-manieth one."""
    return bytes((AGAIN,)) + U32.pack(ordinal)


def read_again(body: bytes, pos: int, frames: Frames) -> tuple[Any, int]:
    """The tensor that an AGAIN record stands for."""
    ordinal = U32.unpack_from(body, pos)[0]
    if ordinal >= len(frames.tensors):
        bad(f"tensor {ordinal} again, after {len(frames.tensors)} tensors", pos)
    return frames.tensors[ordinal], pos + 4


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
    end = offset + span(shape, strides) * itemsize
    if offset % itemsize or end > frames.all[number].nbytes:
        bad(f"an alias of {head.dtype} on bytes {offset} to {end} of frame {number}", at)
    tensor = None
    if not frames.dry:
        try:
            tensor = head.finish(view_in(base, head.dtype, shape, strides, offset))
        except Exception as exc:  # whatever torch raises for it
            head.refuse(shape, exc)
    frames.tensors.append(tensor)
    return tensor, at + 12


def _base(frames: Frames, number: int, device: torch.device, pos: int) -> tuple[Any, torch.device]:
    """The memory of a frame that aliases share, as a flat tensor of bytes."""
    data = frames.take(number, None, pos)
    if not data.nbytes:
        bad(f"frame {number}, which aliases share, is empty", pos)
    base = None
    if not frames.dry:
        base = torch.frombuffer(usable(data, ALIGN), dtype=torch.uint8)
        if frames.place is not None and device.type != "cpu":
            base = frames.place(base, device)
    frames.shared[number] = base, device
    return base, device
