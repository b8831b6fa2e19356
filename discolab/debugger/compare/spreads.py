"""How a value of the reference lies over the workers. Pure.

A `Spread` is a layout of the loader (shards, copies, fused parts) over a mesh of the workers, and
along which axes of the mesh the workers hold terms of a sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from ...loader.plans.layout_text import parse_layout
from ...loader.plans.layouts import Cut, Layout, Workers, cut
from ...runtime.errors import ArgumentError

Shape: TypeAlias = tuple[int, ...]
_MOST_SEGMENTS = 3  # fused parts that are looked for: gate and up; q, k and v


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the parts of a value lie.

    Attributes
    ----------
    layout
        What is cut along the axes of the mesh.
    sizes
        Of the axes of the mesh, over all workers; the last one runs fastest with the rank.
    partial
        For each axis the operation that makes the value of its terms, or "".
    source
        ``given``, ``DTensor`` or ``inferred``.
    """

    layout: Layout
    sizes: tuple[int, ...]
    partial: tuple[str, ...] = ()
    source: str = "inferred"

    @property
    def sums(self) -> bool:
        """Whether the value is the sum (or mean) of what workers hold."""
        return any(self.partial)

    @property
    def words(self) -> str:
        """In torch's words where it has one: ``Shard(1)``."""
        layout = self.layout
        extra = [f"segments={list(layout.segments)}" if len(layout.segments) > 1 else ""]
        extra = [f"segments={layout.segments[0]}"] if len(layout.segments) == 1 else extra
        extra += [f"heads={list(layout.heads)}"] if layout.heads else []
        extra += [f"pad_to={layout.pad_to}"] if layout.pad_to else []
        more = ", ".join(["", *filter(None, extra)])
        dims = (None,) * (len(self.sizes) - len(layout.dims)) + layout.dims
        partial = self.partial or ("",) * len(self.sizes)
        words = [
            f"Partial({op})" if op else "Replicate()" if dim is None else f"Shard({dim}{more})"
            for dim, op in zip(dims, partial, strict=True)
        ]
        return ", ".join(words)

    def cut(self, shape: Shape, rank: int) -> Cut | None:
        """What a worker holds of a value of that shape.

        Raises
        ------
        ArgumentError
            If the layout does not fit the shape.
        """
        return _cut(self.layout, shape, self.sizes, rank)

    def fits(self, shape: Shape, shapes: Mapping[int, Shape]) -> bool:
        """Whether workers with values of these shapes may hold one of `shape` this way."""
        try:
            cuts = {rank: self.cut(shape, rank) for rank in shapes}
        except ArgumentError:
            return False
        return all(found is not None and found.shape == shapes[r] for r, found in cuts.items())

    def teams(self, present: Sequence[int]) -> list[tuple[int, ...]]:
        """The workers whose terms make one value, for each such value."""
        workers = Workers(self.sizes)
        teams: dict[tuple[int, ...], list[int]] = {}
        for rank in present:
            place = zip(workers.coordinate(rank), self.partial, strict=True)
            teams.setdefault(tuple(at for at, op in place if not op), []).append(rank)
        return [tuple(team) for team in teams.values()]

    def told(self) -> tuple[Any, ...]:
        """What a worker needs to know of it, as plain values."""
        layout = self.layout
        return layout.dims, layout.segments, layout.heads, layout.pad_to, self.sizes


@lru_cache(maxsize=16384)
def _cut(layout: Layout, shape: Shape, sizes: tuple[int, ...], rank: int) -> Cut | None:
    return cut(layout, shape, Workers(sizes), rank)


def of_told(told: Sequence[Any]) -> Spread:
    """What `Spread.told` has told, on a worker."""
    dims, segments, heads, pad_to, sizes = told
    layout = Layout(tuple(dims), tuple(segments), tuple(heads), pad_to)
    return Spread(layout, tuple(sizes))


def part_of(tensor: torch.Tensor, spread: Spread, rank: int) -> torch.Tensor:
    """What worker `rank` should hold of a tensor: a view if it lies in one piece."""
    found = spread.cut(tuple(tensor.shape), rank)
    assert found is not None
    if found.shape == tuple(tensor.shape) and len(found.boxes) <= 1:
        return tensor
    pieces = [
        (box, tensor[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))])
        for box in found.boxes
    ]
    if len(pieces) == 1 and pieces[0][0].shape == found.shape:
        return pieces[0][1]
    made = tensor.new_zeros(found.shape)
    for box, piece in pieces:
        made[tuple(slice(a, a + n) for a, n in zip(box.at, box.shape, strict=True))] = piece
    return made


