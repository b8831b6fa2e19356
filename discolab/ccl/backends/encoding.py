"""How tensors are encoded for a library that reduces them: in few dtypes, in a row. No state.

A library (Gloo, NCCL, MPI) reduces a few dtypes and has its own mind about NaN. Here a tensor
is turned into one that any of them reduces so that the result is what `reductions` promises:
float16, bfloat16 and float8 go as float32, narrow integers as wider ones, bool as 0 and 1, uint64
as int64 of the same bits. min and max of floats go as integers in the same order, with NaN at
the end that wins. What is only moved goes as bytes (`memory.packed`).

Packing copies, so that a program's own tensors are never in the hands of a library: one that an
interrupt has torn out of an operation can go on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]

BITWISE = frozenset({"band", "bor", "bxor"})
ARITHMETIC = frozenset({"sum", "prod", "min", "max"})
ALL_OPS = ARITHMETIC | BITWISE

_WIDER = {
    torch.int8: torch.int32,  # narrow sums wrap around here, and saturate in some MPI libraries
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_BOOL = {"max": "max", "bor": "max", "prod": "min", "min": "min", "band": "min", "bxor": "sum"}
_LOWEST = {torch.int32: -(1 << 31), torch.int64: -(1 << 63)}


class Code(NamedTuple):
    """The dtype and the reduction with which a library does it."""

    dtype: torch.dtype
    op: str


def code_of(dtype: torch.dtype, reduction: str) -> Code | None:
    """How to reduce tensors of `dtype`; None if no library does it right.

    Then the tensors must be gathered and combined.
    """
    if dtype is torch.bool:
        return Code(torch.uint8, _BOOL.get(reduction, "max"))
    if dtype.is_complex:
        real = torch.float64 if dtype is torch.complex128 else torch.float32
        return None if reduction == "prod" else Code(real, "sum")
    if dtype.is_floating_point:
        double = dtype is torch.float64
        if reduction in ("min", "max"):
            return Code(torch.int64 if double else torch.int32, reduction)
        return Code(torch.float64 if double else torch.float32, _without_avg(reduction))
    if reduction == "avg":
        return None if dtype is torch.uint64 else Code(torch.int64, "sum")
    return Code(_WIDER.get(dtype, dtype), reduction)


def pack(tensors: Tensors, code: Code, reduction: str) -> Tensor:
    """The tensors as one of one dimension, of ``code.dtype``; new memory."""
    return torch.cat([_encode(tensor, code, reduction) for tensor in tensors])


def unpack(whole: Tensor, outs: Tensors, code: Code, reduction: str, members: int) -> None:
    """Write what was reduced over `members` workers to tensors like those that were packed."""
    first = 0
    for out in outs:
        size = out.numel() * (2 if out.is_complex() else 1)
        part = whole[first : first + size]
        out.copy_(_decode(part, out.dtype, code, reduction, members).view(out.shape))
        first += size


def _without_avg(reduction: str) -> str:
    return "sum" if reduction == "avg" else reduction


def _encode(tensor: Tensor, code: Code, reduction: str) -> Tensor:
    dtype = tensor.dtype
    if dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif dtype.is_floating_point and reduction in ("min", "max"):
        wide = torch.float64 if code.dtype is torch.int64 else torch.float32
        return _ordered(tensor.to(wide).reshape(-1), code.dtype, reduction)
    elif dtype is torch.uint64:
        tensor = tensor.contiguous().view(torch.int64)
        if reduction in ("min", "max"):
            tensor = tensor ^ _LOWEST[torch.int64]  # so that signed order is theirs
    return tensor.reshape(-1).to(code.dtype)


def _decode(part: Tensor, dtype: torch.dtype, code: Code, reduction: str, members: int) -> Tensor:
    if dtype is torch.bool:
        return (part & 1).to(dtype)  # bxor is the parity of a sum
    if reduction in ("min", "max"):
        if dtype.is_floating_point:
            wide = torch.float64 if code.dtype is torch.int64 else torch.float32
            return _folded(part, code.dtype).view(wide).to(dtype)
        if dtype is torch.uint64:
            return (part ^ _LOWEST[torch.int64]).view(dtype)
    if reduction == "avg":
        exact = not (dtype.is_floating_point or dtype.is_complex)
        part = part.div(members, rounding_mode="trunc" if exact else None)
    if dtype.is_complex:
        return torch.complex(part[0::2], part[1::2])
    return part.view(dtype) if dtype is torch.uint64 else part.to(dtype)


def _ordered(floats: Tensor, dtype: torch.dtype, reduction: str) -> Tensor:
    """Integers in the order of the floats; NaN last for max and first for min."""
    lowest = _LOWEST[dtype]
    wins = lowest if reduction == "min" else ~lowest
    return torch.where(floats.isnan(), wins, _folded(floats.contiguous().view(dtype), dtype))


def _folded(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits of floats as integers in their order, and back: the negative ones turned around."""
    return bits ^ ((bits >> (8 * dtype.itemsize - 1)) & ~_LOWEST[dtype])
