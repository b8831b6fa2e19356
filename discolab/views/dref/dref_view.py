"""Draws a DRef: one name for a value that each worker holds, from one record per worker.

A pure function of the records that `describe` made on the workers: it asks nobody, so it cannot
hang. Failed and busy workers are part of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..parts import Beside, Card, Line, Part, Stack, Text
from ..summary import head_words, summarize, tensor_words
from .children import Children, draw_children
from .compare import free_verdict, grouped, plan_verdict
from .details import detail_parts, place_parts
from .drawings import Drawing, Pictures, draw_apart, draw_plans, draw_replicas, take_pictures
from .notes import BAD, note_parts, problem_parts, role_of
from .rank_table import rank_table
from .survey import Survey, take_survey


def dref_parts(
    records: Mapping[int, Mapping[str, Any]],
    *,
    name: str | None,
    num_workers: int,
    placements: Any = None,
    num_groups: int = 1,
    mesh_shape: Sequence[int] | None = None,
    axes: Mapping[str, int] | None = None,
    differences: Sequence[Part] = (),
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
        Of torch.distributed.tensor, one per mesh axis. Without them no more is claimed about how
        shards join than contents and shapes tell, and that is marked as inferred.
    num_groups : int
        Equal groups of neighbouring ranks. One placement applies within each group, two to
        (groups, workers of a group).
    mesh_shape : sequence of int, optional
        Sizes of the mesh axes that the placements are for, last one running fastest with the rank.
    axes : mapping of name to size, optional
        The session's mesh: contents are compared along its axes where placements are not known.
    differences : sequence of Part, optional
        Where values differ that should be equal, see `replicas.replica_parts`.

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
        survey = take_survey(records, name, num_workers, placements, num_groups, mesh_shape, axes)
        return _draw(survey, differences)
    except Exception as error:  # a view never raises
        return Text(f"DRef {name}: this view could not be drawn: {type(error).__name__}", "error")


def _draw(survey: Survey, differences: Sequence[Part] = ()) -> Part:
    if not survey.good:
        return _stack(
            [Line((Text(survey.name, "title"), *_state(survey))), *problem_parts(survey.bad)]
        )
    children = None
    if not survey.tensors:
        children = draw_children(survey.good, survey.num_groups, survey.ask)
    odd = children and children.verdict and children.verdict.role == "warning"  # not in contents
    if survey.uniform and not survey.tensors and not odd:
        below = children.parts if children else ()
        return _stack([_short_line(survey), *below, *problem_parts(survey.bad)])
    if children is not None and children.parts:
        notes = note_parts(survey.good)
        title = _title(survey, children)
        problems = problem_parts(survey.bad)
        return _stack([title, *children.parts, *differences, *notes, *problems])
    if survey.tensors and survey.uniform and not survey.first.get("shape") and not survey.plans:
        values = head_words(survey.first)
        if values and survey.classes is not None:
            line = _short_line(survey, f"{values} ({survey.first.get('dtype')})")
            return _stack([line, *problem_parts(survey.bad)])
    pictures = take_pictures(survey.good)
    drawing = _drawing(survey, pictures)
    heats = pictures.heats if drawing.left_out else {}
    told = _compared(survey)
    agreeing = [plan.replicas for plan in survey.plans]
    if survey.pattern is not None:
        agreeing = [survey.pattern.groups]
    table: Part = rank_table({**survey.good, **survey.bad}, told, agreeing, heats)
    if drawing.parts:
        legend = [] if drawing.left_out else pictures.legend()
        table = Beside((Stack((*drawing.parts, *legend)), table))
    return _stack(
        [
            _title(survey),
            *([survey.plan_note] if survey.plan_note else []),
            table,
            *(pictures.legend() if drawing.left_out else []),
            *place_parts(survey.good),
            *note_parts(survey.good, drawn=bool(survey.plans), ask=survey.ask),
            *problem_parts(survey.bad),
            *differences,
            *detail_parts(survey.good),
        ]
    )


def _stack(children: list[Part]) -> Part:
    title = children[0]
    if len(children) == 1 or not isinstance(title, Line):
        return title if len(children) == 1 else Stack(tuple(children))
    return Card(title, tuple(children[1:]))


def _where(survey: Survey) -> str:
    plural = "" if survey.num_workers == 1 else "s"
    return f"{survey.num_workers} worker{plural}"


def _short_line(survey: Survey, words: str | None = None) -> Line:
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


def _title(survey: Survey, children: Children | None = None) -> Line:
    spans = [Text(survey.name, "title"), Text(f" · {_value_words(survey)}")]
    told = children.verdict if children else None
    verdict = told or _verdict(survey)
    if verdict is not None:
        spans += [Text(" · "), _marked(verdict)]
    return Line((*spans, *_state(survey)))


def _marked(verdict: Text) -> Text:
    """Put a mark in front that tells good from bad without colour."""
    if verdict.role == "warning":
        return Text(f"≠ {verdict.text}", "warning")
    return Text(f"✓ {verdict.text}", "good") if verdict.text.startswith("equal") else verdict


def _value_words(survey: Survey) -> str:
    where, good = _where(survey), survey.good
    told = not survey.inferred or survey.plans[0].sharded  # what is equal anywhere needs no words
    if told and survey.plans and len({plan.logical for plan in survey.plans}) == 1:
        plan = survey.plans[0]
        logical = {tensor_words(record, plan.logical) for record in good.values()}
        if len(logical) == 1:
            each = f", in each of {len(survey.plans)} groups" if len(survey.plans) > 1 else ""
            words = plan.words + (" (inferred)" if survey.inferred else "")
            return f"{logical.pop()} {words} on {where}{each}"
    summaries = {rank: summarize(record, 60) for rank, record in good.items()}
    groups = grouped(summaries)
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


def _verdict(survey: Survey) -> Text | None:
    kinds = {record.get("kind") for record in survey.good.values()}
    if len(survey.good) < 2 or len(kinds) > 1:
        return None
    if survey.disagree:
        return Text("DTensors disagree", "warning")
    if survey.classes is None:
        return Text("contents not compared", "muted")
    if survey.plans:
        return plan_verdict(survey.classes, survey.num_workers, survey.plans)
    if survey.pattern is not None and survey.num_groups == 1:
        equal, distinct = map(" and ".join, (survey.pattern.equal, survey.pattern.distinct))
        return Text(f"equal along {equal}, distinct along {distinct}", "muted")
    if survey.pattern is not None and survey.pattern.equal == ("groups",):
        return Text("equal in all groups, distinct within each", "muted")
    shapes = {str(record.get("shape")) for record in survey.good.values()}
    distinct = "shards distinct" if survey.tensors and len(shapes) == 1 else "all distinct"
    return free_verdict(survey.classes, survey.num_workers, survey.num_groups, distinct)


def _compared(survey: Survey) -> dict[int, str] | None:
    """Give the class letters if there is anything to compare: two values of one kind."""
    return None if _verdict(survey) is None else survey.classes


def _state(survey: Survey) -> list[Text]:
    spans = []
    states = grouped({rank: str(record["kind"]) for rank, record in survey.bad.items()})
    for kind, ranks in states:
        whole = len(states) == 1 and not survey.good and survey.num_workers > 1
        place = f"all {_where(survey)}" if whole else _workers(ranks)
        spans += [Text(" · "), Text(f"{place} {BAD[kind]}", role_of(kind))]
    return spans


def _drawing(survey: Survey, pictures: Pictures) -> Drawing:
    if survey.plan_note is not None and not survey.plans:
        return Drawing()
    if survey.inferred and not survey.plans[0].sharded:
        return draw_replicas(survey.plans[0], pictures)
    if survey.plans:
        suffix = " (inferred)" if survey.inferred else ""
        return draw_plans(survey.plans, survey.classes, pictures, suffix)
    shapes = survey.holders
    others = sorted(set(survey.good) - set(shapes))
    if not shapes or (survey.bad and others):
        return Drawing()
    return draw_apart(shapes, survey.classes, survey.pattern, others, pictures)
