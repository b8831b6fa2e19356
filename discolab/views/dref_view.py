"""Draws a DRef: one name for a value that each worker holds, from one record per worker.

A pure function of the records that `describe` made on the workers: it asks nobody, so it cannot
hang. Failed and busy workers are part of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compare import (
    content_classes,
    free_verdict,
    group_ranks,
    grouped,
    plan_verdict,
    structure_key,
)
from .formats import cut, format_shape
from .layout import (
    Placement,
    Plan,
    draw_plan,
    layout_caption,
    make_plan,
    placements_of,
    read_placements,
)
from .notes import BAD, note_parts, problem_parts, role_of
from .parts import Line, Part, Stack, Text
from .rank_table import children_parts, rank_table
from .summary import head_words, summarize, tensor_words

_NAME_LIMIT = 80
_MOST_DRAWN = 4


@dataclass(frozen=True)
class _Survey:
    """What is known of a DRef; `good` and `bad` part the records by whether there is a value."""

    name: str
    num_workers: int
    num_groups: int
    good: dict[int, Mapping[str, Any]]
    bad: dict[int, Mapping[str, Any]]
    classes: dict[int, str] | None
    plans: tuple[Plan, ...]
    plan_note: Text | None

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
    def first(self) -> Mapping[str, Any]:
        """The value of the lowest rank that has one."""
        return self.good[min(self.good)]


def dref_parts(
    records: Mapping[int, Mapping[str, Any]],
    *,
    name: str | None,
    num_workers: int,
    placements: Any = None,
    num_groups: int = 1,
    mesh_shape: Sequence[int] | None = None,
) -> Part:
    """Draw the records of all workers as parts.

    Parameters
    ----------
    records : mapping of rank to record
        From `describe`; or ``{"kind": "failure", "message": …}`` for a poisoned register, or
        ``{"kind": "pending", "message": …}`` for a busy worker, or ``{"kind": "dead", …}`` for one
        that has died. A missing rank is shown as such.
    name : str or None
        What the user calls the DRef.
    num_workers : int
    placements : sequence, optional
        Of torch.distributed.tensor, one per mesh axis. Without them nothing is claimed about how
        shards join, except that values equal on all workers are drawn as replicated.
    num_groups : int
        Equal groups of neighbouring ranks. One placement applies within each group, two to
        (groups, workers of a group).
    mesh_shape : sequence of int, optional
        Sizes of the mesh axes, last one running fastest with the rank.

    Returns
    -------
    Part

    Examples
    --------
    >>> from discolab.views import describe, render_text
    >>> print(render_text(dref_parts({0: describe(3), 1: describe(3)}, name="x", num_workers=2)))
    DRef x: 3 on all 2 workers
    """
    try:
        return _draw(_survey(records, name, num_workers, placements, num_groups, mesh_shape))
    except Exception as error:  # a view never raises
        return Text(f"DRef {name}: this view could not be drawn: {type(error).__name__}", "error")


def _survey(
    records: Mapping[int, Mapping[str, Any]],
    name: str | None,
    num_workers: int,
    placements: Any,
    num_groups: int,
    mesh_shape: Sequence[int] | None,
) -> _Survey:
    full = {rank: records.get(rank, {"kind": "missing"}) for rank in range(num_workers)}
    bad = {rank: record for rank, record in full.items() if record.get("kind") in BAD}
    good = {rank: record for rank, record in full.items() if rank not in bad}
    plans: tuple[Plan, ...] = ()
    note = None
    told = _told(good) if placements is None else None
    if (placements is not None or told) and good:
        try:
            if told:
                plans = _own_plans(good, num_workers, told)
            else:
                plans = _plans(good, num_workers, placements, num_groups, mesh_shape)
        except Exception as error:
            note = Text(f"layout not drawn: {error}", "warning" if not bad else "muted")
    title = "DRef" if name is None else f"DRef {cut(name, _NAME_LIMIT)}"
    classes = content_classes(good) if good else None
    return _Survey(title, num_workers, num_groups, good, bad, classes, plans, note)


def _told(good: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]] | None:
    """What DTensors say of themselves, if all values are DTensors laid out alike."""
    told = {rank: record.get("sharding") for rank, record in good.items()}
    known = {rank: sharding for rank, sharding in told.items() if isinstance(sharding, Mapping)}
    alike = {str((sharding["placements"], sharding["mesh"])) for sharding in known.values()}
    return known if len(known) == len(told) and len(alike) == 1 else None


def _own_plans(
    good: Mapping[int, Mapping[str, Any]],
    num_workers: int,
    told: Mapping[int, Mapping[str, Any]],
) -> tuple[Plan, ...]:
    """One plan for each mesh that the workers' DTensors are on."""
    known = _shapes(good, num_workers)
    meshes = dict.fromkeys(tuple(sharding["ranks"]) for sharding in told.values())
    first = next(iter(told.values()))
    read = placements_of(first["placements"], len(known[0]))
    return tuple(make_plan(known, ranks, read, first["mesh"]) for ranks in meshes)


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


