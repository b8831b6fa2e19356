"""Summarises what all workers hold of a DRef: who holds what, how it lies, what is equal. Pure.

Taken once a picture; the tables, the drawings and the search for differences all read it. What a
DTensor says of its own layout counts for more than ``.placements``. Where they disagree, a
ValueError says so, and nothing is drawn joined. Where nobody says it, `inference` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...layouts.infer import AxisPattern, infer_axes, infer_maps
from ...layouts.join import ShardMap, join_shards
from ...layouts.text import layout_of, read_placements
from ..formats import cut, format_shape
from ..parts import Text
from ..summary import summarize
from .contents import NO_VALUE, content_classes, group_ranks, grouped, structure_key

_NAME_LIMIT = 80


@dataclass(frozen=True, kw_only=True)
class LayoutFacts:
    """What the controller knows of how workers hold a value; see `view.dref_parts`."""

    num_workers: int
    placements: Any = None
    num_groups: int = 1
    mesh_shape: Sequence[int] | None = None
    axes: Mapping[str, int] | None = None


@dataclass(frozen=True)
class ValueSummary:
    """What is known of the value that a DRef names.

    Attributes
    ----------
    name
        What the picture is called.
    num_workers, num_groups
    good, bad
        The records of workers that have a value, and of those that have none, by rank.
    classes
        A letter for each rank of `good`, equal if the contents are; None: that is not known.
    plans
        How tensors lie on the workers, one for each logical tensor; none if it is not known.
    plan_note
        What is to be said of that, or why there are none.
    inferred
        Whether nobody has stated `plans`: shapes and contents prove them.
    pattern
        Along which axes of the mesh contents are equal, where there are no plans.
    disagree
        Whether the workers' DTensors contradict each other.
    relation
        What is known of tensors that differ on all workers, see `relations`.
    """

    name: str
    num_workers: int
    num_groups: int
    good: dict[int, Mapping[str, Any]]
    bad: dict[int, Mapping[str, Any]]
    classes: dict[int, str] | None
    plans: tuple[ShardMap, ...]
    plan_note: Text | None
    inferred: bool
    pattern: AxisPattern | None
    disagree: bool = False
    relation: Text | None = None

    @property
    def unrelated(self) -> bool:
        """Whether they are tensors of one shape, all different, and nothing says how they lie."""
        shapes = {str(record.get("shape")) for record in self.good.values()}
        return (
            self.tensors
            and len(shapes) == 1
            and not self.plans
            and self.plan_note is None
            and self.pattern is None
            and self.classes is not None
            and 1 < len(self.good) == len(set(self.classes.values()))
        )

    @property
    def ask(self) -> str:
        """What to call for statistics of large tensors."""
        called = self.name.removeprefix("DRef").strip()
        return f"discolab.view({called if called.isidentifier() else 'ref'}, stats=True)"

    @cached_property
    def uniform(self) -> bool:
        """Whether all values look the same: equal content, or equal records if unknown."""
        if self.classes is not None:
            return len(set(self.classes.values())) == 1
        return len({structure_key(record) for record in self.good.values()}) == 1

    @property
    def tensors(self) -> bool:
        """Whether every value is a tensor."""
        return all(record.get("kind") == "tensor" for record in self.good.values())

    @property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """The shapes of tensors, if nobody holds anything else but None; else nothing."""
        held = {rank: rec for rank, rec in self.good.items() if rec.get("kind") != "none"}
        return _known_shapes(held) or {}

    @property
    def must_agree(self) -> list[tuple[int, ...]] | None:
        """The sets of workers that must hold equal tensors; None if nothing says which."""
        if self.plans or self.pattern is not None:
            return [ranks for plan in self.plans for ranks in plan.replicas]
        return None

    @property
    def first(self) -> Mapping[str, Any]:
        """The value of the lowest rank that has one."""
        return self.good[min(self.good)]


def summarize_value(
    records: Mapping[int, Mapping[str, Any]], name: str | None, known: LayoutFacts
) -> ValueSummary:
    """Sort out the records of all workers; parameters as `view.dref_parts`."""
    num_workers, num_groups = known.num_workers, known.num_groups
    full = {rank: records.get(rank, {"kind": "missing"}) for rank in range(num_workers)}
    bad = {rank: record for rank, record in full.items() if record.get("kind") in NO_VALUE}
    good = {rank: record for rank, record in full.items() if rank not in bad}
    plans: tuple[ShardMap, ...] = ()
    note = None
    disagree = False
    try:
        plans, note = stated_plans(good, lambda: _shapes(good, num_workers), known)
    except Exception as error:
        disagree = isinstance(error, DTensorsDisagreeError)
        note = Text(f"layout not drawn: {error}", "warning" if disagree or not bad else "muted")
    title = "DRef" if name is None else f"DRef {cut(name, _NAME_LIMIT)}"
    classes = content_classes(good) if good else None
    pattern = None
    inferred = False
    shapes = _known_shapes(good)
    if not plans and note is None and not bad and shapes and shapes[0]:
        plans = infer_maps(shapes, classes, num_groups, known.axes)
        inferred = bool(plans)
        if not inferred and classes is not None:
            size = num_workers // max(num_groups, 1)
            pattern = infer_axes(classes, known.axes or {"groups": num_groups, "workers": size})
    return ValueSummary(
        title, num_workers, num_groups, good, bad, classes, plans, note, inferred, pattern, disagree
    )


def _known_shapes(records: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]] | None:
    """The shapes of values that are all tensors; None if one is not, or its shape is not known."""
    shapes: dict[int, tuple[int, ...]] = {}
    for rank, record in records.items():
        shape = record.get("shape")
        if record.get("kind") != "tensor" or not isinstance(shape, list):
            return None
        if not all(type(size) is int for size in shape):
            return None
        shapes[rank] = tuple(shape)
    return shapes


def _shapes(good: Mapping[int, Mapping[str, Any]], num_workers: int) -> dict[int, tuple[int, ...]]:
    """What each worker holds; a ValueError if one holds no tensor."""
    lacking = sorted(set(range(num_workers)) - set(good))
    if lacking:
        raise ValueError(
            f"no value from {'worker' if len(lacking) == 1 else 'workers'} "
            f"{', '.join(map(str, lacking))}"
        )
    shapes = {rank: record.get("shape") for rank, record in good.items()}
    for rank, shape in shapes.items():
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise ValueError(f"worker {rank} holds {summarize(good[rank], 60)}")
    return {rank: tuple(shape) for rank, shape in shapes.items() if shape is not None}


# -- layouts that somebody states ---------------------------------------------------------------


class DTensorsDisagreeError(ValueError):
    """The DTensors of the workers are not shards of the same tensor."""


def stated_plans(
    records: Mapping[int, Mapping[str, Any]],
    shapes: Callable[[], Mapping[int, Sequence[int]]],
    known: LayoutFacts,
) -> tuple[tuple[ShardMap, ...], Text | None]:
    """How tensors lie by what their DTensors say, or else ``.placements``; what to say of that.

    There are no plans if nobody states a layout. `shapes` gives those of all workers.

    Raises
    ------
    ValueError
        If what is stated does not fit itself, the session or the shapes.
    """
    told = _dtensor_layout(records)
    if told:
        plans = _own_plans(records, shapes(), told)
        words = _contradiction(known.placements, told, len(plans[0].logical))
        return plans, Text(f"drawn as the DTensors say; {words}", "warning") if words else None
    if known.placements is None or not records:
        return (), None
    plans = _said_plans(shapes(), known)
    words = _over_all(plans, known.axes)
    return plans, Text(words, "muted") if words else None


def _dtensor_layout(
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


def _own_plans(
    records: Mapping[int, Mapping[str, Any]],
    shapes: Mapping[int, Sequence[int]],
    told: Mapping[int, Mapping[str, Any]],
) -> tuple[ShardMap, ...]:
    """One plan for each mesh that the workers' DTensors are on.

    Raises
    ------
    DTensorsDisagreeError
        If what the workers hold does not make up the shape that the DTensors state.
    ValueError
        As `join_shards`.
    """
    meshes = dict.fromkeys(tuple(sharding["ranks"]) for sharding in told.values())
    first = next(iter(told.values()))
    read = layout_of(first["placements"], len(next(iter(shapes.values()))))
    plans = tuple(join_shards(shapes, ranks, read, first["mesh"]) for ranks in meshes)
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


def _contradiction(placements: Any, told: Mapping[int, Mapping[str, Any]], ndim: int) -> str:
    """Say that ``.placements`` are not those of the DTensors; nothing if they are, or unset."""
    if placements is None:
        return ""
    own = layout_of(next(iter(told.values()))["placements"], ndim)
    try:
        said = layout_of(read_placements(placements), ndim)
    except ValueError as error:
        return f".placements say otherwise: {error}"
    return "" if said == own else f".placements say otherwise: {said.words(len(said.dims))}"


def _said_plans(shapes: Mapping[int, Sequence[int]], known: LayoutFacts) -> tuple[ShardMap, ...]:
    """The layout by ``.placements``.

    Raises
    ------
    ValueError
        If they do not fit the session or the shapes.
    """
    num_workers, num_groups, mesh_shape = known.num_workers, known.num_groups, known.mesh_shape
    read = layout_of(read_placements(known.placements), len(next(iter(shapes.values()))))
    axes = len(read.dims)
    if mesh_shape is None and axes == 1:
        groups = group_ranks(num_workers, num_groups)
        return tuple(join_shards(shapes, ranks, read, (len(ranks),)) for ranks in groups)
    if mesh_shape is None and num_groups == 1:
        raise ValueError(
            f"{axes} placements, but the session has neither groups nor a mesh of "
            f"{axes} axes: see sess.mesh"
        )
    mesh = mesh_shape or (num_groups, num_workers // max(num_groups, 1))
    return (join_shards(shapes, range(num_workers), read, mesh),)


def _over_all(plans: Sequence[ShardMap], axes: Mapping[str, int] | None) -> str:
    """A word on one placement in a session with a mesh of several axes: it may be of one axis."""
    if len(plans) != 1 or len(plans[0].layout.dims) != 1 or len(axes or ()) < 2:
        return ""
    words = f"the mesh has axes {', '.join(axes or ())}"
    return f"taken over all workers (1 placement; {words})"
