"""How far a worker's tensor is from what the reference says, and how far it may be. Pure.

Two numbers agree if ``|a - b| <= rtol * (|b| + scale)``. The scale is that of the whole tensor
(the root of its mean square): a sum of large terms in another order may be off by a rounding of
those terms, also where they cancel and the result is small.

Of many elements a few are off by several times what rounding does to most. So a whole tensor is
judged by its error's root mean square too: where that is what rounding makes, a few elements just
beyond their tolerance are no difference. A bug that is in few elements only sets them apart by far
more than rounding could.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Row: TypeAlias = dict[str, Any]

MOST_SAMPLES = 65_536  # elements of a worker's tensor that are looked at by the controller
_FEW = 1e-3  # of all elements: so many may be beyond their tolerance by rounding
_JUST = 4  # times the tolerance: a few elements may come to this by rounding
_NOISE = 0.125  # of the absolute tolerance: the root mean square of rounding errors
_CHUNK = 2**22  # elements compared at once
_STICKS_OUT = 100  # times the typical element
_GAP = 1e4  # between the elements of a mask and the others
_RTOL = {  # torch.testing's, times 10; bfloat16's is wide already, times 4; float64 as it is
    torch.float16: 1e-2,
    torch.bfloat16: 6.4e-2,
    torch.float32: 1.3e-5,
    torch.complex64: 1.3e-5,
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``|a - b| <= atol + rtol * |b|``.

    Attributes
    ----------
    noise
        The root mean square of the errors up to which a few elements just beyond the tolerance are
        rounding; 0: none are.
    """

    rtol: float
    atol: float
    noise: float = 0.0


EXACT = Tolerance(0.0, 0.0)


def tolerance_for(
    dtypes: tuple[torch.dtype, ...],
    scale: float,
    rtol: float | None,
    atol: float | None,
    exact: bool = False,
) -> Tolerance:
    """The tolerance of values of these dtypes, of which the widest counts.

    Parameters
    ----------
    scale
        What a typical element is like.
    rtol, atol
        What the user has given, which holds for each element. With `rtol` alone the scale still
        counts, with `atol` alone there is no relative part.
    exact
        For copies, as parameters are: none, unless they were cast.
    """
    if atol is not None:
        return Tolerance(rtol or 0.0, atol)
    if rtol is not None:
        return Tolerance(rtol, rtol * scale)
    usual = max(_RTOL.get(dtype, 0.0) for dtype in dtypes)
    if exact and len(set(dtypes)) == 1:
        return EXACT
    return Tolerance(usual, usual * scale, _NOISE * usual * scale)


def scale_of(tensor: torch.Tensor) -> float:
    """The root of the mean square of the finite elements, but for a few that stick out."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    flat = tensor.detach().reshape(-1)
    wide = flat.dtype if flat.dtype in (torch.float64, torch.complex128) else torch.float32
    if tensor.is_complex():
        wide = torch.complex128
    size = float(torch.linalg.vector_norm(flat, dtype=wide))
    if not math.isfinite(size):
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        flat = flat[torch.isfinite(flat)].to(wide)
        size = float(torch.linalg.vector_norm(flat)) if flat.numel() else 0.0
    scale = size / math.sqrt(max(flat.numel(), 1))
    for _ in range(3):  # else a few huge elements, or those of a mask, would excuse all others
        rest = _without_huge(flat, scale)
        if rest is None:
            break
        flat = rest
        size = float(torch.linalg.vector_norm(flat, dtype=wide))
        scale = min(scale, size / math.sqrt(flat.numel()))
    return scale


def _without_huge(flat: torch.Tensor, scale: float) -> torch.Tensor | None:
    """The elements but for those that stick out, as of a mask of -1e9; None if there are none."""
    if flat.numel() < 2:
        return None
    most = float(torch.linalg.vector_norm(flat, math.inf))
    some = flat[:: max(flat.numel() // 4096, 1)].abs()
    some = some[some > 0].float()
    low = float(some.quantile(0.02)) if some.numel() else 0.0
    if most > _STICKS_OUT * scale:
        rest = flat[(flat != 0) & (flat.abs() <= _STICKS_OUT * scale)]
    elif most > _GAP * low > 0:
        size = flat.abs()
        rest = flat[(size > 0) & (size <= most / 10)]
        wide = torch.complex128 if flat.is_complex() else torch.float64
        typical = float(torch.linalg.vector_norm(rest, dtype=wide)) / math.sqrt(rest.numel() or 1)
        if most <= _GAP * typical:
            return None
    else:
        return None
    return rest if rest.numel() else None


def difference(local: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> Row:
    """Compare two tensors of one shape, a piece at a time.

    Returns
    -------
    dict
        ``max_abs``, ``over`` (elements beyond the tolerance, 0 if that is rounding), ``size``,
        ``rms`` (the root of the mean square of all errors, where some are beyond the tolerance),
        ``nan`` (elements that are NaN on both sides), and of the worst element ``place`` (flat),
        ``a`` (here) and ``b`` (reference).
    """
    one = local.reshape(-1)
    other = expected.to(one.device, non_blocking=False).reshape(-1)
    row: Row = {"max_abs": 0.0, "over": 0, "size": one.numel(), "nan": 0, "place": None, "rms": 0.0}
    far = 0
    with torch.no_grad():
        for start in range(0, one.numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            far += _add(row, start, one[chunk], other[chunk], tolerance)
        if row["over"]:
            row["rms"] = _rms(one, other)
            few = row["over"] <= max(_FEW * row["size"], 1) and not far
            if few and tolerance.noise and row["rms"] <= tolerance.noise:
                row["over"] = 0
    return row


def _rms(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of what two are apart, where neither is infinite or NaN."""
    total = 0.0
    for start in range(0, one.numel(), _CHUNK):
        a, b = one[start : start + _CHUNK], other[start : start + _CHUNK]
        gap = (a.to(_wide(a, b)) - b.to(_wide(a, b))).abs()
        total += float(gap.nan_to_num_(0.0, 0.0, 0.0).double().square_().sum())
    return math.sqrt(total / one.numel())