def _plans(
    good: Mapping[int, Mapping[str, Any]],
    num_workers: int,
    placements: Any,
    num_groups: int,
    mesh_shape: Sequence[int] | None,
) -> tuple[Plan, ...]:
    known = _shapes(good, num_workers)
    read = read_placements(placements, len(known[0]))
    if mesh_shape is None and len(read) == 1:
        groups = group_ranks(num_workers, num_groups)
        return tuple(make_plan(known, ranks, read, (len(ranks),)) for ranks in groups)
    mesh = mesh_shape or (num_groups, num_workers // max(num_groups, 1))
    return (make_plan(known, range(num_workers), read, mesh),)


def _draw(survey: _Survey) -> Part:
    if not survey.good:
        return _stack(
            [Line((Text(survey.name, "title"), *_state(survey))), *problem_parts(survey.bad)]
        )
    if survey.uniform and not survey.tensors:
        return _stack(
            [_short_line(survey), *children_parts(survey.first), *problem_parts(survey.bad)]
        )
    if survey.tensors and survey.uniform and not survey.first.get("shape") and not survey.plans:
        values = head_words(survey.first)
        if values and survey.classes is not None:
            line = _short_line(survey, f"{values} ({survey.first.get('dtype')})")
            return _stack([line, *problem_parts(survey.bad)])
    return _stack(
        [
            _title(survey),
            *_drawings(survey),
            rank_table({**survey.good, **survey.bad}, _compared(survey), survey.plans),
            *note_parts(survey.good, drawn=bool(survey.plans)),
            *problem_parts(survey.bad),
        ]
    )


def _stack(children: list[Part]) -> Part:
    return children[0] if len(children) == 1 else Stack(tuple(children))


def _where(survey: _Survey) -> str:
    plural = "" if survey.num_workers == 1 else "s"
    return f"{survey.num_workers} worker{plural}"


def _short_line(survey: _Survey, words: str | None = None) -> Line:
    words = summarize(survey.first) if words is None else words
    if survey.bad:
        place = grouped(dict.fromkeys(survey.good, "workers" if len(survey.good) > 1 else "worker"))
        where = " ".join(place[0])
    else:
        where = _where(survey) if survey.num_workers == 1 else f"all {_where(survey)}"
    spans = [Text(survey.name, "title"), Text(f": {words} on {where}")]
    if survey.classes is None and survey.num_workers > 1:
        spans.append(Text(" · contents not compared", "muted"))
    return Line((*spans, *_state(survey)))


def _title(survey: _Survey) -> Line:
    spans = [Text(survey.name, "title"), Text(f" · {_value_words(survey)}")]
    verdict = _verdict(survey)
    if verdict is not None:
        spans += [Text(" · "), verdict]
    return Line((*spans, *_state(survey)))


def _value_words(survey: _Survey) -> str:
    where, good = _where(survey), survey.good
    if survey.plans and len({plan.logical for plan in survey.plans}) == 1:
        plan = survey.plans[0]
        logical = {tensor_words(record, plan.logical) for record in good.values()}
        if len(logical) == 1:
            each = f", in each of {len(survey.plans)} groups" if len(survey.plans) > 1 else ""
            return f"{logical.pop()} {plan.words} on {where}{each}"
    words = {rank: summarize(record, 60) for rank, record in good.items()}
    groups = grouped(words)
    if len(groups) == 1:
        return f"{groups[0][0]} on {where}"
    kinds = {tensor_words({**record, "shape": []})[:-2] for record in good.values()}
    if survey.tensors and len(kinds) == 1:
        return f"{kinds.pop()}, shapes differ, on {where}"
    types = {str(record.get("type", record.get("kind"))) for record in good.values()}
    if not survey.tensors and len(types) == 1:
        return f"{types.pop()} on {where}"
    if len(groups) <= 3:
        return ", ".join(f"{text} on {_workers(ranks)}" for text, ranks in groups)
    return f"mixed values on {where}"


def _workers(ranks: str) -> str:
    return f"worker {ranks}" if ranks.isdigit() else f"workers {ranks}"


def _verdict(survey: _Survey) -> Text | None:
    kinds = {record.get("kind") for record in survey.good.values()}
    if len(survey.good) < 2 or len(kinds) > 1:
        return None
    if survey.classes is None:
        return Text("contents not compared", "muted")
    if survey.plans:
        return plan_verdict(survey.classes, survey.num_workers, survey.plans)
    shapes = {str(record.get("shape")) for record in survey.good.values()}
    distinct = "shards distinct" if survey.tensors and len(shapes) == 1 else "all distinct"
    return free_verdict(survey.classes, survey.num_workers, survey.num_groups, distinct)


def _compared(survey: _Survey) -> dict[int, str] | None:
    """Give the class letters if there is anything to compare: two values of one kind."""
    return None if _verdict(survey) is None else survey.classes


def _state(survey: _Survey) -> list[Text]:
    spans = []
    states = grouped({rank: str(record["kind"]) for rank, record in survey.bad.items()})
    for kind, ranks in states:
        whole = len(states) == 1 and not survey.good and survey.num_workers > 1
        place = f"all {_where(survey)}" if whole else _workers(ranks)
        spans += [Text(" · "), Text(f"{place} {BAD[kind]}", role_of(kind))]
    return spans


def _drawings(survey: _Survey) -> list[Part]:
    if survey.plan_note is not None:
        return [survey.plan_note]
    if survey.plans:
        same = len({plan.logical for plan in survey.plans}) == 1
        drawn = survey.plans[:_MOST_DRAWN]
        captions = [layout_caption(plan) for plan in drawn]
        if len(survey.plans) > 1:
            captions = [f"group {place}: {words}" for place, words in enumerate(captions)]
        grids = [draw_plan(plan, words) for plan, words in zip(drawn, captions, strict=True)]
        parts: list[Part] = [grid for grid in grids if grid is not None]
        if len(survey.plans) > len(drawn):
            like = " alike" if same else ""
            parts.append(Text(f"and {len(survey.plans) - len(drawn)} more groups{like}", "muted"))
        return parts
    return _inferred(survey)


def _inferred(survey: _Survey) -> list[Part]:
    """Draw values that proved equal on all workers as one rectangle; guess nothing else."""
    lone = survey.num_workers < 2 or bool(survey.bad)
    if lone or survey.classes is None or not survey.uniform or not survey.tensors:
        return []
    shape = survey.first.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        return []
    ranks = range(survey.num_workers)
    plan = make_plan(
        dict.fromkeys(ranks, shape), ranks, (Placement("replicate"),), (survey.num_workers,)
    )
    grid = draw_plan(plan, f"replicated (inferred), {format_shape(shape)}")
    return [] if grid is None else [grid]
