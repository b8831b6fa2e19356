"""What is known of a DRef before it is drawn: who holds what, how it lies, what is equal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import cut
from ..parts import Text
from ..summary import summarize
from .compare import content_classes, structure_key
from .inference import AxisPattern, infer_axes, infer_plans
from .layout import Plan
from .notes import BAD
from .said_layout import (
    DTensorsDisagreeError,
    contradiction,
    dtensor_layout,
    over_all,
    own_plans,
    said_plans,
)

_NAME_LIMIT = 80


@dataclass(frozen=True)
class Survey:
    """What is known of a DRef; `good` and `bad` part the records by whether there is a value."""

    name: str
    num_workers: int
    num_groups: int
    good: dict[int, Mapping[str, Any]]
    bad: dict[int, Mapping[str, Any]]
    classes: dict[int, str] | None
    plans: tuple[Plan, ...]
    plan_note: Text | None
    inferred: bool
    pattern: AxisPattern | None
    disagree: bool = False

    @property
    def ask(self) -> str:
        """What to call for statistics of large tensors."""
        called = self.name.removeprefix("DRef").strip()
        return f"discolab.view({called if called.isidentifier() else 'ref'}, stats=True)"

    @property
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
    def first(self) -> Mapping[str, Any]:
        """The value of the lowest rank that has one."""
        return self.good[min(self.good)]


def take_survey(
    records: Mapping[int, Mapping[str, Any]],
    name: str | None,
    num_workers: int,
    placements: Any,
    num_groups: int,
    mesh_shape: Sequence[int] | None,
    axes: Mapping[str, int] | None,
) -> Survey:
    """Sort out the records of all workers; parameters as `dref_parts`."""
    full = {rank: records.get(rank, {"kind": "missing"}) for rank in range(num_workers)}
    bad = {rank: record for rank, record in full.items() if record.get("kind") in BAD}
    good = {rank: record for rank, record in full.items() if rank not in bad}
    plans: tuple[Plan, ...] = ()
    note = None
    disagree = False
    try:
        told = dtensor_layout(good)
        if told:
            known = _shapes(good, num_workers)
            plans = own_plans(good, known, told)
            words = contradiction(placements, told, len(known[0]))
            note = Text(f"drawn as the DTensors say; {words}", "warning") if words else None
        elif placements is not None and good:
            known = _shapes(good, num_workers)
            plans = said_plans(known, num_workers, placements, num_groups, mesh_shape)
            words = over_all(plans, axes)
            note = Text(words, "muted") if words else None
    except Exception as error:
        disagree = isinstance(error, DTensorsDisagreeError)
        note = Text(f"layout not drawn: {error}", "warning" if disagree or not bad else "muted")
    title = "DRef" if name is None else f"DRef {cut(name, _NAME_LIMIT)}"
    classes = content_classes(good) if good else None
    pattern = None
    inferred = False
    shapes = _known_shapes(good)
    if not plans and note is None and not bad and shapes and shapes[0]:
        plans = infer_plans(shapes, classes, num_groups, axes)
        inferred = bool(plans)
        if not inferred and classes is not None:
            size = num_workers // max(num_groups, 1)
            pattern = infer_axes(classes, axes or {"groups": num_groups, "workers": size})
    return Survey(
        title, num_workers, num_groups, good, bad, classes, plans, note, inferred, pattern, disagree
    )


def _known_shapes(records: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]] | None:
    """The shapes of values that are all tensors; None if one is not, or its shape is not known."""
    found: dict[int, tuple[int, ...]] = {}
    for rank, record in records.items():
        shape = record.get("shape")
        if record.get("kind") != "tensor" or not isinstance(shape, list):
            return None
        if not all(type(size) is int for size in shape):
            return None
        found[rank] = tuple(shape)
    return found


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


def must_agree(
    records: Mapping[int, Mapping[str, Any]],
    *,
    num_workers: int,
    placements: Any = None,
    num_groups: int = 1,
    mesh_shape: Sequence[int] | None = None,
    axes: Mapping[str, int] | None = None,
) -> tuple[dict[int, str], list[tuple[int, ...]] | None]:
    """Which tensors are equal, and which workers must hold equal ones; parameters as `dref_parts`.

    Returns
    -------
    tuple of dict and list or None
        Class letters by rank, none if they are not known; sets of ranks, None if nothing says
        which must agree.
    """
    try:
        survey = take_survey(records, None, num_workers, placements, num_groups, mesh_shape, axes)
    except Exception:  # a view never raises
        return {}, None
    if survey.classes is None or not survey.tensors or survey.disagree:
        return {}, None
    if survey.plans or survey.pattern is not None:
        return survey.classes, [ranks for plan in survey.plans for ranks in plan.replicas]
    return survey.classes, None