def _add(row: Row, start: int, one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> int:
    """Add a piece to a row; gives how many elements are far beyond the tolerance."""
    kind = _wide(one, other)
    a, b = one.to(kind), other.to(kind)
    gap = (a - b).abs_() if not a.is_complex() else (a - b).abs()
    largest = float(gap.max())
    if largest <= tolerance.atol and math.isfinite(largest):
        if largest <= row["max_abs"] and row["place"] is not None:
            return 0
        over = far = 0
    else:
        nan = torch.isnan(a) & torch.isnan(b)
        row["nan"] += int(nan.sum())
        same = (a == b) | nan
        gap = torch.where(same, 0.0, gap.to(torch.float64) if kind == torch.int64 else gap)
        gap = gap.nan_to_num_(nan=math.inf, posinf=math.inf)
        allowed = b.abs() * tolerance.rtol + tolerance.atol
        near = torch.isfinite(b) & (gap <= allowed)  # what is not finite has no neighbours
        over = int((~same & ~near).sum())
        far = int((~same & ~(torch.isfinite(b) & (gap <= _JUST * allowed))).sum()) if over else 0
        largest = float(gap.max())
    row["over"] += over
    if row["place"] is None or largest > row["max_abs"]:
        place = int(gap.argmax())
        row |= {"max_abs": largest, "place": start + place}
        row["a"], row["b"] = _number(one[place]), _number(other[place])
    return far


def _wide(one: torch.Tensor, other: torch.Tensor) -> torch.dtype:
    """A dtype in which both can be compared without losing digits."""
    if one.is_complex() or other.is_complex():
        return torch.complex128
    if not (one.is_floating_point() or other.is_floating_point()):
        return torch.int64  # float64 has not all of its numbers
    floats = {torch.float16, torch.bfloat16, torch.float32}
    return torch.float32 if one.dtype in floats and other.dtype in floats else torch.float64


def _number(element: torch.Tensor) -> Any:
    value = element.item()
    return str(value) if isinstance(value, complex) else value


# -- samples ---------------------------------------------------------------------------------------


def sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Elements of a tensor at the places that `sample_places` gives, as float64 on the CPU."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > most:
        flat = flat[sample_places(flat.numel(), most).to(flat.device)]
    kind = torch.complex128 if flat.is_complex() else torch.float64
    return flat.to("cpu", kind)


def sample_places(size: int, most: int) -> torch.Tensor:
    """Where samples are taken: layout evenly, each at a random place of its interval."""
    generator = torch.Generator().manual_seed(0)
    step = size / most
    jitter = torch.empty(most, dtype=torch.float64).uniform_(generator=generator)
    return ((torch.arange(most, dtype=torch.float64) + jitter) * step).long().clamp_(max=size - 1)
