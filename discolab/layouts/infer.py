"""Finds out how values lie on the workers where nobody has said it. Pure.

There are two questions. A view knows what the workers hold and not the whole: `infer_maps` and
`infer_axes` claim only what the records prove, by shapes that differ in one dim and by contents
that are equal. A comparison knows the whole from its reference: `infer_layouts` lists all layouts
that the shapes allow, for the numbers to decide.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from .join import ShardMap, join_shards
from .layout import REPLICATE, Cut, Layout, Shape, ShardLayout, Workers

_MOST_SEGMENTS = 3  # fused parts that are looked for: gate and up; q, k and v


# -- the whole is known ----------------------------------------------------------------------------


def infer_layouts(
    whole: Shape, shapes: Mapping[int, Shape], meshes: Sequence[Workers]
) -> list[ShardLayout]:
    """The layouts that the shapes on the workers allow, the likeliest first; none is partial.

    Parameters
    ----------
    whole
        The shape of the logical tensor.
    shapes : mapping of rank to shape
    meshes
        To be tried, the likeliest first.
    """
    return list(_infer_layouts(whole, tuple(sorted(shapes.items())), tuple(meshes)))


@lru_cache(maxsize=4096)
def _infer_layouts(
    whole: Shape, shapes: tuple[tuple[int, Shape], ...], meshes: tuple[Workers, ...]
) -> tuple[ShardLayout, ...]:
    held = dict(shapes)
    if any(len(local) != len(whole) for local in held.values()):
        return ()
    if all(local == whole for local in held.values()):
        return (ShardLayout(Layout((None,) * len(meshes[0].sizes)), meshes[0]),)
    uneven = [d for d in range(len(whole)) if any(s[d] != whole[d] for s in held.values())]
    layouts: dict[tuple[Cut | None, ...], ShardLayout] = {}
    for workers in meshes:
        for dims in itertools.product((None, *uneven), repeat=len(workers.sizes)):
            cutting = [dim for dim in dims if dim is not None]
            pads = {0, *(size for size in workers.sizes if len(cutting) == 1)}
            for pad in sorted(pads):
                layout = ShardLayout(Layout(dims, pad_to=pad), workers)
                if cutting and layout.fits(whole, held):
                    cuts = tuple(layout.cut(whole, rank) for rank in held)
                    layouts.setdefault(cuts, layout)
    return tuple(layouts.values())


def fused_layouts(
    layout: ShardLayout, whole: Shape, shapes: Mapping[int, Shape]
) -> list[ShardLayout]:
    """As `layout`, for a dimension that is made of several equal parts, each cut by itself."""
    plain = layout.layout
    if plain.segments or plain.heads or len([d for d in plain.dims if d is not None]) != 1:
        return []
    fused = [
        replace(layout, layout=replace(plain, segments=(count,), pad_to=0))
        for count in range(_MOST_SEGMENTS, 1, -1)
    ]
    return [each for each in fused if each.fits(whole, shapes)]


def copies_on(layouts: Sequence[ShardLayout], meshes: Sequence[Workers]) -> list[ShardLayout]:
    """These, and for copies on all workers the same on the other meshes."""
    first = layouts[0]
    if first.layout.cuts or first.is_partial or first.source != "inferred":
        return list(layouts)
    return [ShardLayout(Layout((None,) * len(mesh.sizes)), mesh) for mesh in meshes]


def partial_layouts(layout: ShardLayout) -> list[ShardLayout]:
    """The sums that a layout may stand for: along each axis that cuts nothing, and along all."""
    if layout.is_partial:
        return [layout]
    dims, sizes = layout.dims, layout.workers.sizes
    free = [axis for axis, dim in enumerate(dims) if dim is None and sizes[axis] > 1]
    choices = [[axis] for axis in reversed(free)] + ([free] if len(free) > 1 else [])
    return [
        replace(
            layout,
            layout=replace(
                layout.layout,
                dims=dims,
                partial=tuple("sum" if axis in chosen else "" for axis in range(len(dims))),
            ),
        )
        for chosen in choices
    ]


# -- only shards are known -------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisPattern:
    """Contents that are equal along some axes of a mesh, and distinct along the others."""

    equal: tuple[str, ...]
    distinct: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


def infer_maps(
    shapes: Mapping[int, Sequence[int]],
    classes: Mapping[int, str] | None,
    num_groups: int = 1,
    axes: Mapping[str, int] | None = None,
) -> tuple[ShardMap, ...]:
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
    tuple of ShardMap
        None if nothing is proved; more than one only if there are groups.
    """
    ranks = sorted(shapes)
    if len(ranks) < 2:
        return ()
    if classes is not None and len({classes[rank] for rank in ranks}) == 1:
        return (join_shards(shapes, ranks, REPLICATE, (len(ranks),)),)
    dim = _uneven_dim([shapes[rank] for rank in ranks])
    if dim is None:
        return ()
    sizes = [size for size in (axes or {}).values() if size > 1]
    if len(sizes) > 1 and math.prod(sizes) == len(ranks):
        uneven = [not _equal_along(dict(shapes), sizes, place) for place in range(len(sizes))]
        alike = [
            classes is not None and _equal_along(classes, sizes, place)
            for place in range(len(sizes))
        ]
        if sum(uneven) != 1 or not all(map(operator.or_, uneven, alike)):
            return ()
        layout = Layout(tuple(dim if cut else None for cut in uneven))
        return (join_shards(shapes, ranks, layout, sizes),)
    size = len(ranks) // max(num_groups, 1)
    groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    if any(_uneven_dim([shapes[rank] for rank in group]) != dim for group in groups):
        return ()
    return tuple(join_shards(shapes, group, Layout((dim,)), (len(group),)) for group in groups)


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
    workers = Workers(tuple(sizes))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(classes):
        where = workers.coordinate(rank)
        rest = zip(axes, where, strict=True)
        groups.setdefault(tuple(at for name, at in rest if name not in equal), []).append(rank)
    if not equal or len({classes[ranks[0]] for ranks in groups.values()}) != len(groups):
        return None
    if len(groups) == 1:
        return None
    distinct = tuple(name for name in axes if name not in equal and axes[name] > 1)
    return AxisPattern(tuple(equal), distinct, tuple(map(tuple, groups.values())))


def _equal_along(values: Mapping[int, object], sizes: Sequence[int], axis: int) -> bool:
    workers = Workers(tuple(sizes))
    step = workers.span(axis + 1)
    return all(
        values[rank] == values[rank - step] for rank in values if workers.coordinate(rank)[axis] > 0
    )
