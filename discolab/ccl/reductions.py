"""What the reductions mean for each dtype, and how they are computed. No state.

float16, bfloat16 and float8 are accumulated in float32 and rounded once. Integers wrap around
as in torch; avg of integers is exact up to 64 bits and rounds toward zero, as NCCL does.
bool follows torch.distributed: sum and max are "or", prod and min are "and", there is no avg.
Complex numbers have no order, so no min and max. min and max give NaN if any input is NaN.
band, bor and bxor work on the bits of integers and on bool.
The inputs are always combined in the order of the ranks, so a result depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime.errors import ArgumentError
from ..runtime.session import REDUCE_OPS

_FLOAT8 = frozenset({
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
})  # fmt: skip
_WIDER = dict.fromkeys((torch.float16, torch.bfloat16, *_FLOAT8), torch.float32)
_WIDER |= dict.fromkeys((torch.uint16, torch.uint32), torch.int64)
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
_PLAIN = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
REDUCIBLE = _SIGNED | _PLAIN | {torch.bool, torch.uint64, *_WIDER}
MOVABLE = REDUCIBLE | {torch.float4_e2m1fn_x2}

_LOWEST = -(1 << 63)  # flips the sign bit, so that signed order is the order of uint64

_BITWISE: dict[str, Callable[..., Any]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    **_BITWISE,
}
_BOOL: dict[str, Callable[..., Any]] = {
    "sum": torch.logical_or,
    "max": torch.logical_or,
    "prod": torch.logical_and,
    "min": torch.logical_and,
    **_BITWISE,
}
_NAMES = (*REDUCE_OPS, *_BITWISE)


def check_reduction(name: str, reduction: Any, dtype: torch.dtype) -> str:
    """`reduction` as a word, if it is defined for `dtype`.

    Raises
    ------
    ArgumentError
        If there is no such reduction, or none for this dtype.
    """
    if reduction not in _NAMES:
        raise ArgumentError(f"{name}: unknown op {reduction!r}; use one of {', '.join(_NAMES)}")
    word = str(reduction)
    kind = str(dtype).removeprefix("torch.")
    if dtype not in REDUCIBLE:
        raise ArgumentError(f"{name}: {kind} can be moved but not reduced; convert it first")
    if dtype is torch.bool and word == "avg":
        raise ArgumentError(f"{name}: op 'avg' is not defined for bool; convert it to float first")
    if word in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"{name}: op {word!r} is for integers and bool, not for {kind}")
    if dtype.is_complex and word in ("min", "max"):
        raise ArgumentError(f"{name}: op {word!r} is not defined for {kind}: it has no order")
    return word


def combine(inputs: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Reduce tensors of one shape and dtype, in their order, to a new one on the first's device."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        return _fold(inputs, dtype, _BOOL[reduction])
    if dtype is torch.uint64:
        return _combine_uint64(inputs, reduction)
    wide = torch.int64 if reduction == "avg" and dtype in _SIGNED else _WIDER.get(dtype, dtype)
    total = _fold(inputs, wide, _COMBINE[reduction])
    if reduction == "avg":
        if dtype.is_floating_point or dtype.is_complex:
            total.div_(len(inputs))
        else:
            total.div_(len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def accumulates_in_place(dtype: torch.dtype, reduction: str) -> bool:
    """Whether `combine_into` can hold partial results in a tensor of `dtype` itself."""
    if dtype in _PLAIN:
        return True
    return dtype in _SIGNED and reduction != "avg"


def combine_into(total: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: str) -> None:
    """As `combine`, where `accumulates_in_place`; `total` may be the first of the inputs."""
    merge = _COMBINE[reduction]
    merge(inputs[0], inputs[1], out=total)
    for other in inputs[2:]:
        merge(total, other, out=total)
    if reduction == "avg":
        total.div_(len(inputs))


def _fold(
    inputs: Sequence[torch.Tensor], dtype: torch.dtype, merge: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Merge from the left, in a dtype; the inputs stay as they are."""
    device = inputs[0].device
    total = inputs[0].to(device, dtype)
    if len(inputs) == 1:
        return total.clone() if total.data_ptr() == inputs[0].data_ptr() else total
    total = merge(total, inputs[1].to(device, dtype))
    for other in inputs[2:]:
        merge(total, other.to(device, dtype), out=total)
    return total


def _combine_uint64(inputs: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """torch has no arithmetic for uint64: sums and products are those of int64, bit by bit."""
    bits = [x.view(torch.int64) for x in inputs]
    in_order = reduction in ("min", "max")
    if in_order:
        bits = [x ^ _LOWEST for x in bits]
    total = _fold(bits, torch.int64, _COMBINE[reduction])
    if in_order:
        total ^= _LOWEST
    elif reduction == "avg":
        total = _divide_unsigned(total, len(inputs))
    return total.view(torch.uint64)


def _divide_unsigned(bits: torch.Tensor, by: int) -> torch.Tensor:
    """The quotient of uint64 values, given and returned as int64 bits."""
    half = (bits >> 1) & ~_LOWEST
    quotient = (half // by) << 1
    rest = bits - quotient * by  # below 2 * by, so its sign bit is clear
    return quotient + rest // by
