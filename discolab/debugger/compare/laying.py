"""Finds how a value of the reference may lie over the workers, from all that is known. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...layouts.infer import infer_layouts
from ...layouts.layout import Shape, ShardLayout, Workers
from ...layouts.text import UnknownPlacementError, layout_of
from ...runtime.errors import ArgumentError
from ...views.formats import format_ranks, format_shape
from .sides import Fact


def layouts_of(
    shape: Shape,
    shapes: dict[int, Shape],
    held: dict[int, Fact],
    given: ShardLayout | None,
    meshes: Sequence[Workers],
    num_workers: int,
) -> tuple[list[ShardLayout], str]:
    """The layouts that a value may have, the likeliest first; or why there is none."""
    if not held:
        return [], "no worker has it"
    if given is not None:
        return _stated(given, shape, shapes, "the given layout")
    said = {rank: fact[4] for rank, fact in held.items() if fact[4] is not None}
    if said:
        stated = {repr(one): one for one in said.values()}
        if len(stated) > 1 or len(said) < len(held):
            return [], "DTensors of the workers disagree about how they lie"
        found = of_dtensor(next(iter(stated.values())), num_workers)
        if isinstance(found, str):
            return [], found
        return _stated(found, shape, shapes, "the DTensor's layout")
    layouts = infer_layouts(shape, shapes, meshes)
    if layouts:
        return layouts, ""
    return [], f"the shapes fit no layout: {_held_words(shapes)}, reference {_shape(shape)}"


def _stated(
    layout: ShardLayout, shape: Shape, shapes: dict[int, Shape], who: str
) -> tuple[list[ShardLayout], str]:
    if layout.fits(shape, shapes):
        return [layout], ""
    try:
        wanted = {rank: layout.cut(shape, rank) for rank in shapes}
    except ArgumentError as error:
        return [], str(error)
    want = {rank: found.shape for rank, found in wanted.items() if found is not None}
    return [], (
        f"{who} {layout.words} of {_shape(shape)} gives {_held_words(want)}, "
        f"the workers hold {_held_words(shapes)}"
    )


def of_dtensor(said: Sequence[Any], num_workers: int) -> ShardLayout | str:
    """The layout that a DTensor states, or why it can't be followed."""
    placements, sizes, ranks, _ = said
    if tuple(ranks) != tuple(range(num_workers)):
        return f"a DTensor on a mesh of workers {', '.join(map(str, ranks))}"
    try:
        layout = layout_of(placements)
    except UnknownPlacementError as error:
        return f"a DTensor with placement {error.kind}"
    return ShardLayout(layout, Workers(tuple(sizes)), "DTensor")


def _shape(shape: Shape) -> str:
    return format_shape(list(shape))


def _held_words(shapes: Mapping[int, Shape]) -> str:
    groups: dict[Shape, list[int]] = {}
    for rank, shape in shapes.items():
        groups.setdefault(shape, []).append(rank)
    if len(groups) == 1:
        return f"{_shape(next(iter(groups)))} on each worker"
    return ", ".join(f"{_shape(shape)} on {format_ranks(ranks)}" for shape, ranks in groups.items())
