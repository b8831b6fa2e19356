"""Ask the workers for records of a DRef, and draw it: what a notebook shows for one.

Runs on the controller. It waits at most a second: a worker that is busy is drawn as busy, one that
has died as dead.
"""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import Any, Literal

from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError, DiscoError
from ...runtime.failures import Failure
from ...runtime.registers import OWN
from ..facts.describe import describe
from ..parts import Part
from ..render.bundle import Shown, bundle_of
from .answers import answers_of
from .children import differing_tensors
from .dref_view import dref_parts
from .far_rows import add_far_rows
from .notes import BAD
from .replicas import replica_parts
from .states import failure_record, state_record
from .survey import must_agree

_PATIENCE = 0.8  # seconds, with what status takes less than one
_DRAWING = "drawing a value"
_MOST_LOOKED_INTO = 3  # parameters or items that differ
describe.disco_command = _DRAWING  # type: ignore[attr-defined]  # what status calls it


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
    session = ref.session
    deadline = time.monotonic() + patience
    described = session.call_packed(describe, ref, stats)
    described.name = OWN
    answers = answers_of(described, patience)
    records: dict[int, dict[str, Any]] = {}
    lacking = [rank for rank in range(session.num_workers) if answers.get(rank) is None]
    states = session.status() if lacking else []
    busy = [status for status in states if status.state not in ("idle", "dead")]
    if busy and all(_is_drawing(status.detail) for status in busy):
        session.interrupt(timeout=0.2)  # nothing but a slow __repr__ is in the way
    for rank in range(session.num_workers):
        answer = answers.get(rank)
        if isinstance(answer, Failure):
            records[rank] = failure_record(answer)
        else:
            records[rank] = answer or state_record(states[rank])
    good = {rank: record for rank, record in records.items() if record["kind"] not in BAD}
    add_far_rows(session, ref, good, deadline)
    layout = layout_of(ref)
    differences = _differences(ref, records, layout, deadline)
    return dref_parts(records, name=ref.name, differences=differences, **layout)


def _is_drawing(detail: str) -> bool:
    """Whether nothing else runs: also if the __repr__ sleeps, which status says in front."""
    return detail.startswith(_DRAWING) or detail.endswith(f" in {_DRAWING}")


def _differences(
    ref: DRef, records: dict[int, dict[str, Any]], layout: dict[str, Any], deadline: float
) -> list[Part]:
    """Where values differ that should be equal: the value itself, or parameters and items of it."""
    classes, sets = must_agree(records, **layout)
    if len(classes) > 1:
        return replica_parts(ref.session, ref, classes, deadline - time.monotonic(), sets)
    try:
        good = {rank: record for rank, record in records.items() if record["kind"] not in BAD}
        odd = differing_tensors(good, layout["num_groups"])
    except Exception:  # a view never raises
        return []
    return [
        part
        for name, keys, sets in odd[:_MOST_LOOKED_INTO]
        for part in replica_parts(
            ref.session, ref, keys, deadline - time.monotonic(), sets, path=name
        )
    ]


def layout_of(ref: DRef) -> dict[str, Any]:
    """What is known of how workers hold a DRef, as `dref_parts` takes it."""
    return {
        "num_workers": ref.session.num_workers,
        "placements": ref.placements,
        "num_groups": ref.session.num_groups,
        "mesh_shape": _mesh_shape(ref),
        "axes": _axes(ref),
    }


def _mesh_shape(ref: DRef) -> tuple[int, ...] | None:
    """The session's mesh, if the placements are for its axes."""
    mesh = ref.session._mesh
    if mesh is None or not isinstance(ref.placements, list | tuple):
        return None
    return mesh.sizes if len(mesh.sizes) == len(ref.placements) > 1 else None


def _axes(ref: DRef) -> dict[str, int] | None:
    """The axes of the session's mesh, if it has all workers in order."""
    mesh = ref.session.current_mesh
    if mesh is None or list(mesh.ranks) != list(range(ref.session.num_workers)):
        return None
    return dict(zip(mesh.axes, mesh.sizes, strict=True))


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


def dref_bundle(ref: DRef) -> dict[str, str]:
    """Text and HTML of a DRef for a notebook; never raises for the state of the session."""
    try:
        part = draw_dref(ref)
    except DiscoError:
        return {"text/plain": repr(ref)}
    return bundle_of(part)
