"""Finds where values that should be equal on several workers differ most, without moving them.

Runs on the controller, in rounds of small worker functions. A value is cut in blocks; the workers
tell a digest and the range of each; blocks of which the digests differ are cut again, or their
values fetched once they are few. No worker sends more than some 64 KB of values, and no collective
runs. Where only a part was looked at the picture says so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...runtime.dref import DRef
from ...runtime.errors import DiscoError
from ...runtime.failures import Failure
from ...runtime.functions import worker_function
from ...runtime.worker import current_worker
from ..facts.describe import DRAWING
from ..facts.distances import distances
from ..facts.guard import FAILURES, error_text, safe_repr
from ..facts.tensors import digest_of, is_dtensor, why_no_data
from ..formats import format_number, format_workers
from ..parts import Column, Details, Part, Row, Table, Text, VStack
from .ask import ask
from .children import differing_tensors
from .summary import ValueSummary

Spans: TypeAlias = list[tuple[int, int]]  # (first element, one past the last)

BLOCKS = 256  # that a tensor is cut in at first
_LARGEST_COPY = 256 * 2**20  # bytes of a tensor that is not contiguous
_BUDGET = 64 * 1024  # bytes of values that a worker sends
_CUT_AGAIN = 8  # blocks that are cut further
_MOST_SHOWN = 5  # elements of one pair
_MOST_PAIRS = 3
_MOST_LOOKED_INTO = 3  # parameters or items that differ


def difference_parts(ref: DRef, summary: ValueSummary, deadline: float) -> list[Part]:
    """Where values differ that should be equal: the value itself, or parameters and items of it.

    Parameters
    ----------
    ref
        Of a live session.
    summary
        What is known of its value.
    deadline
        On the clock of ``time.monotonic``; workers are not asked after it.
    """
    if summary.tensors and summary.classes is not None and not summary.disagree:
        patience = deadline - time.monotonic()
        return replica_parts(ref, summary.classes, patience, summary.must_agree)
    try:
        odd = differing_tensors(summary.good, summary.num_groups)
    except Exception:  # a view never raises
        return []
    return [
        part
        for name, keys, sets in odd[:_MOST_LOOKED_INTO]
        for part in replica_parts(ref, keys, deadline - time.monotonic(), sets, path=name)
    ]


def replica_parts(
    ref: DRef,
    classes: Mapping[int, object],
    patience: float,
    sets: Sequence[Sequence[int]] | None = None,
    path: str | None = None,
) -> list[Part]:
    """Show the largest differences between workers that should hold the same tensor.

    Parameters
    ----------
    ref
        The value.
    classes : mapping of rank to letter, or anything else that is equal if the contents are
        Which contents are equal, see `contents.content_classes`.
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
        search = _Search(ref, time.monotonic() + patience, path)
        parts = [
            part
            for usual, odd in pairs[:_MOST_PAIRS]
            for part in _pair_parts(usual, odd, search.compare(usual, odd[0]), path)
        ]
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
    pairs = []
    for ranks in [sorted(classes)] if sets is None else sets:
        known = [rank for rank in ranks if rank in classes]
        counts = Counter(classes[rank] for rank in known)
        if len(counts) < 2 or (sets is None and len(counts) == len(known)):
            continue
        usual = counts.most_common(1)[0][0]
        first = next(rank for rank in known if classes[rank] == usual)
        for letter in dict.fromkeys(classes[rank] for rank in known if classes[rank] != usual):
            pairs.append((first, tuple(rank for rank in known if classes[rank] == letter)))
    return pairs


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
    """Narrows down where two workers differ; asks until `deadline`."""

    def __init__(self, ref: DRef, deadline: float, path: str | None) -> None:
        self._ref, self._deadline, self._path = ref, deadline, path

    def compare(self, one: int, other: int) -> Difference:
        """The largest differences of two workers that are told to hold other contents."""
        spans: Spans | None = None
        skipped = False
        while True:
            told = self._ask(describe_blocks, (one, other), spans)
            if isinstance(told, str):
                return Difference(note=told)
            (shape, dtype, mine), (its_shape, its_dtype, its) = told
            if (shape, dtype) != (its_shape, its_dtype):
                return Difference(note=f"{its_dtype}{its_shape} and {dtype}{shape}")
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
        patience = self._deadline - time.monotonic()
        if patience <= 0:
            return "no time was left"
        answers = ask(self._ref, patience, function, ranks, spans, self._path, ranks=ranks)
        both = [answers.get(rank) for rank in ranks]
        for answer in both:
            if isinstance(answer, str | Failure):
                return answer.headline if isinstance(answer, Failure) else answer
        if any(answer is None for answer in both):
            return "a worker gave no answer in time"
        return both


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


