"""Gradients of data-parallel programs, which are averages where the reference has the whole.

Each worker has a part of the batch. DDP and FSDP average the gradients of parameters; and a loss
that is a mean is one over the worker's part. Where the gradients bear that out, the reference's are
multiplied by what follows from it and compared again; a gradient that does not fit then differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

from ...layouts.layout import ShardLayout
from .blame import ends_unsummed
from .judging import Pair
from .results import Point
from .sides import Side


def count_of_parts(
    cuts: Iterable[ShardLayout], points: Sequence[Point], pairs: Mapping[str, Pair]
) -> int:
    """Over how many workers the batch is spread: as the inputs, or along dim 0 of the result."""
    found = [_parts(layout, None) for layout in cuts]
    for point in points:
        if point.kind == "result" and not point.problem and point.layout:
            layouts = [s for s in pairs[point.key].layouts if s.words == point.layout]
            found += [_parts(layout, 0) for layout in layouts]
    return max(found, default=1)


def _parts(layout: ShardLayout, only: int | None) -> int:
    """The parts that a layout makes, of a certain dim only or of any."""
    cuts = zip(layout.dims, layout.workers.sizes, strict=True)
    return prod(size for dim, size in cuts if dim is not None and only in (None, dim))


def judged_averages(
    judged: Callable[[], list[Point]], ours: Side, parts: int, num_workers: int
) -> tuple[list[Point], list[str]]:
    """Judge gradients as they are, then as averages where that explains what differs.

    Parameters
    ----------
    judged
        Compares all gradients with what the reference's side then holds.
    parts
        Over how many workers the batch is spread.

    Returns
    -------
    tuple
        The points, and what to tell of it.
    """
    points = judged()
    if parts < 2 or not any(map(_differs, points)):
        return points, []
    who = f"workers 0-{num_workers - 1}" if parts == num_workers else f"groups of {parts} workers"
    if ours.loss is not None:  # else backward starts from the same gradients on both sides
        with _times(ours, parts, of_parameters=False) as keep:
            other = judged()
            if _first_fits(points, other):
                keep()
                note = (
                    f"the loss is a mean over each worker's part of the batch: gradients between "
                    f"the modules are {parts} × the reference's, and were compared with these"
                )
                return other, [note]
    with _times(ours, 1 / parts, of_parameters=True) as keep:
        other = judged()
        if _most_fit(points, other):
            keep()
            note = (
                f"parameter gradients are averaged over {who}, as DDP and FSDP do: compared with "
                f"the reference / {parts}"
            )
            return other, [note]
    return judged(), []


@contextmanager
def _times(ours: Side, factor: float, of_parameters: bool) -> Iterator[Callable[[], None]]:
    """Multiply gradients of the reference; they are put back unless the function is called."""
    entries = [e for e in ours.tape.entries.values() if e.gradient.value is not None]
    parameters = {id(e.gradient) for e in entries if e.kind == "parameter"}  # a note may be one
    found = {
        id(e.gradient): e.gradient
        for e in entries
        if (id(e.gradient) in parameters) is of_parameters
    }
    kept: list[bool] = []
    gradients = list(found.values())
    values = [gradient.value for gradient in gradients]
    try:
        for gradient, value in zip(gradients, values, strict=True):
            assert value is not None
            gradient.value = value * factor
        yield lambda: kept.append(True)
    finally:
        if not kept:
            for gradient, value in zip(gradients, values, strict=True):
                gradient.value = value


def _differs(point: Point) -> bool:
    return not point.problem and (not point.agrees or ends_unsummed(point))


def _first_fits(before: Sequence[Point], after: Sequence[Point]) -> bool:
    """Whether the gradient nearest the loss that fits one way only fits the new way.

    Later ones may be wrong for another reason.
    """
    for one, other in zip(before, after, strict=True):
        if one.kind != "parameter" and _differs(one) != _differs(other):
            return _differs(one)
    return False


def _most_fit(before: Sequence[Point], after: Sequence[Point]) -> bool:
    """Whether more parameters' gradients fit the new way only than the old way only."""
    gained = 0
    for one, other in zip(before, after, strict=True):
        if one.kind == "parameter":
            gained += int(_differs(one)) - int(_differs(other))
    return gained > 0