def filling(shape: Shape, spread: Spread, rank: int) -> torch.Tensor | None:
    """Where a worker's part comes from nowhere, since the dimension is filled up; None: nowhere."""
    found = spread.cut(shape, rank)
    if found is None or not found.padded:
        return None
    filled = torch.ones(found.shape, dtype=torch.bool)
    for box in found.boxes:
        filled[tuple(slice(a, a + n) for a, n in zip(box.at, box.shape, strict=True))] = False
    return filled


def infer(shape: Shape, shapes: Mapping[int, Shape], meshes: Sequence[Shape]) -> list[Spread]:
    """The layouts that the shapes on the workers allow, the likeliest first; of sums none."""
    return list(_infer(shape, tuple(sorted(shapes.items())), tuple(meshes)))


@lru_cache(maxsize=4096)
def _infer(
    shape: Shape, shapes: tuple[tuple[int, Shape], ...], meshes: tuple[Shape, ...]
) -> tuple[Spread, ...]:
    held = dict(shapes)
    if any(len(local) != len(shape) for local in held.values()):
        return ()
    if all(local == shape for local in held.values()):
        return (Spread(Layout((None,) * len(meshes[0])), meshes[0]),)
    uneven = [d for d in range(len(shape)) if any(s[d] != shape[d] for s in held.values())]
    found: dict[Any, Spread] = {}
    for sizes in meshes:
        for dims in itertools.product((None, *uneven), repeat=len(sizes)):
            cutting = [dim for dim in dims if dim is not None]
            pads = {0, *(size for size in sizes if len(cutting) == 1)}
            for pad in sorted(pads):
                spread = Spread(Layout(dims, pad_to=pad), sizes)
                if cutting and spread.fits(shape, held):
                    same = tuple(spread.cut(shape, rank) for rank in held)
                    found.setdefault(same, spread)
    return tuple(found.values())


def fused(spread: Spread, shape: Shape, shapes: Mapping[int, Shape]) -> list[Spread]:
    """As `spread`, for a dimension that is made of several equal parts, each cut by itself."""
    layout = spread.layout
    if layout.segments or layout.heads or len([d for d in layout.dims if d is not None]) != 1:
        return []
    found = [
        replace(spread, layout=replace(layout, segments=(count,), pad_to=0))
        for count in range(_MOST_SEGMENTS, 1, -1)
    ]
    return [one for one in found if one.fits(shape, shapes)]


def read_layout(given: Any, meshes: Sequence[Shape]) -> Spread:
    """A layout that the user has given: placements of torch, or a layout of the loader.

    Raises
    ------
    ArgumentError
        If it is none.
    """
    each = list(given) if isinstance(given, list | tuple) else [given]
    ops = ["" if (op := _sum_of(one)) is None else op for one in each]
    fitting = [sizes for sizes in meshes if len(sizes) == len(each)] or [meshes[0]]
    sizes = fitting[0]
    if len(each) > len(sizes):
        raise ArgumentError(
            f"compare: layout {given!r} has {len(each)} placements, and the workers are in a mesh "
            f"of {len(sizes)}: make one with sess.mesh(dp=2, tp=2)"
        )
    partial = ("",) * (len(sizes) - len(each)) + tuple(ops)
    if not any(ops):
        return Spread(parse_layout(given), sizes, partial, "given")
    dims = tuple(
        None if op else parse_layout(one).dims[0] for one, op in zip(each, ops, strict=True)
    )
    return Spread(Layout(dims), sizes, partial, "given")


def _sum_of(given: Any) -> str | None:
    """The operation of a `Partial`, or of the word for it."""
    if isinstance(given, str) and given.strip().lower().rstrip("()") == "partial":
        return "sum"
    if type(given).__name__ == "Partial":
        return str(getattr(given, "reduce_op", "sum"))
    return None


def of_dtensor(said: Sequence[Any], num_workers: int) -> Spread | str:
    """The layout that a DTensor states, or why it can't be followed."""
    placements, sizes, ranks, _ = said
    if tuple(ranks) != tuple(range(num_workers)):
        return f"a DTensor on a mesh of workers {', '.join(map(str, ranks))}"
    dims, partial, segments = [], [], ()
    for kind, detail in placements:
        if kind not in ("Shard", "Replicate", "Partial"):
            return f"a DTensor with placement {kind}"
        dims.append(int(detail) if kind == "Shard" else None)
        partial.append(str(detail) if kind == "Partial" else "")
    return Spread(Layout(tuple(dims), segments), tuple(sizes), tuple(partial), "DTensor")
