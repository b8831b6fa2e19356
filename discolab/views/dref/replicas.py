"""Finds where values that should be equal on several workers differ most, without moving them.

Runs on the controller, in rounds of small worker functions. A value is cut in blocks; the workers
tell a digest and the range of each; blocks of which the digests differ are cut again, or their
values fetched once they are few. No worker sends more than some 64 KB of values, and no collective
runs. Where only a part was looked at the picture says so.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.errors import DiscoError
from ...runtime.failures import Failure
from ...runtime.registers import OWN
from ..facts.distances import distances
from ..facts.guard import FAILURES
from ..formats import format_number, format_workers
from ..parts import Column, Details, Part, Row, Stack, Table, Text
from .answers import answers_of
from .blocks import BLOCKS, Spans, cut_in, describe_blocks, values_of

_BUDGET = 64 * 1024  # bytes of values that a worker sends
_CUT_AGAIN = 8  # blocks that are cut further
_MOST_SHOWN = 5  # elements of one pair
_MOST_PAIRS = 3


def replica_parts(
    session: Any,
    ref: Any,
    classes: Mapping[int, object],
    patience: float,
    sets: Sequence[Sequence[int]] | None = None,
    path: str | None = None,
) -> list[Part]:
    """Show the largest differences between workers that should hold the same tensor.

    Parameters
    ----------
    session, ref
        The value, and whose it is.
    classes : mapping of rank to letter, or anything else that is equal if the contents are
        Which contents are equal, see `compare.content_classes`.
    patience : float
        Seconds to wait at most.
    sets : sequence of sequences of ranks, optional
        Which workers must agree. Without them the largest class is what the others should hold,
        if it has two members.
    path : str, optional
        The parameter of a module or the item of a container to look at, as a record names it.

    Returns
    -------
    list of Part
        Empty if nothing differs, or nothing can be said. Never raises.
    """
    try:
        pairs = pairs_to_compare(classes, sets)
        if not pairs:
            return []
        deadline = time.monotonic() + patience
        found = _Search(session, ref, pairs[:_MOST_PAIRS], deadline, path).run()
        parts = [part for pair in found for part in _pair_parts(*pair, path)]
        if parts and len(pairs) > _MOST_PAIRS:
            parts.append(Text(f"and {len(pairs) - _MOST_PAIRS} more that differ", "muted"))
        return parts
    except (DiscoError, *FAILURES):
        return []


def pairs_to_compare(
    classes: Mapping[int, object], sets: Sequence[Sequence[int]] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """A worker of the usual class, and those of one that is not: the first of them stands for all.

    Examples
    --------
    >>> pairs_to_compare({0: "A", 1: "A", 2: "B", 3: "C"})
    [(0, (2,)), (0, (3,))]
    """
    found = []
    for ranks in [sorted(classes)] if sets is None else sets:
        held = [rank for rank in ranks if rank in classes]
        counts = Counter(classes[rank] for rank in held)
        if len(counts) < 2 or (sets is None and len(counts) == len(held)):
            continue
        usual = counts.most_common(1)[0][0]
        first = next(rank for rank in held if classes[rank] == usual)
        for letter in dict.fromkeys(classes[rank] for rank in held if classes[rank] != usual):
            found.append((first, tuple(rank for rank in held if classes[rank] == letter)))
    return found


@dataclass(frozen=True)
class Difference:
    """What was found out about two workers.

    `largest` has (index, value of the first, value of the second, how far apart), the largest
    distance first; a value that is not finite on one of them only is endlessly far. `looked` counts
    the elements whose values were compared, `differ` those of them that are not equal; `whole`
    says that all others are known to be equal. `note` says why nothing was looked at.
    """

    largest: tuple[tuple[tuple[int, ...], Any, Any, float], ...] = ()
    looked: int = 0
    differ: int = 0
    whole: bool = False
    size: int = 0
    note: str = ""


class _Search:
    """Narrows down, for all pairs at once, where two workers differ; asks until `deadline`."""

    def __init__(
        self,
        session: Any,
        ref: Any,
        pairs: Sequence[tuple[int, tuple[int, ...]]],
        deadline: float,
        path: str | None,
    ) -> None:
        self._session, self._ref, self._deadline, self._path = session, ref, deadline, path
        self._pairs = pairs

    def run(self) -> Iterator[tuple[int, tuple[int, ...], Difference]]:
        for usual, odd in self._pairs:
            yield usual, odd, self._compare(usual, odd[0])

    def _compare(self, one: int, other: int) -> Difference:
        spans: Spans | None = None
        skipped = False
        while True:
            told = self._ask(describe_blocks, (one, other), spans)
            if isinstance(told, str):
                return Difference(note=told)
            (shape, dtype, mine), (its_shape, its_dtype, its) = told
            if (shape, dtype) != (its_shape, its_dtype):
                return Difference(note=f"{dtype}{shape} and {its_dtype}{its_shape}")
            size = math.prod(shape)
            spans = spans or cut_in(0, size, BLOCKS)
            apart = [
                (_distance(a, b), span)
                for a, b, span in zip(mine, its, spans, strict=True)
                if a[0] != b[0]
            ]
            most = _BUDGET // max(getattr(torch, dtype).itemsize, 4)
            total = sum(last - first for _, (first, last) in apart)
            if total <= most:
                break
            apart.sort(key=lambda block: -block[0])
            fits = most // max(last - first for _, (first, last) in apart)
            if fits >= _CUT_AGAIN:
                skipped, apart = True, apart[:fits]
                break
            skipped = skipped or len(apart) > _CUT_AGAIN
            wide = apart[:_CUT_AGAIN]
            pieces = BLOCKS // _CUT_AGAIN
            spans = [piece for _, (first, last) in wide for piece in cut_in(first, last, pieces)]
        looked = sorted(span for _, span in apart)
        if not looked:
            return Difference(whole=True, size=size)
        values = self._ask(values_of, (one, other), looked)
        if isinstance(values, str):
            return Difference(note=values)
        return _largest(values[0], values[1], looked, shape, whole=not skipped)

    def _ask(self, function: Any, ranks: tuple[int, int], spans: Spans | None) -> Any:
        """What both workers answer, in order; a string if one gives none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return "no time was left"
        ref = self._session.call_packed(function, self._ref, ranks, spans, self._path)
        ref.name = OWN
        answers = answers_of(ref, left, ranks)
        found = [answers.get(rank) for rank in ranks]
        for answer in found:
            if isinstance(answer, str | Failure):
                return answer.headline if isinstance(answer, Failure) else answer
        if any(answer is None for answer in found):
            return "a worker gave no answer in time"
        return found


