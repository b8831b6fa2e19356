"""For tests of messages: whether what came is what was sent, and tensors of other devices."""

import contextlib
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from discolab.runtime import serialize
from discolab.runtime.serialize import LazyPickle

MOST = 1 << 20  # elements that are looked at; few bytes can be shown as any number of them


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same type and equal, NaNs and the bits of tensors included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        return (
            (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and (a.layout, a.is_conj(), a.is_neg()) == (b.layout, b.is_conj(), b.is_neg())
            and (a.layout is not torch.strided or not a.numel() or a.stride() == b.stride())
            and (not 0 < a.numel() < MOST or torch.equal(bits(a), bits(b)))
        )
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, LazyPickle):
        return (a.what, a.data) == (b.what, b.data) and [bytes(frame) for frame in a.frames] == [
            bytes(frame) for frame in b.frames
        ]
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, set | frozenset):
        left = list(b)
        for item in a:
            for i, other in enumerate(left):
                if same(item, other):
                    del left[i]
                    break
            else:
                return False
        return not left
    if isinstance(a, slice | range):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)


@contextlib.contextmanager
def as_if_on(device: str) -> Iterator[None]:
    """Within it, messages say of each tensor that it was on a device."""
    reduce = serialize._reduce_tensor

    def reduced(pickler: Any, tensor: torch.Tensor) -> tuple[Any, ...]:
        data, name, shape, *flags = reduce(pickler, tensor)[1]
        return serialize.build_placed_tensor, (data, name, shape, sum(flags), device)

    serialize._reduce_tensor = reduced
    try:
        yield
    finally:
        serialize._reduce_tensor = reduce
