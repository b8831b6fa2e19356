"""Finds out how values lie on the workers where nobody has said it. Pure.

Only what the records prove is claimed: shapes that differ in one dim, contents that are equal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .layout import Placement, Plan, coordinates, make_plan


@dataclass(frozen=True)
class AxisPattern:
    """Contents that are equal along some axes of a mesh, and distinct along the others."""

    equal: tuple[str, ...]
    distinct: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


def infer_plans(
    shapes: Mapping[int, Sequence[int]],
    classes: Mapping[int, str] | None,
    num_groups: int = 1,
    axes: Mapping[str, int] | None = None,
) -> tuple[Plan, ...]:
    """The layout of values that are equal on all workers, or whose shapes differ in just one dim.

    Parameters
    ----------
    shapes : mapping of rank to shape
        Of all ranks.
    classes : mapping of rank to letter, or None
        Which contents are equal, if known.
    num_groups : int
        Of more than one group each is looked at by itself.
    axes : mapping of name to size, optional
        Of a mesh over all ranks in order: shapes must then differ along one axis, and contents be
        equal along the others.

    Returns
    -------
    tuple of Plan
        None if nothing is proved; more than one only if there are groups.
    """
    ranks = sorted(shapes)
    if len(ranks) < 2:
        return ()
    if classes is not None and len({classes[rank] for rank in ranks}) == 1:
        return (make_plan(shapes, ranks, (Placement("replicate"),), (len(ranks),)),)
    dim = _uneven_dim([shapes[rank] for rank in ranks])
    if dim is None:
        return ()
    shard = Placement("shard", dim)
    sizes = [size for size in (axes or {}).values() if size > 1]
    if len(sizes) > 1 and math.prod(sizes) == len(ranks):
        uneven = [not _equal_along(dict(shapes), sizes, place) for place in range(len(sizes))]
        alike = [
            classes is not None and _equal_along(classes, sizes, place)
            for place in range(len(sizes))
        ]
        if sum(uneven) != 1 or not all(map(operator.or_, uneven, alike)):
            return ()
        placements = tuple(shard if cut else Placement("replicate") for cut in uneven)
        return (make_plan(shapes, ranks, placements, sizes),)
    size = len(ranks) // max(num_groups, 1)
    groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    if any(_uneven_dim([shapes[rank] for rank in group]) != dim for group in groups):
        return ()
    return tuple(make_plan(shapes, group, (shard,), (len(group),)) for group in groups)


def _uneven_dim(shapes: Sequence[Sequence[int]]) -> int | None:
    """The one dim in which the sizes differ."""
    if len({len(shape) for shape in shapes}) != 1:
        return None
    uneven = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    return uneven[0] if len(uneven) == 1 else None


def infer_axes(classes: Mapping[int, str], axes: Mapping[str, int]) -> AxisPattern | None:
    """Along which axes of a mesh contents are equal, if they are distinct along all others.

    Parameters
    ----------
    classes : mapping of rank to letter
    axes : mapping of name to size
        Of a mesh over all ranks in order; the last axis varies fastest.

    Examples
    --------
    >>> infer_axes({0: "A", 1: "B", 2: "A", 3: "B"}, {"dp": 2, "tp": 2})
    AxisPattern(equal=('dp',), distinct=('tp',), groups=((0, 2), (1, 3)))
    """
    sizes = list(axes.values())
    if len([size for size in sizes if size > 1]) < 2 or math.prod(sizes) != len(classes):
        return None
    equal = [
        name
        for place, name in enumerate(axes)
        if sizes[place] > 1 and _equal_along(classes, sizes, place)
    ]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(classes):
        where = coordinates(rank, sizes)
        rest = zip(axes, where, strict=True)
        groups.setdefault(tuple(at for name, at in rest if name not in equal), []).append(rank)
    if not equal or len({classes[ranks[0]] for ranks in groups.values()}) != len(groups):
        return None
    if len(groups) == 1:
        return None
    distinct = tuple(name for name in axes if name not in equal and axes[name] > 1)
    return AxisPattern(tuple(equal), distinct, tuple(map(tuple, groups.values())))


def _equal_along(values: Mapping[int, object], sizes: Sequence[int], axis: int) -> bool:
    step = math.prod(sizes[axis + 1 :])
    return all(
        values[rank] == values[rank - step] for rank in values if coordinates(rank, sizes)[axis] > 0
    )
