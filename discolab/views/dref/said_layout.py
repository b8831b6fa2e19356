"""How values lie on the workers where somebody says it: DTensors themselves, or ``.placements``.

Pure. What a DTensor says of itself counts for more than what was set. Where they disagree, a
ValueError says so, and nothing is drawn joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..formats import format_shape
from .compare import group_ranks, grouped
from .layout import Plan, make_plan, placements_of, read_placements


class DTensorsDisagreeError(ValueError):
    """The DTensors of the workers are not shards of the same tensor."""


def dtensor_layout(
    records: Mapping[int, Mapping[str, Any]],
) -> dict[int, Mapping[str, Any]] | None:
    """What each DTensor says of itself; None unless all values are DTensors.

    Raises
    ------
    DTensorsDisagreeError
        If they are laid out in different ways, or some of the tensors are no DTensors.
    """
    told = {rank: record.get("sharding") for rank, record in records.items()}
    known = {rank: sharding for rank, sharding in told.items() if isinstance(sharding, Mapping)}
    if not known:
        return None
    words = {
        rank: _layout_words(known[rank]) if rank in known else "a plain tensor"
        for rank, record in records.items()
        if rank in known or _plain(record)
    }
    groups = grouped(words)
    if len(groups) > 1:
        said = "; ".join(f"{layout} on {ranks}" for layout, ranks in groups)
        raise DTensorsDisagreeError(f"DTensors disagree: {said}")
    return known if len(known) == len(told) else None


def _plain(record: Mapping[str, Any]) -> bool:
    """Whether it is of a tensor that is known to be no DTensor."""
    return record.get("kind") == "tensor" and "placements" not in record


def _layout_words(sharding: Mapping[str, Any]) -> str:
    places = ", ".join(f"{kind}({detail})" for kind, detail in sharding["placements"])
    return f"{places} of a mesh {format_shape(list(sharding['mesh']))}"


def own_plans(
    records: Mapping[int, Mapping[str, Any]],
    shapes: Mapping[int, Sequence[int]],
    told: Mapping[int, Mapping[str, Any]],
) -> tuple[Plan, ...]:
    """One plan for each mesh that the workers' DTensors are on.

    Raises
    ------
    DTensorsDisagreeError
        If what the workers hold does not make up the shape that the DTensors state.
    ValueError
        As `make_plan`.
    """
    meshes = dict.fromkeys(tuple(sharding["ranks"]) for sharding in told.values())
    first = next(iter(told.values()))
    read = placements_of(first["placements"], len(next(iter(shapes.values()))))
    plans = tuple(make_plan(shapes, ranks, read, first["mesh"]) for ranks in meshes)
    for plan in plans:
        stated = {rank: records[rank].get("logical_shape") for rank in plan.keys}
        words = {rank: format_shape(shape) for rank, shape in stated.items() if shape is not None}
        if any(shape is not None and tuple(shape) != plan.logical for shape in stated.values()):
            said = ", ".join(f"{shape} on {ranks}" for shape, ranks in grouped(words))
            held = format_shape(list(plan.logical))
            raise DTensorsDisagreeError(
                f"DTensors disagree: they state {said}, what the workers hold makes {held}"
            )
    return plans


def contradiction(placements: Any, told: Mapping[int, Mapping[str, Any]], ndim: int) -> str:
    """Say that ``.placements`` are not those of the DTensors; nothing if they are, or unset."""
    if placements is None:
        return ""
    own = placements_of(next(iter(told.values()))["placements"], ndim)
    try:
        said = read_placements(placements, ndim)
    except ValueError as error:
        return f".placements say otherwise: {error}"
    return "" if said == own else f".placements say otherwise: {', '.join(map(str, said))}"


def said_plans(
    shapes: Mapping[int, Sequence[int]],
    num_workers: int,
    placements: Any,
    num_groups: int,
    mesh_shape: Sequence[int] | None,
) -> tuple[Plan, ...]:
    """The layout by ``.placements``; parameters as `dref_parts`.

    Raises
    ------
    ValueError
        If they do not fit the session or the shapes.
    """
    read = read_placements(placements, len(next(iter(shapes.values()))))
    if mesh_shape is None and len(read) == 1:
        groups = group_ranks(num_workers, num_groups)
        return tuple(make_plan(shapes, ranks, read, (len(ranks),)) for ranks in groups)
    if mesh_shape is None and num_groups == 1:
        raise ValueError(
            f"{len(read)} placements, but the session has neither groups nor a mesh of "
            f"{len(read)} axes: see sess.mesh"
        )
    mesh = mesh_shape or (num_groups, num_workers // max(num_groups, 1))
    return (make_plan(shapes, range(num_workers), read, mesh),)


def over_all(plans: Sequence[Plan], axes: Mapping[str, int] | None) -> str:
    """A word on one placement in a session with a mesh of several axes: it may be of one axis."""
    if len(plans) != 1 or len(plans[0].placements) != 1 or len(axes or ()) < 2:
        return ""
    words = f"the mesh has axes {', '.join(axes or ())}"
    return f"taken over all workers (1 placement; {words})"
