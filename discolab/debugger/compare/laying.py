"""Finds how a value of the reference may lie over the workers, from all that is known. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...loader.plans.layouts import Layout
from ...runtime.errors import ArgumentError
from ...views.formats import format_ranks, format_shape
from .sides import Fact
from .spreads import Shape, Spread, infer, of_dtensor


def spreads_of(
    shape: Shape,
    shapes: dict[int, Shape],
    held: dict[int, Fact],
    given: Spread | None,
    meshes: Sequence[Shape],
    num_workers: int,
) -> tuple[list[Spread], str]:
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
    spreads = infer(shape, shapes, meshes)
    if spreads:
        return spreads, ""
    return [], f"the shapes fit no layout: {_held_words(shapes)}, reference {_shape(shape)}"


def _stated(
    spread: Spread, shape: Shape, shapes: dict[int, Shape], who: str
) -> tuple[list[Spread], str]:
    if spread.fits(shape, shapes):
        return [spread], ""
    try:
        wanted = {rank: spread.cut(shape, rank) for rank in shapes}
    except ArgumentError as error:
        return [], str(error)
    want = {rank: found.shape for rank, found in wanted.items() if found is not None}
    return [], (
        f"{who} {spread.words} of {_shape(shape)} gives {_held_words(want)}, "
        f"the workers hold {_held_words(shapes)}"
    )


def alike(spreads: list[Spread], meshes: Sequence[Shape]) -> list[Spread]:
    """These, and for copies on all workers the same in the other grids of workers."""
    if spreads[0].layout.cuts or spreads[0].sums or spreads[0].source != "inferred":
        return spreads
    return [Spread(Layout((None,) * len(sizes)), sizes) for sizes in meshes]


def sums_of(spread: Spread) -> list[Spread]:
    """The sums that a layout may stand for: along each axis that cuts nothing, and along all."""
    if spread.sums:
        return [spread]
    axes = len(spread.sizes)
    dims = (None,) * (axes - len(spread.layout.dims)) + spread.layout.dims
    free = [axis for axis in range(axes) if dims[axis] is None and spread.sizes[axis] > 1]
    choices = [[axis] for axis in reversed(free)] + ([free] if len(free) > 1 else [])
    return [
        replace(spread, partial=tuple("sum" if axis in chosen else "" for axis in range(axes)))
        for chosen in choices
    ]


def _shape(shape: Shape) -> str:
    return format_shape(list(shape))


def _held_words(shapes: Mapping[int, Shape]) -> str:
    groups: dict[Shape, list[int]] = {}
    for rank, shape in shapes.items():
        groups.setdefault(shape, []).append(rank)
    if len(groups) == 1:
        return f"{_shape(next(iter(groups)))} on each worker"
    return ", ".join(f"{_shape(shape)} on {format_ranks(ranks)}" for shape, ranks in groups.items())