# -- what was found, as parts ----------------------------------------------------------------------


def _pair_parts(
    one: int, others: tuple[int, ...], difference: Difference, path: str | None
) -> list[Part]:
    inside = "" if path is None else f" in {path}"
    who = f"{format_workers(others)} against worker {one}{inside}"
    if difference.note:
        return [Text(f"{who}: differences not looked at: {difference.note}", "muted")]
    if not difference.largest:
        if not difference.looked:
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
        for index, a, b, gap in difference.largest
    ]
    columns = (
        Column("index"),
        Column(f"worker {one}", "right"),
        Column(f"worker {others[0]}", "right"),
        Column("|a - b|", "right"),
    )
    part: Part = Table(columns, tuple(rows))
    more = difference.differ - len(rows)
    if more > 0:
        part = VStack((part, Text(f"and {more:,} more", "muted")))
    return [Details(f"largest differences, {who}: {_counted(difference)}", part)]


def _counted(difference: Difference) -> str:
    """How many elements differ, and of how many that is known."""
    if difference.whole:
        verb = "differs" if difference.differ == 1 else "differ"
        return f"{difference.differ:,} of {difference.size:,} elements {verb}"
    looked = f"the {difference.looked:,} elements looked at, of {difference.size:,}"
    return f"{difference.differ:,} of {looked}"


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


# -- on the workers: what can't be read is a string that says why ----------------------------------


def cut_in(first: int, last: int, count: int) -> Spans:
    """Cut a span in at most `count` equal ones, the last one maybe shorter.

    Examples
    --------
    >>> cut_in(0, 10, 4)
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    step = max(-(-(last - first) // count), 1)
    return [(start, min(start + step, last)) for start in range(first, last, step)]


@worker_function(DRAWING)
def describe_blocks(
    value: Any, ranks: Sequence[int], spans: Spans | None, path: str | None = None
) -> Any:
    """Digest and range of each block (a worker function); None on workers not in `ranks`.

    Returns
    -------
    tuple
        Shape, dtype, and ``[digest, lowest, highest, sum]`` of each block; with `spans` None of
        about 256 equal ones. A string says why there is none.
    """
    if current_worker().worker_id not in ranks:
        return None
    try:
        value = _at(value, path)
        flat = _flat(value)
        if isinstance(flat, str):
            return flat
        local = value._local_tensor if is_dtensor(value) else value
        spans = spans or cut_in(0, flat.numel(), BLOCKS)
        blocks = [_block(flat[first:last]) for first, last in spans]
        return list(local.shape), str(local.dtype).removeprefix("torch."), blocks
    except FAILURES as error:  # it must not count as a failure of the user's program
        return error_text(error)


@worker_function(DRAWING)
def values_of(value: Any, ranks: Sequence[int], spans: Spans, path: str | None = None) -> Any:
    """The values of some blocks in a row (a worker function); None on workers not in `ranks`."""
    if current_worker().worker_id not in ranks:
        return None
    try:
        flat = _flat(_at(value, path))
        if isinstance(flat, str):
            return flat
        values = torch.cat([flat[first:last] for first, last in spans]).cpu()
        return values.float() if values.is_floating_point() and values.itemsize < 4 else values
    except FAILURES as error:
        return error_text(error)


def _at(value: Any, path: str | None) -> Any:
    """The parameter or item of that name."""
    if path is None:
        return value
    if isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
    elif isinstance(value, dict):
        named = tuple((safe_repr(key, 60)[0], item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        keys = getattr(value, "_fields", itertools.count())
        named = tuple(zip(map(str, keys), value, strict=False))
    else:
        return getattr(value, path, None)
    return dict(named).get(path)


def _flat(value: Any) -> torch.Tensor | str:
    """The elements in row-major order, copied only if they do not lie so; or why there are none."""
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    local: torch.Tensor = value._local_tensor if is_dtensor(value) else value  # type: ignore[attr-defined]
    local = local.detach()
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        return "of a layout that is not read in blocks"
    if why := why_no_data(local):
        return why
    if not local.is_contiguous() and local.numel() * local.itemsize > _LARGEST_COPY:
        return "too large to be put in order"
    return local.resolve_conj().resolve_neg().reshape(-1)


def _block(block: torch.Tensor) -> list[Any]:
    if not block.numel() or block.is_complex() or block.itemsize < 1:
        return [digest_of(block), 0.0, 0.0, 0.0]
    try:
        wide = block.to(torch.float64) if block.numel() <= 2**16 else block.float()
        low, high = torch.aminmax(wide)
        return [digest_of(block), float(low), float(high), float(wide.sum())]
    except FAILURES:  # a dtype without arithmetic
        return [digest_of(block), 0.0, 0.0, 0.0]
