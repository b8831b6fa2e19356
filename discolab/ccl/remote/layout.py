"""Tensors as bytes that can be given and taken as they lie, and what must be copied for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import moves
from ..backends import wire
from .lane_steps import Room, Tensor, Tensors


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 of one dimension; no copy."""
    if tensor.numel() == 1:  # it may have any stride and count as contiguous
        tensor = tensor.as_strided((1,), (1,))
    return tensor.reshape(-1).view(torch.uint8)


def whole(tensors: Tensors) -> Tensor:
    """Tensors as contiguous bytes; a single contiguous one as it lies."""
    if len(tensors) == 1 and _plain(tensors[0]) and tensors[0].numel():
        return as_bytes(tensors[0])
    return wire.pack_bytes(tensors, torch.device("cpu"))


def flat(tensors: Tensors) -> Tensor:
    """Tensors of one dtype as a contiguous one of one dimension; a single one as it lies."""
    return whole(tensors).view(tensors[0].dtype)


def typed(data: Tensor, like: Tensor) -> Tensor:
    """Bytes as elements of another tensor's dtype."""
    return data if data.dtype is like.dtype else data.view(like.dtype)


def room_for(targets: Tensors) -> tuple[Tensor, bool]:
    """Contiguous bytes to be written for some outputs, and whether they must be copied there."""
    if len(targets) == 1 and _plain(targets[0]) and targets[0].numel():
        return as_bytes(targets[0]), False
    size = sum(target.nbytes for target in targets)
    return torch.empty(size, dtype=torch.uint8), True


def rows_of(more: Room, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for tensors in rows."""
    size = like.itemsize
    for length in shape:
        size *= length
    return more(size)[:size].view(like.dtype).view(shape)


def unharmed(srcs: Tensors, outs: Tensors, own: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The sources; copies of those that an output would overwrite while they are read.

    `own` are pairs of a source and an output, by their places, that may be the same memory.
    """
    spans = [moves.span(out) for out in outs]
    found = []
    for place, src in enumerate(srcs):
        low, high = mine = moves.span(src)
        hit = any(
            first < high and low < last and not ((first, last) == mine and (place, to) in own)
            for to, (first, last) in enumerate(spans)
        )
        found.append(src.clone() if hit else src)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors are the same memory."""
    return a.data_ptr() == b.data_ptr()


def _plain(tensor: Tensor) -> bool:
    """Whether it is memory as it stands."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
