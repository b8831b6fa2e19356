"""What the numbers give away of why values differ, in words. Pure.

Each test below looks at the `Evidence`: elements of the workers' tensors, and the reference's at
the same places. It says something only where the numbers leave no other reading; what they prove
stands with each test. Where two causes give the same numbers, both are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..views.formats import format_number, format_workers

Tensors: TypeAlias = dict[int, torch.Tensor]
"""By rank."""

_UNEXPLAINED = 0.04  # of an error's square: so much a term that is its cause may leave to rounding


@dataclass(frozen=True)
class Evidence:
    """Samples of one value that differs.

    Attributes
    ----------
    local, expected
        By rank, flat and float64: what the worker holds, what it should hold.
    shapes
        Of the worker's whole tensors.
    whole
        Whether the samples are all elements.
    odd
        The ranks that differ.
    rtol, atol
        The tolerance.
    dim
        Along which the value is cut; None if it is not.
    replicated
        Whether all should hold the same.
    terms
        Values of the reference that may have been added or left out: what they are called, and for
        each rank their samples at the same places.
    reference
        The whole value if it is small, else None.
    summed_later
        Whether the next value that all should hold alike is alike on all, which a sum makes of
        terms; None: there is none.
    """

    local: Tensors
    expected: Tensors
    shapes: dict[int, tuple[int, ...]]
    whole: bool
    odd: tuple[int, ...]
    rtol: float
    atol: float
    dim: int | None
    replicated: bool
    terms: Sequence[tuple[str, Tensors]] = ()
    reference: torch.Tensor | None = None
    gradient: bool = False
    parameter: bool = False
    summed_later: bool | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.local)

    @property
    def count(self) -> int:
        return len(self.local)

    @property
    def alike(self) -> bool:
        """Whether all workers hold the same."""
        first, *others = self.local.values()
        return all(self.close(first, other) for other in others)

    def explains(self, off: torch.Tensor, term: torch.Tensor, slack: float) -> float:
        """What a term leaves of an error, as a part of it; infinite if that is beyond rounding."""
        rest = off - term
        size = float(off.square().sum())
        left = float(rest.square().sum())
        within = bool((rest.abs() <= slack * (self.atol + self.rtol * term.abs()) + 1e-12).all())
        if not size > 0 or not within or left > _UNEXPLAINED * size:
            return math.inf
        return left / size

    def close(self, a: torch.Tensor, b: torch.Tensor, slack: float = 2.0) -> bool:
        """Whether two are the same, nearly."""
        if a.shape != b.shape:
            return False
        near = (a - b).abs() <= slack * (self.atol + self.rtol * b.abs()) + 1e-12
        return bool((near | (a == b)).all())


def causes_of(evidence: Evidence) -> list[str]:
    """What is known of the cause, the strongest first; what follows from another is left out."""
    tests: list[Callable[[Evidence], Iterator[str]]] = [
        _non_finite, _swapped, _zero, _constant, _as_sum, _factor, _order,
        _cut_otherwise, _added, _factor_but, _shifted, _coarse,
    ]  # fmt: skip
    found: list[str] = []
    for test in tests:
        found += test(evidence)
        if found:
            break
    return found + list(_how_much(evidence))


def is_observation(words: str) -> bool:
    """Whether it is said how much differs, and not why."""
    return " places along dim " in words or words.startswith("one element of ")


def _non_finite(e: Evidence) -> Iterator[str]:
    """Says what is seen: NaN or infinite elements on one side only."""
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
    """The reference is the sum, or the mean, of what the workers hold.

    Certain where they hold different values: that these sum up to the reference by chance in every
    element can't be. What they hold alike is no term. That nothing sums the terms up is known only
    where the workers go on with different values; else the sum comes later, and what is wrong is
    what each of them has added before it.
    """
    sizes = {part.shape for part in e.local.values()}
    if not e.replicated or e.count < 2 or len(sizes) > 1 or e.alike:
        return
    stacked = torch.stack(list(e.local.values()))
    expected = e.expected[e.ranks[0]]
    groups = alike_groups(e.local, e.close)
    if len(groups) < e.count and min(map(len, groups)) > 1:
        yield from _within_groups(e, groups)
    elif e.close(stacked.sum(0), expected, 2.0 * e.count):
        if not e.summed_later:  # else their sum is off by little, and that is the difference
            yield missing_sum(e.gradient, e.parameter)
    elif len(e.odd) == e.count and e.close(stacked.mean(0), expected, 2.0):
        what = "the all-reduce of this gradient" if e.gradient and e.parameter else "an all-reduce"
        yield f"equals the reference once averaged over the workers: {what} is missing"
    elif len(e.odd) == e.count and e.close(stacked.amax(0), expected):
        yield (
            "equals the reference once the largest over the workers is taken: "
            'an all-reduce with op "max" is missing'
        )
    elif len(e.odd) == e.count:  # a worker that holds the reference holds no term of it
        off = stacked.sum(0) - expected
        rank = e.ranks[0]
        fits = [
            (e.explains(off, times * terms[rank], 4.0 * e.count), times, name)
            for name, terms in e.terms
            for times in (e.count - 1, e.count)  # the reference adds it there, or elsewhere
        ]
        left, times, name = min(fits, default=(math.inf, 0, ""))
        if not math.isfinite(left):
            return
        if e.summed_later is False:
            words = missing_sum(e.gradient, e.parameter)
            yield f"{words} (but for the {name}, which each worker has added)"
        elif e.summed_later:
            yield (
                f"is off by {times} × the {name} once it is summed: it is added on every worker "
                "before the sum, so it counts once for each of them"
            )
        else:
            yield (
                f"equals the reference once summed over the workers, but for the {name}: it is "
                "added on every worker, so a sum counts it once for each of them"
            )


def alike_groups(
    values: Tensors, close: Callable[[torch.Tensor, torch.Tensor], bool]
) -> list[list[int]]:
    """The workers that hold the same, for each value that some hold."""
    groups: list[list[int]] = []
    for rank, value in values.items():
        known = next((group for group in groups if close(value, values[group[0]])), None)
        if known is None:
            groups.append([rank])
        else:
            known.append(rank)
    return groups


def _within_groups(e: Evidence, groups: Sequence[Sequence[int]]) -> Iterator[str]:
    """Groups of workers hold the same each, and these values sum up to the reference.

    That is how a sum over a part of the workers ends, and how terms look of which there are copies.
    """
    stacked = torch.stack([e.local[group[0]] for group in groups])
    expected = e.expected[e.ranks[0]]
    if e.close(stacked.sum(0), expected, 2.0 * e.count):
        done = "add up to"
    elif e.close(stacked.mean(0), expected):
        done = "average to"
    else:
        return
    told = ", ".join(f"{format_workers(group)} another" for group in groups[1:4])
    rest = " and so on" if len(groups) > 4 else ""
    yield (
        f"{format_workers(groups[0])} hold one value, {told}{rest}, and these {done} the "
        "reference: an all-reduce between the groups is missing, or it was over the wrong group"
    )


def missing_sum(gradient: bool, parameter: bool, known_before: bool = True) -> str:
    """What to say of a value that the workers hold terms of.

    `known_before`: whether what it comes from was compared, and is whole.
    """
    words = "equals the reference once summed over the workers: "
    if gradient and parameter and not known_before:
        return words + "an all-reduce is missing, of this gradient or before it in backward"
    if gradient and parameter:
        return words + "the all-reduce of this gradient is missing"
    if gradient:
        return words + "an all-reduce is missing in backward (copy_to_region, f of Megatron)"
    return words + "an all-reduce is missing"


def _factor(e: Evidence) -> Iterator[str]:
    """All, or some, hold a multiple. Certain where every element has the same factor."""
    nothing = {rank: torch.zeros_like(e.expected[rank]) for rank in e.ranks}
    factor = _common_factor(e, nothing)
    if factor is not None and not _any_factor(e, factor):
        yield _factor_words(e, factor, "")


def _factor_but(e: Evidence) -> Iterator[str]:
    """The same but for a value that is added afterwards, as a bias behind a sum.

    Certain where the factor is the number of workers or one over it, in every element.
    """
    for name, terms in e.terms:
        factor = _common_factor(e, terms)
        if factor is not None and _by_count(factor, e.count) and not _any_factor(e, factor):
            yield _factor_words(e, factor, f" (but for the {name}, added afterwards)")
            return


def _any_factor(e: Evidence, factor: float) -> bool:
    """Whether a factor says nothing: of one number any other is a multiple."""
    lone = max((int((e.expected[r] != 0).sum()) for r in e.odd), default=0) < 2
    return lone and not any(abs(factor - k) < 1e-2 * abs(k) for k in (e.count, 1 / e.count, -1))


def _by_count(factor: float, n: int) -> bool:
    """Whether a factor is the number of workers, or one over it."""
    return n > 1 and any(abs(factor - k) < 1e-2 * k for k in (n, 1 / n))


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
            f"summed over the workers where each one had all of it already, or not divided by {n}"
            if e.gradient
            else "reduced twice, each worker had all of it when it was summed, or it is not "
            f"divided by {n}"
        )
        return f"{who}is {n} times the reference{but}: {why}"
    if n > 1 and abs(k - 1 / n) < 1e-2 / n:
        return f"{who}is the reference / {n}{but}: averaged where a sum belongs, or divided twice"
    if abs(k + 1) < 1e-2:
        return f"{who}has the opposite sign{but}"
    return f"{who}is {format_number(k)} times the reference{but}{_root(k, n)}"


def _root(factor: float, n: int) -> str:
    """A word on factors that a scale by a size that was cut may have made; others may, too."""
    for number, words in ((math.sqrt(n), f"√{n}"), (1 / math.sqrt(n), f"1/√{n}"), (n * n, f"{n}²")):
        if n > 1 and abs(factor - number) < 1e-2 * number:
            return (
                f" (perhaps {words} for {n} workers: a scale by the size of a part, or the whole)"
            )
    return ""


def _multiple(e: Evidence, a: torch.Tensor, b: torch.Tensor) -> float | None:
    """k where ``a = k * b``; None if there is none."""
    size = float(b.dot(b)) if not b.is_complex() else 0.0
    if not size or not math.isfinite(size):
        return None
    k = float(a.dot(b)) / size
    if not math.isfinite(k) or abs(k) < 1e-6:
        return None
    off = a - b
    whole = float(off.square().sum())
    if float((a - k * b).square().sum()) > _UNEXPLAINED * whole:
        return None
    return k if e.close(a / k, b, 4.0) else None


def _added(e: Evidence) -> Iterator[str]:
    """A known value was added, too often or not at all.

    Certain where the error is a multiple of that value in every element, and nothing of it is left
    but rounding. Of several values that would do, the one that leaves least is named.
    """
    fits: list[tuple[float, str, float]] = []
    for name, terms in e.terms:
        found: list[float] = []
        left = 0.0
        for rank in e.odd:
            term = terms.get(rank)
            if term is None or term.shape != e.local[rank].shape:
                break
            size = float(term.dot(term))
            off = e.local[rank] - e.expected[rank]
            k = float(off.dot(term)) / size if size > 0 and math.isfinite(size) else 0.0
            k = k if math.isfinite(k) else 0.0
            near: float = round(k)
            if not near or abs(k - near) > 2e-2:  # rounding decides on which side of ½ one is
                near = round(k * e.count) / e.count
            if not near or abs(k - near) > 2e-2 or not e.close(off, near * term, 8.0):
                # the allowance is for rounding of the sums, so as for the values themselves
                allowed = 8 * (e.atol + e.rtol * e.expected[rank].abs())
                if not near or not bool(((off - near * term).abs() <= allowed).all()):
                    break
            rest, whole = (off - near * term).square().sum(), off.square().sum()
            if float(rest) > _UNEXPLAINED * float(whole):
                break
            left = max(left, float(rest / whole))
            found.append(near)
        if found and len(found) == len(e.odd) and len({round(k, 6) for k in found}) == 1:
            fits.append((left, name, found[0]))
    if fits:
        _, name, times = min(fits)
        yield _added_words(name, times, e)


def _added_words(name: str, k: float, e: Evidence) -> str:
    n = e.count
    who = "" if len(e.odd) == n else f"on {format_workers(e.odd)} "
    if n == 2 and k == 1:
        return f"{who}is off by 1 × the {name}: it is added twice, or by each worker before the sum"
    if n > 2 and k == n - 1:
        twice = "" if name.startswith("bias ") else f" (or it is summed twice, or times {n})"
        return (
            f"{who}is off by {n - 1} × the {name}: it is added on every worker before the sum"
            f"{twice}, so it counts once for each of them"
        )
    times = "" if name.startswith("bias ") else ", or times another factor"
    if k == -1:
        return f"{who}is off by -1 × the {name}: it is not added{times}"
    if k == 1:
        return f"{who}is off by 1 × the {name}: it is added twice{times}"
    return f"{who}is off by {format_number(float(k))} × the {name}"


def _zero(e: Evidence) -> Iterator[str]:
    empty = [r for r in e.odd if not e.local[r].any()]
    if empty:
        yield f"is all zeros on {format_workers(empty)}"


def _constant(e: Evidence) -> Iterator[str]:
    """One number in every element of a parameter, as it is made and before it is loaded."""
    if not e.parameter or e.gradient or not e.whole:
        return
    same = {
        rank: float(e.local[rank][0])
        for rank in e.odd
        if len(e.local[rank]) > 1
        and bool((e.local[rank] == e.local[rank][0]).all())
        and not bool((e.expected[rank] == e.expected[rank][0]).all())
    }
    if same and len(same) == len(e.odd) and len(set(same.values())) == 1:
        number = format_number(next(iter(same.values())))
        yield f"is {number} in every element on {format_workers(e.odd)}: it was not loaded there?"


def _coarse(e: Evidence) -> Iterator[str]:
    """The reference, rounded to a coarser dtype.

    Certain where each element is one of that dtype, next to the reference's: of other numbers with
    few digits, as zeros and ones, nothing follows.
    """
    for dtype in (torch.bfloat16, torch.float16):
        epsilon = torch.finfo(dtype).eps
        odd = [
            r for r in e.odd
            if bool((e.local[r].to(dtype).double() == e.local[r]).all())
            and not bool((e.expected[r].to(dtype).double() == e.expected[r]).all())
            and bool(((e.local[r] - e.expected[r]).abs() <= epsilon * e.expected[r].abs()).all())
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


# -- the right elements in the wrong places --------------------------------------------------------


def _swapped(e: Evidence) -> Iterator[str]:
    """Another worker's part.

    Certain where every element is the other's, and the two parts are not the same.
    """
    if e.replicated:
        return
    theirs: dict[int, int] = {}
    for rank in e.odd:
        others = [
            other for other in e.ranks
            if other != rank and e.close(e.local[rank], e.expected[other])
            and not e.close(e.expected[rank], e.expected[other])
        ]  # fmt: skip
        if others:
            theirs[rank] = others[0]
    if not theirs:
        return
    groups: dict[int, list[int]] = {}
    for rank, other in theirs.items():
        groups.setdefault(other, []).append(rank)
    told = [
        f"{format_workers(ranks)} hold{'s' * (len(ranks) == 1)} worker {other}'s part"
        for other, ranks in groups.items()
    ]
    if len(told) > 4:
        told = [*told[:4], f"and so on for {len(theirs)} workers"]
    words = "; ".join(told)
    if len(theirs) == e.count > 2 and len(set(theirs.values())) == e.count:
        words += ": the parts are in another order"
    yield words


def _order(e: Evidence) -> Iterator[str]:
    """A whole value whose pieces along a dim are in another order, as after an all-gather.

    Certain where each piece is another one of the reference's, on all workers that differ.
    """
    if not (e.replicated and e.whole and e.reference is not None and e.count > 1):
        return
    rank = e.odd[0]
    shape, n = e.shapes[rank], e.count
    if tuple(e.reference.shape) != shape:
        return
    local, whole = e.local[rank].reshape(shape), e.reference
    for dim, size in enumerate(shape):
        if size % n:
            continue
        pieces, theirs = whole.chunk(n, dim), local.chunk(n, dim)
        places = [
            next((j for j, piece in enumerate(pieces) if e.close(one, piece)), -1) for one in theirs
        ]
        if not all(e.close(e.local[rank], e.local[other]) for other in e.odd[1:]):
            return
        if sorted(places) == list(range(n)) and places != list(range(n)):
            told = ", ".join(map(str, places))
            what, why = "parts", "gathered in a wrong order"
            if size == n:  # then a part is one element
                what, why = "elements", f"{why}, or {_rearranged(places)}"
            yield f"its {what} along dim {dim} are in the order {told}: {why}"
            return


def _rearranged(places: Sequence[int]) -> str:
    """What may have put single elements in this order, but for a gather."""
    n = len(places)
    steps = {(place - at) % n for at, place in enumerate(places)}
    if len(steps) == 1 and steps <= {1, n - 1}:
        return "shifted by one place"
    return "flipped" if list(places) == list(range(n))[::-1] else "permuted"


def _cut_otherwise(e: Evidence) -> Iterator[str]:
    """A shard of the right shape that was cut in another way.

    Certain where each worker that differs holds exactly what that cut gives it.
    """
    if e.replicated or e.reference is None or not e.whole:
        return
    words = ""
    for rank in e.odd:
        told = _cut_words(e, rank, e.reference)
        if not told:
            return
        words = words or told
    if words:
        who = "" if len(e.odd) == e.count else f"{format_workers(e.odd)}: "
        yield f"{who}{words}"


def _cut_words(e: Evidence, rank: int, whole: torch.Tensor) -> str:
    shape, n, place = e.shapes[rank], e.count, e.ranks.index(rank)
    local = e.local[rank].reshape(shape)
    if whole.dim() == 2:
        for dim in (0, 1):
            if whole.shape[1 - dim] % n == 0:
                part = whole.t().chunk(n, dim)[place]
                if part.shape == local.shape and e.close(local, part):
                    return f"the shard was split along dim {1 - dim} and is transposed"
    for dim in range(whole.dim()):
        size = whole.shape[dim]
        if size % n:
            continue
        part = whole.chunk(n, dim)[place]
        if part.shape == local.shape and e.close(local, part):
            return f"it is the shard along dim {dim}"
        block = size // n // 2
        for width in sorted({1, *(b for b in _divisors(size // n) if b <= block)}, reverse=True):
            part = _interleaved(whole, dim, n, place, width)
            if part.shape == local.shape and e.close(local, part):
                step = f"every {n}th element" if width == 1 else f"every {n}th block of {width}"
                return f"it holds {step} along dim {dim}, not one piece: heads are interleaved"
        for count in (2, 3):
            if size % (count * n):
                continue
            pieces = [piece.chunk(n, dim)[place] for piece in whole.chunk(count, dim)]
            if e.close(local, torch.cat(pieces, dim)):
                return f"it is split as {count} fused parts along dim {dim}, not as one"
    return ""


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _interleaved(whole: torch.Tensor, dim: int, n: int, place: int, width: int) -> torch.Tensor:
    size = whole.shape[dim]
    index = torch.arange(size).reshape(size // width, width)[place::n].reshape(-1)
    return whole.index_select(dim, index)


def _shifted(e: Evidence) -> Iterator[str]:
    """Rows that are off by one.

    Certain where all rows but the last are the next ones, on each worker that differs.
    """
    if not e.whole or e.reference is None:
        return

    def is_shifted(rank: int, dim: int, step: int) -> bool:
        shape = e.shapes[rank]
        size = shape[dim]
        local, expected = e.local[rank].reshape(shape), e.expected[rank].reshape(shape)
        a = local.narrow(dim, max(-step, 0), size - 1)
        return size > 2 and e.close(a, expected.narrow(dim, max(step, 0), size - 1))

    for dim in range(len(e.shapes[e.odd[0]])):
        for step, words in ((1, "later"), (-1, "earlier")):
            if all(is_shifted(rank, dim, step) for rank in e.odd):
                yield f"its elements along dim {dim} are those of one place {words}: off by one"
                return
