"""Draws a DRef: one name for a value that each worker holds.

`draw_dref` asks the workers, summarises their records once, looks for differences, and has
`value_parts`, which is pure, make a picture of them. Runs on the controller; it waits at most a
second: failed, busy and dead workers are part of the picture.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError
from ..formats import format_workers
from ..parts import Card, HStack, Line, Part, Text, VStack
from ..pictures import Shown, picture_of
from ..summary import format_tensor, format_values, summarize
from .ask import ask_workers, layout_of
from .children import draw_children
from .contents import NO_VALUE, free_verdict, grouped, plan_verdict
from .differences import difference_parts
from .drawings import Drawing, Pictures, draw_apart, draw_plans, draw_replicas, take_pictures
from .relations import question, relation_of
from .summary import LayoutFacts, ValueSummary, summarize_value
from .tables import detail_parts, note_parts, place_parts, problem_parts, rank_table, role_of

_PATIENCE = 0.8  # seconds, with what status takes less than one


def draw_dref(
    ref: DRef, stats: Literal["auto"] | bool = "auto", patience: float = _PATIENCE
) -> Part:
    """The picture of a DRef as parts.

    Parameters
    ----------
    ref
        Of a live session.
    stats
        See `describe`: ``"auto"`` reads statistics of tensors up to 4 MiB.
    patience
        Seconds to wait for the workers; one that has not answered by then is drawn as busy.

    Raises
    ------
    DiscoError
        If the session is closed, or this is a worker of it.
    """
    deadline = time.monotonic() + patience
    records = ask_workers(ref, stats, deadline)
    layout = layout_of(ref.session, ref)
    try:
        summary = summarize_value(records, ref.name, layout)
        summary = dataclasses.replace(summary, relation=relation_of(ref, summary, deadline))
        part = _draw(summary, difference_parts(ref, summary, deadline))
        restored = [
            Text(f"restored on {format_workers(ranks)}: {how}", "muted")
            for how, ranks in _joined(ref.session.how_restored(ref)).items()
        ]
        if restored and isinstance(part, Card):
            return Card(part.title, (*part.children, *restored))
        return VStack((part, *restored)) if restored else part
    except Exception as error:  # a view never raises
        return _undrawn(ref.name, error)


def _joined(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks of which the same is said."""
    found: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        found.setdefault(text, []).append(rank)
    return found


def view(ref: DRef, stats: Literal["auto"] | bool = "auto", timeout: float = 60.0) -> Shown:
    """Draw a DRef, on demand with statistics and a comparison of tensors of any size.

    Parameters
    ----------
    ref
        Of a live session.
    stats
        True: read all values, however many. False: read none. ``"auto"``: of large tensors only a
        few, as the last line of a cell does.
    timeout
        Seconds to wait for the workers; one that has not answered by then is drawn as busy.

    Raises
    ------
    ArgumentError
        If something else is given than a DRef, or an option is not as above.
    DiscoError
        If the session is closed, or this is a worker of it.
    """
    if not isinstance(ref, DRef):
        raise ArgumentError(f"view draws what a DRef names: got {type(ref).__name__}")
    if not (isinstance(stats, bool) or stats == "auto"):
        raise ArgumentError(f'view: stats is True, False or "auto": got {stats!r:.60}')
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not number or not 0 <= timeout < math.inf:
        raise ArgumentError(f"view: timeout is a number of seconds: got {timeout!r:.60}")
    return Shown(draw_dref(ref, stats, timeout))


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
        Where values differ that should be equal, see `differences.difference_parts`.

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
        known = LayoutFacts(
            num_workers=num_workers,
            placements=placements,
            num_groups=num_groups,
            mesh_shape=mesh_shape,
            axes=axes,
        )
        return _draw(summarize_value(records, name, known), differences)
    except Exception as error:  # a view never raises
        return _undrawn(name, error)


def _undrawn(name: str | None, error: Exception) -> Part:
    return Text(f"DRef {name}: this view could not be drawn: {type(error).__name__}", "error")


def _draw(summary: ValueSummary, differences: Sequence[Part] = ()) -> Part:
    """The least that says it all: a line, a table of what values hold, or rows and rectangles."""
    problems = problem_parts(summary.bad)
    if not summary.good:
        return _stack([Line((Text(summary.name, "title"), *_state(summary))), *problems])
    if not summary.tensors:
        children = draw_children(summary.good, summary.num_groups, summary.ask)
        odd = children and children.verdict and children.verdict.role == "warning"
        if summary.uniform and not odd:  # what is odd may be something else than the contents
            return _stack([_short_line(summary), *(children.parts if children else ()), *problems])
        if children is not None and children.parts:
            title = _title(summary, children.verdict or _verdict(summary))
            notes = note_parts(summary.good)
            return _stack([title, *children.parts, *differences, *notes, *problems])
    elif summary.uniform and not summary.first.get("shape") and not summary.plans:
        values = format_values(summary.first)
        if values and summary.classes is not None:
            line = _short_line(summary, f"{values} ({summary.first.get('dtype')})")
            return _stack([line, *problems])
    return _rows_and_rectangles(summary, differences, problems)


def _rows_and_rectangles(
    summary: ValueSummary, differences: Sequence[Part], problems: Sequence[Part]
) -> Part:
    """A row for each worker, beside it tensors as rectangles."""
    verdict = _verdict(summary)
    pictures = take_pictures(summary.good)
    drawing = _drawing(summary, pictures)
    table: Part = rank_table(
        {**summary.good, **summary.bad},
        summary.classes if verdict else None,  # no letters where nothing is compared
        [plan.replicas for plan in summary.plans]
        if summary.pattern is None
        else [summary.pattern.groups],
        pictures.heats if drawing.left_out else {},
    )
    if drawing.parts:
        legend = [] if drawing.left_out else pictures.legend()
        table = HStack((VStack((*drawing.parts, *legend)), table))
    return _stack(
        [
            _title(summary, verdict),
            *([summary.plan_note] if summary.plan_note else []),
            table,
            *(pictures.legend() if drawing.left_out else []),
            *place_parts(summary.good),
            *note_parts(summary.good, drawn=bool(summary.plans), ask=summary.ask),
            *problems,
            *differences,
            *detail_parts(summary.good),
        ]
    )


