"""Joins shards to the whole that they are of. Pure.

`whole_shape` is strict, for checkpoints: shards must be just those that the layout makes.
`join_shards` takes shards of any sizes, for views: what lies on the workers is a fact, and its
`ShardMap` says which slice of the whole each worker holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..runtime.errors import ArgumentError
from .layout import Layout, Shape, ShardLayout, Workers, cut

Key: TypeAlias = tuple[int, ...]


class Misfit(ValueError):
    """Shards that a layout can't have made; the text says which and why."""


def whole_shape(layout: Layout, shards: Sequence[Shape | None], workers: Workers) -> Shape:
    """The shape that `layout` cuts into these.

    Parameters
    ----------
    shards
        Shapes by rank; None: that worker holds nothing of it.

    Returns
    -------
    tuple of int
        Padding included, where there is any: what it was before can't be seen.

    Raises
    ------
    Misfit
        If there is none.
    """
    holders = [rank for rank, shape in enumerate(shards) if shape is not None]
    if not holders:
        raise Misfit("no worker holds any of it")
    first = shards[holders[0]]
    assert first is not None
    for rank in holders:
        if len(shards[rank] or ()) != len(first):
            raise Misfit(f"the shard of worker {rank} has {len(shards[rank] or ())} dimensions")
    axes = len(workers.sizes)
    if len(layout.dims) > axes:
        raise Misfit(f"it has placements for {len(layout.dims)} mesh axes, and there are {axes}")
    dims = (None,) * (axes - len(layout.dims)) + layout.dims
    whole = list(first)
    for dim in {dim for dim in dims if dim is not None}:
        if not -len(first) <= dim < len(first):
            raise Misfit(f"the shards have {len(first)} dimensions")
        size = _along(layout, dim, dims, holders[0], shards, workers)
        whole[dim % len(first)] = size
    found = tuple(whole)
    check_shards(layout, found, shards, workers)
    return found


def check_shards(
    layout: Layout, shape: Shape, shards: Sequence[Shape | None], workers: Workers
) -> None:
    """Whether `layout` makes these shards of a parameter.

    Raises
    ------
    Misfit
        If it makes others.
    """
    for rank, given in enumerate(shards):
        try:
            made = cut(layout, shape, workers, rank)
        except ArgumentError as exc:
            raise Misfit(str(exc)) from None
        expected = None if made is None else made.shape
        if expected != given:
            raise Misfit(
                f"worker {rank} has {given or 'nothing'}; of {shape} it would have "
                f"{expected or 'nothing'}"
            )


def _along(
    layout: Layout,
    dim: int,
    dims: Sequence[int | None],
    rank: int,
    shards: Sequence[Shape | None],
    workers: Workers,
) -> int:
    """The size of a dimension that is cut, seen from one worker that holds some of it."""
    if len(layout.segments) > 1:
        return sum(layout.segments)
    place = workers.coordinate(rank)
    cutting = [axis for axis, cut_dim in enumerate(dims) if cut_dim == dim]
    sizes = []
    for picks in itertools.product(*(range(workers.sizes[axis]) for axis in cutting)):
        there = list(place)
        for axis, index in zip(cutting, picks, strict=True):
            there[axis] = index
        shape = shards[workers.rank(there)]
        sizes.append(0 if shape is None else shape[dim])
    if layout.heads and len(layout.heads) == 1 and layout.heads[0] < len(sizes):
        return sizes[0] * layout.heads[0]  # each head is there several times
    return sum(sizes)


@dataclass(frozen=True)
class ShardMap:
    """How the tensors that `ranks` hold make up one logical tensor.

    `keys[rank][dim]` is the mesh position that selects the slice of that dim; `spans[dim][key]`
    is the slice as (start, size); `replicas` are the sets of ranks that must hold the same values.
    """

    logical: Shape
    layout: ShardLayout
    keys: Mapping[int, tuple[Key, ...]]
    spans: tuple[Mapping[Key, tuple[int, int]], ...]
    replicas: tuple[tuple[int, ...], ...]

    @property
    def words(self) -> str:
        """The placements in torch's words, such as ``Shard(0)``."""
        return self.layout.words

    @property
    def sharded(self) -> bool:
        """Whether some mesh axis cuts the tensor."""
        return self.layout.layout.cuts

    @property
    def partial(self) -> bool:
        """Whether some mesh axis holds terms of a reduction."""
        return self.layout.is_partial


def join_shards(
    shapes: Mapping[int, Sequence[int]],
    ranks: Sequence[int],
    layout: Layout,
    mesh_shape: Sequence[int],
) -> ShardMap:
    """Work out the logical tensor from the shapes that the workers hold.

    Parameters
    ----------
    shapes : mapping of rank to shape
        Every rank of `ranks` must be there.
    ranks : sequence of int
        The workers of the mesh in row-major order.
    layout : Layout
        With a dim, none of them negative, or None for each axis of the mesh.
    mesh_shape : sequence of int

    Raises
    ------
    ValueError
        If the shapes do not fit the layout, or the mesh does not fit the workers.
    """
    if math.prod(mesh_shape) != len(ranks) or len(mesh_shape) != len(layout.dims):
        raise ValueError(f"{len(layout.dims)} placements, mesh {list(mesh_shape)}")
    placed = ShardLayout(layout, Workers(tuple(mesh_shape)))
    ndim = len(shapes[ranks[0]])
    axes = [[axis for axis, cut in enumerate(layout.dims) if cut == dim] for dim in range(ndim)]
    partial = [axis for axis, op in enumerate(layout.partial) if op]
    keys: dict[int, tuple[Key, ...]] = {}
    sizes: list[dict[Key, int]] = [{} for _ in range(ndim)]
    replicas: dict[object, list[int]] = {}
    for number, rank in enumerate(ranks):
        place = placed.workers.coordinate(number)
        keys[rank] = tuple(tuple(place[axis] for axis in axes[dim]) for dim in range(ndim))
        replicas.setdefault((keys[rank], *(place[axis] for axis in partial)), []).append(rank)
        if len(shapes[rank]) != ndim:
            raise ValueError("workers hold tensors of different numbers of dims")
        for dim, size in enumerate(shapes[rank]):
            if sizes[dim].setdefault(keys[rank][dim], size) != size:
                raise ValueError(f"worker {rank} holds {list(shapes[rank])}")
    spans = tuple(_spans(column) for column in sizes)
    logical = tuple(sum(column.values()) for column in sizes)
    return ShardMap(logical, placed, keys, spans, tuple(map(tuple, replicas.values())))


def _spans(sizes: Mapping[Key, int]) -> dict[Key, tuple[int, int]]:
    spans, start = {}, 0
    for key in sorted(sizes):
        spans[key] = (start, sizes[key])
        start += sizes[key]
    return spans
