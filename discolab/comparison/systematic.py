"""What the tolerance of a coarse dtype hides: errors within it that rounding does not make.

On the controller. Rounding moves elements up and down: over many of them a value stays the
reference, times one. And it does the same on all workers that do the same: where they have agreed
bit for bit, a copy that is off from the others has another cause. Either is told with "perhaps".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..views.formats import format_number, format_workers
from .matcher import Matcher
from .measure import sample
from .results import Point
from .rounding import Noise

_COARSE = ("bfloat16", "float16")
_FEWEST = 16  # elements: of fewer two runs say too little of rounding
_SAMPLES = 4096  # elements of each value that are looked at
_TIMES = 8  # what rounding does to the factor of two runs
_PART = 0.5  # of the root mean square by which two runs differ: what is common to all elements
_EPSILONS = 2  # of the dtype: a factor that is nearer to one says nothing
_APART = 4  # epsilons: by so much a copy differs from others that were the same before


@dataclass(frozen=True, slots=True)
class _Off:
    """How a value is off: by rank its factor, less one; and how far copies are from each other."""

    factors: dict[int, float]
    apart: float
    odd: tuple[int, ...]


def systematic(
    matcher: Matcher, points: Sequence[Point], until: Point | None, noise: Noise | None
) -> tuple[int, Point, str] | None:
    """The first value that agrees and is off by what rounding does not make.

    Parameters
    ----------
    points
        Of forward. In backward each worker may have its own terms of what all have alike.
    until
        Where to stop.
    noise
        None: whether there may be one, without a look at what rounding does.

    Returns
    -------
    tuple or None
        Its place among the points, the point with the workers that are off, and how it is off.
    """
    some = [
        (number, p) for number, p in enumerate(points)
        if p.dtype in _COARSE and p.rows and not p.problem and p.size >= _FEWEST
        and not p.partial  # the sum is looked at where it is made
        and p.layout in {each.words for each in matcher.pairs[p.key].layouts}
    ]  # fmt: skip
    end = next((n for n, p in enumerate(points) if until is not None and p.key == until.key), None)
    if not some or matcher.rtol is not None or matcher.atol is not None:
        return None
    taken = matcher.workers.samples([p.theirs for _, p in some], _SAMPLES)
    offs = [_off(matcher, p, held) for (_, p), held in zip(some, taken, strict=True)]
    level = 0.0  # how far copies were from each other until now
    for place, ((number, point), off) in enumerate(zip(some, offs, strict=True)):
        if end is not None and number >= end:
            break
        epsilon = torch.finfo(getattr(torch, point.dtype)).eps
        later = [o.apart for (_, p), o in zip(some[place + 1 :], offs[place + 1 :], strict=True)
                 if _is_copy(p) and p.relative != point.relative][:1]  # fmt: skip
        lasts = not later or later[0] > 0
        if point.agrees and off.apart > max(_APART * epsilon, _TIMES * level) and lasts:
            words = (
                f"{format_workers(off.odd)} "
                f"{'is' if len(off.odd) == 1 else 'are'} off from the others, which were the same "
                "until there, by more than a rounding"
            )
            return number, replace(point, agrees=False, ranks=off.odd, unlike=True), words
        level = max(level, off.apart)
        if point.agrees and (found := _by_factor(matcher, point, off, noise, epsilon)):
            return number, *found
    return None


def _is_copy(point: Point) -> bool:
    return "Shard" not in point.layout


def _off(matcher: Matcher, point: Point, held: dict[int, torch.Tensor]) -> _Off:
    """What samples say of a value."""
    pair = matcher.pairs[point.key]
    held = {rank: part for rank, part in held.items() if rank in pair.held}
    layout = pair.layout_named(point.layout)
    whole = matcher.ours.value(point.key)
    factors = {}
    for rank, part in held.items():
        expected = sample(layout.part_of(whole, rank), _SAMPLES)
        if part.shape == expected.shape:
            factors[rank] = _factor(part, expected)
    if not _is_copy(point) or len(held) < 2 or len(_sizes(held)) > 1:
        return _Off(factors, 0.0, ())
    apart, odd = _apart(held, sample(whole, _SAMPLES))
    return _Off(factors, apart, odd)


def _sizes(held: dict[int, torch.Tensor]) -> set[torch.Size]:
    return {part.shape for part in held.values()}


def _factor(part: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much the factor of a value to the reference is not one; 0 if there is none."""
    size = float(expected.dot(expected))
    k = float(part.dot(expected)) / size - 1 if size > 0 else 0.0
    return k if math.isfinite(k) else 0.0


def _apart(held: dict[int, torch.Tensor], expected: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """How far copies are from each other, in typical elements, and which are off.

    Those that most have alike are right; where no more have one than another, the nearer ones.
    """
    groups: list[list[int]] = []
    for rank, part in held.items():
        group = next((g for g in groups if torch.equal(held[g[0]], part)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    if len(groups) < 2:
        return 0.0, ()

    def norm(off: torch.Tensor) -> float:
        return float(off.nan_to_num(0.0, 0.0, 0.0).norm())

    groups.sort(key=lambda g: (-len(g), norm(held[g[0]] - expected)))
    usual = held[groups[0][0]]
    apart = max(norm(held[g[0]] - usual) for g in groups[1:])
    size = norm(usual)
    odd = tuple(sorted(rank for group in groups[1:] for rank in group))
    return (apart / size if size > 0 else 0.0), odd


def _by_factor(
    matcher: Matcher, point: Point, off: _Off, noise: Noise | None, epsilon: float
) -> tuple[Point, str] | None:
    """A value that is a multiple of the reference, by more than rounding makes of two runs."""
    odd = [rank for rank, k in off.factors.items() if abs(k) > _EPSILONS * epsilon]
    if not odd or noise is None:
        return (point, "") if odd else None
    layout = matcher.pairs[point.key].layout_named(point.layout)
    found, most = [], 0.0
    for rank in odd:

        def part(value: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return sample(layout.part_of(value, rank), _SAMPLES)

        expected = part(matcher.ours.value(point.key))
        runs = [part(value) for value in noise.values(point.key)]
        size = float(expected.norm())
        gap = float((runs[0] - runs[1]).norm()) / size if size > 0 else math.inf
        usual = max(abs(_factor(run, expected)) for run in runs)
        least = max(_TIMES * usual, _PART * gap, _TIMES * gap / math.sqrt(expected.numel()))
        if abs(off.factors[rank]) > least:
            found.append(rank)
            most = max(most, usual)
    if not found:
        return None
    k = 1 + max((off.factors[rank] for rank in found), key=abs)
    words = (
        f"over all elements it is {format_number(round(k, 3))} times the reference, which rounding "
        f"moved by {format_number(round(most, 4))} in two runs of it"
    )
    return replace(point, agrees=False, ranks=tuple(found)), words