def _stack(children: list[Part]) -> Part:
    title = children[0]
    if len(children) == 1 or not isinstance(title, Line):
        return title if len(children) == 1 else VStack(tuple(children))
    return Card(title, tuple(children[1:]))


def _where(summary: ValueSummary) -> str:
    plural = "" if summary.num_workers == 1 else "s"
    return f"{summary.num_workers} worker{plural}"


def _short_line(summary: ValueSummary, words: str | None = None) -> Line:
    words = summarize(summary.first) if words is None else words
    if summary.bad:
        place = grouped(
            dict.fromkeys(summary.good, "workers" if len(summary.good) > 1 else "worker")
        )
        where = " ".join(place[0])
    else:
        where = _where(summary) if summary.num_workers == 1 else f"all {_where(summary)}"
    spans = [Text(summary.name, "title"), Text(f": {words} on {where}")]
    if summary.classes is None and summary.num_workers > 1:
        spans.append(Text(" · contents not compared", "muted"))
    return Line((*spans, *_state(summary)))


def _title(summary: ValueSummary, verdict: Text | None) -> Line:
    spans = [Text(summary.name, "title"), Text(f" · {_value_words(summary)}")]
    if verdict is not None:
        spans += [Text(" · "), _marked(verdict)]
    return Line((*spans, *_state(summary)))


def _marked(verdict: Text) -> Text:
    """Put a mark in front that tells good from bad without colour."""
    if verdict.role == "warning":
        return Text(f"≠ {verdict.text}", "warning")
    return Text(f"✓ {verdict.text}", "good") if verdict.text.startswith("equal") else verdict


def _value_words(summary: ValueSummary) -> str:
    where, good = _where(summary), summary.good
    told = not summary.inferred or summary.plans[0].sharded  # what is equal anywhere needs no words
    if told and summary.plans and len({plan.logical for plan in summary.plans}) == 1:
        plan = summary.plans[0]
        logical = {format_tensor(record, plan.logical) for record in good.values()}
        if len(logical) == 1:
            each = f", in each of {len(summary.plans)} groups" if len(summary.plans) > 1 else ""
            words = plan.words + (" (inferred)" if summary.inferred else "")
            return f"{logical.pop()} {words} on {where}{each}"
    summaries = {rank: summarize(record, 60) for rank, record in good.items()}
    groups = grouped(summaries)
    if len(groups) == 1:
        return f"{groups[0][0]} on {where}"
    kinds = {format_tensor({**r, "shape": []}).replace("[]", "", 1) for r in good.values()}
    if summary.tensors and len(kinds) == 1:
        return f"{kinds.pop()}, shapes differ, on {where}"
    types = {str(record.get("type", record.get("kind"))) for record in good.values()}
    if not summary.tensors and len(types) == 1:
        return f"{types.pop()} on {where}"
    if len(groups) <= 3:
        return ", ".join(f"{text} on {_workers(ranks)}" for text, ranks in groups)
    return f"mixed values on {where}"


def _workers(ranks: str) -> str:
    return f"worker {ranks}" if ranks.isdigit() else f"workers {ranks}"


def _verdict(summary: ValueSummary) -> Text | None:
    kinds = {record.get("kind") for record in summary.good.values()}
    if len(summary.good) < 2 or len(kinds) > 1:
        return None
    if summary.disagree:
        return Text("DTensors disagree", "warning")
    if summary.classes is None:
        return Text("contents not compared", "muted")
    if summary.plans:
        return plan_verdict(summary.classes, summary.num_workers, summary.plans)
    if summary.pattern is not None and summary.num_groups == 1:
        equal, distinct = map(" and ".join, (summary.pattern.equal, summary.pattern.distinct))
        return Text(f"equal along {equal}, distinct along {distinct}", "muted")
    if summary.pattern is not None and summary.pattern.equal == ("groups",):
        return Text("equal in all groups, distinct within each", "muted")
    if summary.unrelated:
        return summary.relation or question(summary)
    return free_verdict(summary.classes, summary.num_workers, summary.num_groups)


def _state(summary: ValueSummary) -> list[Text]:
    spans = []
    states = grouped({rank: str(record["kind"]) for rank, record in summary.bad.items()})
    for kind, ranks in states:
        whole = len(states) == 1 and not summary.good and summary.num_workers > 1
        place = f"all {_where(summary)}" if whole else _workers(ranks)
        spans += [Text(" · "), Text(f"{place} {NO_VALUE[kind]}", role_of(kind))]
    return spans


def _drawing(summary: ValueSummary, pictures: Pictures) -> Drawing:
    if summary.plan_note is not None and not summary.plans:
        return Drawing()
    if summary.inferred and not summary.plans[0].sharded:
        return draw_replicas(summary.plans[0], pictures)
    if summary.plans:
        suffix = " (inferred)" if summary.inferred else ""
        return draw_plans(summary.plans, summary.classes, pictures, suffix)
    shapes = summary.holders
    others = sorted(set(summary.good) - set(shapes))
    if not shapes or (summary.bad and others):
        return Drawing()
    return draw_apart(shapes, summary.classes, summary.pattern, others, pictures)


picture_of.register(DRef, draw_dref)
