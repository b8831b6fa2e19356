"""What the numbers give away of why values differ, in words. Pure.

Each test below looks at samples: elements of the workers' tensors and the reference's at the same
places. It says something only if the numbers bear it out to within the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from ...views.formats import format_number, format_workers
from . import arrangement
from .evidence import Evidence, Tensors


def causes_of(evidence: Evidence) -> list[str]:
    """What is known of the cause, the strongest first; what follows from another is left out."""
    tests: list[Callable[[Evidence], Iterator[str]]] = [
        _non_finite, arrangement.swapped, _zero, _as_sum, _factor, arrangement.order,
        arrangement.cut_otherwise, _added, arrangement.shifted, _coarse,
    ]  # fmt: skip
    found: list[str] = []
    for test in tests:
        found += test(evidence)
        if found:
            break
    return found + list(_how_much(evidence))


def _non_finite(e: Evidence) -> Iterator[str]:
    odd = [r for r in e.odd if e.local[r].shape == e.expected[r].shape]
    here = {r: ~torch.isfinite(e.local[r]) for r in odd}
    there = {r: ~torch.isfinite(e.expected[r]) for r in odd}
    if bad := [r for r in odd if bool((here[r] & ~there[r]).any())]:
        kind = "NaN" if any(bool(torch.isnan(e.local[r]).any()) for r in bad) else "infinite"
        rest = "none" if not any(bool(there[r].any()) for r in bad) else "finite ones there"
        yield f"{format_workers(bad)} {_hold(bad)} {kind} elements, the reference has {rest}"
    elif bad := [r for r in odd if bool((there[r] & ~here[r]).any())]:
        kind = "NaN" if any(bool(torch.isnan(e.expected[r]).any()) for r in bad) else "infinite"
        who = f"{format_workers(bad)} {_hold(bad)}"
        yield f"the reference holds {kind} elements where {who} finite ones"
    elif bad := [r for r in odd if bool((here[r] & (e.local[r] != e.expected[r])).any())]:
        yield f"infinite and NaN elements of {format_workers(bad)} are others than the reference's"


def _hold(ranks: Sequence[int]) -> str:
    return "holds" if len(set(ranks)) == 1 else "hold"


def _as_sum(e: Evidence) -> Iterator[str]:
    """The reference is the sum, or the mean, of what workers hold alike in shape."""
    if not e.replicated or e.count < 2:
        return
    stacked = torch.stack(list(e.local.values()))
    expected = e.expected[e.ranks[0]]
    alike = e.close(stacked[0], stacked[-1]) and e.close(stacked[0], stacked[1])
    if alike and e.gradient and e.parameter:
        return  # as after an average: these are no terms
    if e.close(stacked.sum(0), expected, 2.0 * e.count):
        yield missing_sum(e.gradient, e.parameter)
    elif e.close(stacked.mean(0), expected, 2.0):
        what = "the all-reduce of this gradient" if e.gradient and e.parameter else "an all-reduce"
        yield f"equals the reference once averaged over the workers: {what} is missing"
    else:
        off = stacked.sum(0) - expected
        for name, terms in e.terms:
            term = terms[e.ranks[0]]
            if term.any() and e.close(off, (e.count - 1) * term, 4.0 * e.count):
                words = missing_sum(e.gradient, e.parameter)
                yield f"{words} (but for the {name}, which each worker has added)"
                return


def missing_sum(gradient: bool, parameter: bool) -> str:
    """What to say of a value that the workers hold terms of."""
    words = "equals the reference once summed over the workers: "
    if gradient and parameter:
        return words + "the all-reduce of this gradient is missing"
    if gradient:
        return words + "an all-reduce is missing in backward (copy_to_region, f of Megatron)"
    return words + "an all-reduce is missing"


def _factor(e: Evidence) -> Iterator[str]:
    """All, or some, hold a multiple; or they do but for a bias, added afterwards."""
    nothing: Tensors = {rank: torch.zeros_like(e.expected[rank]) for rank in e.ranks}
    biases = [(name, terms) for name, terms in e.terms if name.startswith("bias ")]
    for name, terms in [("", nothing), *biases]:
        factor = _common_factor(e, terms)
        if factor is not None and not _any_factor(e, factor):
            but = f" (but for the {name}, added afterwards)" if name else ""
            yield _factor_words(e, factor, but)
            return


def _any_factor(e: Evidence, factor: float) -> bool:
    """Whether a factor says nothing: of one number any other is a multiple."""
    lone = max((int((e.expected[r] != 0).sum()) for r in e.odd), default=0) < 2
    return lone and not any(abs(factor - k) < 1e-2 * abs(k) for k in (e.count, 1 / e.count, -1))


def _common_factor(e: Evidence, terms: Tensors) -> float | None:
    found = [_multiple(e, e.local[r] - terms[r], e.expected[r] - terms[r]) for r in e.odd]
    known = [k for k in found if k is not None and abs(k - 1) > 1e-3]
    if not known or len(known) < len(found):
        return None
    return known[0] if all(abs(k - known[0]) <= 1e-3 * abs(known[0]) for k in known) else None


def _factor_words(e: Evidence, k: float, but: str) -> str:
    n = e.count
    who = "" if len(e.odd) == n else f"on {format_workers(e.odd)} "
    if e.parameter and not e.gradient:  # nothing has been summed yet
        return f"{who}is {format_number(k)} times the reference"
    if n > 1 and abs(k - n) < 1e-2 * n:
        why = (
            "summed over the workers where each one had all of it already"
            if e.gradient
            else "reduced twice, or each worker had all of it when it was summed"
        )
        return f"{who}is {n} times the reference{but}: {why}"
    if n > 1 and abs(k - 1 / n) < 1e-2 / n:
        return f"{who}is the reference / {n}{but}: averaged where a sum belongs, or divided twice"
    if abs(k + 1) < 1e-2:
        return f"{who}has the opposite sign{but}"
    return f"{who}is {format_number(k)} times the reference{but}{_root(k, n)}"


def _root(factor: float, n: int) -> str:
    """A word on factors that come from a scale by a size that was cut."""
    for number, words in ((math.sqrt(n), f"√{n}"), (1 / math.sqrt(n), f"1/√{n}"), (n * n, f"{n}²")):
        if n > 1 and abs(factor - number) < 1e-2 * number:
            return f", {words} for {n} workers: a scale by the size of a part, or of the whole?"
    return ""


def _multiple(e: Evidence, a: torch.Tensor, b: torch.Tensor) -> float | None:
    """k where ``a = k * b``; None if there is none."""
    size = float(b.dot(b)) if not b.is_complex() else 0.0
    if not size or not math.isfinite(size):
        return None
    k = float(a.dot(b)) / size
    if not math.isfinite(k) or abs(k) < 1e-6:
        return None
    return k if e.close(a / k, b, 4.0) else None


def _added(e: Evidence) -> Iterator[str]:
    """A known value was added, too often or not at all."""
    for name, terms in e.terms:
        found: list[float] = []
        for rank in e.odd:
            term = terms.get(rank)
            if term is None or term.shape != e.local[rank].shape:
                break
            size = float(term.dot(term))
            off = e.local[rank] - e.expected[rank]
            k = float(off.dot(term)) / size if size > 0 and math.isfinite(size) else 0.0
            k = k if math.isfinite(k) else 0.0
            near = round(k) if abs(k) > 0.5 else round(k * e.count) / e.count
            if not near or abs(k - near) > 2e-2 or not e.close(off, near * term, 8.0):
                # the allowance is for rounding of the sums, so as for the values themselves
                allowed = 8 * (e.atol + e.rtol * e.expected[rank].abs())
                if not near or not bool(((off - near * term).abs() <= allowed).all()):
                    break
            found.append(near)
        if len(found) < len(e.odd) or len({round(k, 6) for k in found}) > 1:
            continue
        yield _added_words(name, found[0], e)
        return


def _added_words(name: str, k: float, e: Evidence) -> str:
    n = e.count
    who = "" if len(e.odd) == n else f"on {format_workers(e.odd)} "
    if (n > 2 and k == n - 1) or (n == 2 and k == 1):
        return (
            f"{who}is off by {n - 1} × the {name}: it is added on every worker before the sum, "
            "so it counts once for each of them"
        )
    if k == -1:
        return f"{who}is off by -1 × the {name}: it is not added"
    if k == 1:
        return f"{who}is off by 1 × the {name}: it is added twice"
    return f"{who}is off by {format_number(float(k))} × the {name}"


def _zero(e: Evidence) -> Iterator[str]:
    empty = [r for r in e.odd if not e.local[r].any()]
    if empty:
        yield f"is all zeros on {format_workers(empty)}"


def _coarse(e: Evidence) -> Iterator[str]:
    """Numbers that have only the digits of a coarser dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        odd = [
            r for r in e.odd
            if bool((e.local[r].to(dtype).double() == e.local[r]).all())
            and not bool((e.expected[r].to(dtype).double() == e.expected[r]).all())
        ]  # fmt: skip
        if odd:
            name = str(dtype).removeprefix("torch.")
            yield f"{format_workers(odd)} {_hold(odd)} numbers of {name} precision"
            return


