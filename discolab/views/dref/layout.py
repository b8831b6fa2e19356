"""Works out how shards make up a logical tensor, and draws it as a `Grid`.

Placements are those of torch.distributed.tensor (Shard, Replicate, Partial), read by their public
methods so that the module need not be imported. Pure.

A mesh axis is one level of cutting the workers: ``mesh_shape=(2, 4)`` has two, the last one
running fastest with the rank. A dim is a dimension of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..formats import format_shape
from ..parts import Grid, Tile

Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """What one mesh axis does to the tensor."""

    kind: Literal["shard", "replicate", "partial"]
    dim: int = 0
    op: str = ""

    def __str__(self) -> str:
        detail = {"shard": self.dim, "replicate": "", "partial": self.op}[self.kind]
        return f"{self.kind.capitalize()}({detail})"


@dataclass(frozen=True)
class Plan:
    """How the local tensors of `ranks` make up one logical tensor.

    `keys[rank][dim]` is the mesh position that selects the slice of that dim; `spans[dim][key]`
    is the slice as (start, size); `replicas` are the sets of ranks that must hold the same values.
    """

    logical: tuple[int, ...]
    placements: tuple[Placement, ...]
    keys: Mapping[int, tuple[Key, ...]]
    spans: tuple[Mapping[Key, tuple[int, int]], ...]
    replicas: tuple[tuple[int, ...], ...]

    @property
    def words(self) -> str:
        """The placements in torch's words, such as ``Shard(0)``."""
        return ", ".join(map(str, self.placements))

    @property
    def sharded(self) -> bool:
        """Whether some mesh axis cuts the tensor."""
        return any(place.kind == "shard" for place in self.placements)

    @property
    def partial(self) -> bool:
        """Whether some mesh axis holds terms of a reduction."""
        return any(place.kind == "partial" for place in self.placements)


def read_placements(placements: Any, ndim: int) -> tuple[Placement, ...]:
    """Translate torch's placements; negative dims count from the end.

    Raises
    ------
    ValueError
        For a placement of a kind that has no drawing, or a dim out of range.
    """
    if not isinstance(placements, list | tuple):
        placements = (placements,)
    words = [
        (type(place).__name__, getattr(place, "dim", getattr(place, "reduce_op", "")))
        for place in placements
    ]
    return placements_of(words, ndim)


def placements_of(words: Sequence[Sequence[Any]], ndim: int) -> tuple[Placement, ...]:
    """Placements from their names and details: ``["Shard", 0]``, ``["Partial", "sum"]``.

    Raises
    ------
    ValueError
        As `read_placements`.
    """
    found = []
    for kind, detail in words:
        if kind == "Shard":
            dim = int(detail)
            if not -ndim <= dim < ndim:
                raise ValueError(f"Shard({dim}) of a tensor with {ndim} dims")
            found.append(Placement("shard", dim % ndim))
        elif kind == "Replicate":
            found.append(Placement("replicate"))
        elif kind == "Partial":
            found.append(Placement("partial", op=str(detail)))
        else:
            raise ValueError(f"no drawing for {kind}")
    return tuple(found)


def make_plan(
    shapes: Mapping[int, Sequence[int]],
    ranks: Sequence[int],
    placements: tuple[Placement, ...],
    mesh_shape: Sequence[int],
) -> Plan:
    """Work out the logical tensor from the shapes that the workers hold.

    Parameters
    ----------
    shapes : mapping of rank to shape
        Every rank of `ranks` must be there.
    ranks : sequence of int
        The workers of the mesh in row-major order.
    placements : tuple of Placement
        One per mesh axis.
    mesh_shape : sequence of int

    Raises
    ------
    ValueError
        If the shapes do not fit the placements, or the mesh does not fit the workers.
    """
    if math.prod(mesh_shape) != len(ranks) or len(mesh_shape) != len(placements):
        raise ValueError(f"{len(placements)} placements, mesh {format_shape(list(mesh_shape))}")
    ndim = len(shapes[ranks[0]])
    axes = [
        [axis for axis, place in enumerate(placements) if place == Placement("shard", dim)]
        for dim in range(ndim)
    ]
    partial = [axis for axis, place in enumerate(placements) if place.kind == "partial"]
    keys: dict[int, tuple[Key, ...]] = {}
    sizes: list[dict[Key, int]] = [{} for _ in range(ndim)]
    replicas: dict[object, list[int]] = {}
    for number, rank in enumerate(ranks):
        place = coordinates(number, mesh_shape)
        keys[rank] = tuple(tuple(place[axis] for axis in axes[dim]) for dim in range(ndim))
        replicas.setdefault((keys[rank], *(place[axis] for axis in partial)), []).append(rank)
        if len(shapes[rank]) != ndim:
            raise ValueError("workers hold tensors of different numbers of dims")
        for dim, size in enumerate(shapes[rank]):
            if sizes[dim].setdefault(keys[rank][dim], size) != size:
                raise ValueError(f"worker {rank} holds {format_shape(list(shapes[rank]))}")
    spans = tuple(_spans(column) for column in sizes)
    logical = tuple(sum(column.values()) for column in sizes)
    return Plan(logical, placements, keys, spans, tuple(map(tuple, replicas.values())))


def coordinates(number: int, mesh_shape: Sequence[int]) -> Key:
    """Where a worker is in a mesh, by its number in row-major order."""
    place: list[int] = []
    for size in reversed(mesh_shape):
        number, position = divmod(number, size)
        place.insert(0, position)
    return tuple(place)


def _spans(sizes: Mapping[Key, int]) -> dict[Key, tuple[int, int]]:
    spans, start = {}, 0
    for key in sorted(sizes):
        spans[key] = (start, sizes[key])
        start += sizes[key]
    return spans


def draw_plan(plan: Plan, caption: str) -> Grid | None:
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


def drawn_dims(plan: Plan) -> list[int]:
    """The one or two dims that a drawing of the plan shows, in order."""
    cut_dims = sorted({place.dim for place in plan.placements if place.kind == "shard"})
    rest = [dim for dim in reversed(range(len(plan.logical))) if dim not in cut_dims]
    return sorted([*cut_dims, *rest][:2])


def _edges(plan: Plan, dim: int) -> dict[Key, int]:
    return {key: size for key, (_, size) in plan.spans[dim].items() if size}


def _tile(plan: Plan, dims: Sequence[int], wanted: tuple[Key, ...]) -> Tile:
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


def layout_caption(plan: Plan, suffix: str = "") -> str:
    """Say in a line what the drawing shows; `suffix` goes behind the placements."""
    words = f"{plan.words}{suffix} of {format_shape(list(plan.logical))}"
    for place in plan.placements:
        if place.kind == "partial":
            words += f"; the value is their {place.op}"
    return words