def _distance(one: Sequence[Any], other: Sequence[Any]) -> float:
    """How far two blocks seem apart by their ranges and sums."""
    gaps = [abs(a - b) for a, b in zip(one[1:], other[1:], strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _largest(
    one: torch.Tensor, other: torch.Tensor, spans: Spans, shape: Sequence[int], *, whole: bool
) -> Difference:
    """The elements that are farthest apart, of those that were fetched."""
    same, _, gap = distances(one, other)
    gap[same] = 0
    places = torch.cat([torch.arange(first, last) for first, last in spans])
    differ = int((~same).sum())
    order = torch.argsort(gap, descending=True, stable=True)[: min(_MOST_SHOWN, differ)]
    largest = tuple(
        (
            place_of(int(places[k]), shape),
            one[k].item(),
            other[k].item(),
            float(gap[k]),
        )
        for k in order
    )
    return Difference(largest, one.numel(), differ, whole, math.prod(shape))


def place_of(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element that is the `number`-th in row-major order.

    Examples
    --------
    >>> place_of(7, [2, 5])
    (1, 2)
    """
    index = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        index.append(place)
    return tuple(reversed(index))


def _pair_parts(
    one: int, others: tuple[int, ...], found: Difference, path: str | None
) -> list[Part]:
    inside = "" if path is None else f" in {path}"
    who = f"{format_workers(others)} against worker {one}{inside}"
    if found.note:
        return [Text(f"{who}: differences not looked at: {found.note}", "muted")]
    if not found.largest:
        if not found.looked:
            return []
        return [Text(f"{who}: values equal, bits differ (as 0.0 and -0.0 do)", "muted")]
    rows = [
        Row(
            (
                Text(f"[{', '.join(map(str, index))}]"),
                *map(Text, pair_words(a, b)),
                Text(format_number(gap)),
            )
        )
        for index, a, b, gap in found.largest
    ]
    columns = (
        Column("index"),
        Column(f"worker {one}", "right"),
        Column(f"worker {others[0]}", "right"),
        Column("|a - b|", "right"),
    )
    part: Part = Table(columns, tuple(rows))
    more = found.differ - len(rows)
    if more > 0:
        part = Stack((part, Text(f"and {more:,} more", "muted")))
    return [Details(f"largest differences, {who}: {_counted(found)}", part)]


def _counted(found: Difference) -> str:
    """How many elements differ, and of how many that is known."""
    if found.whole:
        verb = "differs" if found.differ == 1 else "differ"
        return f"{found.differ:,} of {found.size:,} elements {verb}"
    return f"{found.differ:,} of the {found.looked:,} elements looked at, of {found.size:,}"


def pair_words(a: object, b: object) -> tuple[str, str]:
    """Write two values that differ with as many digits as it takes to tell them apart.

    Examples
    --------
    >>> pair_words(12.0, 12.000001), pair_words(3, 4)
    (('12', '12.000001'), ('3', '4'))
    """
    if isinstance(a, float) and isinstance(b, float):
        for digits in (5, 7, 9, 12):
            words = f"{a:.{digits}g}", f"{b:.{digits}g}"
            if words[0] != words[1] or a == b:
                return words
    return str(a), str(b)