def _how_much(e: Evidence) -> Iterator[str]:
    """Where the elements that differ lie, if that is few of them or few workers."""
    if not e.whole:
        return
    for rank in e.odd[:1]:
        over = _over(e, rank)
        count, size = int(over.sum()), over.numel()
        if not count:
            return
        alike = all(torch.equal(over, _over(e, other)) for other in e.odd[1:])
        same = "" if alike else f" of worker {rank}"
        if count == 1 and size > 1:
            yield f"one element of {size:,}{same} differs"
            return
        for dim, extent in enumerate(e.shapes[rank]):
            rows = _rows_over(over.reshape(e.shapes[rank]), dim)
            if 0 < len(rows) <= extent // 2:
                at = ", ".join(map(str, rows[:6])) + (", …" if len(rows) > 6 else "")
                yield f"{len(rows)} of {extent} places along dim {dim}{same} differ: {at}"
                return


def _over(e: Evidence, rank: int) -> torch.Tensor:
    local, expected = e.local[rank], e.expected[rank]
    near = (local - expected).abs() <= e.atol + e.rtol * expected.abs()
    return ~((near & torch.isfinite(expected)) | (local == expected))


def _rows_over(over: torch.Tensor, dim: int) -> list[int]:
    others = [d for d in range(over.dim()) if d != dim]
    found = over.any(dim=others) if others else over
    return [int(i) for i in found.nonzero().flatten()]
