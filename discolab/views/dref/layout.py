"""Draws how shards make up a logical tensor, as a `Grid`. Pure.

A mesh axis is one level of cutting the workers: a mesh of (2, 4) has two, the last one running
fastest with the rank. A dim is a dimension of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...layouts.join import Key, ShardMap
from ..formats import format_shape
from ..parts import Grid, Tile


def draw_plan(plan: ShardMap, caption: str) -> Grid | None:
    """Draw a plan; None if there is no extent to draw (no dims, or no elements).

    Of more than two dims the sharded ones are drawn, then the last ones.
    """
    ndim = len(plan.logical)
    if not ndim or 0 in plan.logical:
        return None
    dims = drawn_dims(plan)
    if ndim > 2:
        caption += f"; dims {dims[0]} and {dims[1]} drawn"
    columns = _edges(plan, dims[-1])
    if ndim == 1:
        bar = tuple(_tile(plan, dims, (key,)) for key in columns)
        return Grid(caption, (0,), tuple(columns.values()), (bar,), plan.partial)
    rows = _edges(plan, dims[0])
    tiles = tuple(tuple(_tile(plan, dims, (row, column)) for column in columns) for row in rows)
    return Grid(caption, tuple(rows.values()), tuple(columns.values()), tiles, plan.partial)


def drawn_dims(plan: ShardMap) -> list[int]:
    """The one or two dims that a drawing of the plan shows, in order."""
    cut_dims = sorted({dim for dim in plan.layout.dims if dim is not None})
    rest = [dim for dim in reversed(range(len(plan.logical))) if dim not in cut_dims]
    return sorted([*cut_dims, *rest][:2])


def _edges(plan: ShardMap, dim: int) -> dict[Key, int]:
    return {key: size for key, (_, size) in plan.spans[dim].items() if size}


def _tile(plan: ShardMap, dims: Sequence[int], wanted: tuple[Key, ...]) -> Tile:
    owners = tuple(
        rank for rank, keys in plan.keys.items() if tuple(keys[dim] for dim in dims) == wanted
    )
    chosen = dict(zip(dims, wanted, strict=True))
    words = []
    for dim in range(len(plan.logical)):
        if not chosen.get(dim):
            words.append(":")
        else:
            start, size = plan.spans[dim][chosen[dim]]
            words.append(f"{start}:{start + size}")
    return Tile(f"[{', '.join(words)}]", owners)


def layout_caption(plan: ShardMap, suffix: str = "") -> str:
    """Say in a line what the drawing shows; `suffix` goes behind the placements."""
    words = f"{plan.words}{suffix} of {format_shape(list(plan.logical))}"
    for op in filter(None, plan.layout.partial):
        words += f"; the value is their {op}"
    return words
