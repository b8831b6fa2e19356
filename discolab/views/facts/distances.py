"""How far the numbers of two tensors are apart, exactly also where they are large integers.

Pure arithmetic on two flat tensors of one length.
"""

from __future__ import annotations

import math

import torch

_EXACT = 2.0**53  # up to here float64 holds every integer


def distances(
    one: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare element by element.

    Returns
    -------
    same : bool tensor
        The same number, to the last digit, whatever the dtypes; NaN is the same as NaN.
    nan : bool tensor
        NaN in one of them only.
    gap : float64 tensor
        How far they are apart, without end where that is no number. Never 0 for two that differ.

    Examples
    --------
    >>> large = torch.tensor([2**53 + 1, 2**63 - 1])
    >>> same, _, gap = distances(large, torch.tensor([2.0**53, -(2.0**63)], dtype=torch.float64))
    >>> same.tolist(), gap.tolist()
    ([False, False], [1.0, 1.8446744073709552e+19])
    """
    kind = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(kind), other.to(kind)
    missing, lacking = torch.isnan(a), torch.isnan(b)
    same, gap = (a == b) | (missing & lacking), (a - b).abs()
    if _long(one) or _long(other):
        large = torch.maximum(a.abs(), b.abs()) >= _EXACT
        if bool(large.any()):
            (high, low), (its_high, its_low) = _halves(one, a), _halves(other, b)
            split = ((high - its_high) + (low - its_low)).abs()
            gap = torch.where(large, split, gap)
            same &= ~(large & (split != 0))
    return same, missing ^ lacking, gap.nan_to_num_(nan=math.inf, posinf=math.inf)


def _long(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.uint64)


def _halves(tensor: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two floats that are the number in sum: float64 has not the digits of a long integer."""
    if not _long(tensor):
        return wide, torch.zeros_like(wide)
    bits = tensor.view(torch.int64)
    high = bits >> 32
    if tensor.dtype == torch.uint64:
        high = high & (2**32 - 1)
    return high.to(wide.dtype) * 2**32, (bits & (2**32 - 1)).to(wide.dtype)
