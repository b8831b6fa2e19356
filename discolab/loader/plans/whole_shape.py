"""The shape of a whole parameter from those of its shards. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...runtime.errors import ArgumentError
from ..catalog import Shape
from .layouts import Layout, Workers, cut


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
        shape = shards[_rank(there, workers)]
        sizes.append(0 if shape is None else shape[dim])
    if layout.heads and len(layout.heads) == 1 and layout.heads[0] < len(sizes):
        return sizes[0] * layout.heads[0]  # each head is there several times
    return sum(sizes)


def _rank(place: Sequence[int], workers: Workers) -> int:
    rank = 0
    for index, size in zip(place, workers.sizes, strict=True):
        rank = rank * size + index
    return rank
