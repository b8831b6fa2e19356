"""Ask the workers for records of a DRef, and draw it: what a notebook shows for one.

Runs on the controller. It waits at most a second: a worker that is busy is drawn as busy, one that
has died as dead.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from ..runtime.dref import DRef
from ..runtime.errors import DiscoError, WaitTimeoutError
from ..runtime.failures import Failure
from ..runtime.status import WorkerStatus
from .describe import describe
from .dref_view import dref_parts
from .html import render_html
from .parts import Part
from .text import render_text

_PATIENCE = 0.8  # seconds, with what status takes less than one
_DRAWING = "drawing a value"
describe.disco_command = _DRAWING  # type: ignore[attr-defined]  # what status calls it


def draw_dref(ref: DRef, stats: Literal["auto"] | bool = "auto") -> Part:
    """The picture of a DRef as parts.

    Parameters
    ----------
    ref
        Of a live session.
    stats
        See `describe`: ``"auto"`` reads statistics of tensors up to 4 MiB.

    Raises
    ------
    DiscoError
        If the session is closed, or this is a worker of it.
    """
    session = ref.session
    described = session.call_packed(describe, ref, stats)
    answers = answers_of(described, _PATIENCE)
    records: dict[int, dict[str, Any]] = {}
    lacking = [rank for rank in range(session.num_workers) if answers.get(rank) is None]
    states = session.status() if lacking else []
    busy = [status for status in states if status.state not in ("idle", "dead")]
    if busy and all(status.detail.startswith(_DRAWING) for status in busy):
        session.interrupt(timeout=0.2)  # nothing but a slow __repr__ is in the way
    for rank in range(session.num_workers):
        answer = answers.get(rank)
        if isinstance(answer, Failure):
            message = f"{answer.headline} (in {answer.summary})"
            records[rank] = {"kind": "failure", "message": message}
        else:
            records[rank] = answer or _without_answer(states[rank])
    return dref_parts(
        records,
        name=ref.name,
        num_workers=session.num_workers,
        placements=ref.placements,
        num_groups=session.num_groups,
        mesh_shape=_mesh_shape(ref),
    )


def _mesh_shape(ref: DRef) -> tuple[int, ...] | None:
    """The session's mesh, if the placements are for its axes."""
    mesh = ref.session._mesh
    if mesh is None or not isinstance(ref.placements, list | tuple):
        return None
    return mesh.sizes if len(mesh.sizes) == len(ref.placements) > 1 else None


def answers_of(ref: DRef, patience: float) -> dict[int, Any]:
    """What workers answer within `patience` seconds; of one that has died nothing."""
    session = ref.session
    ticket = session.request(ref)
    deadline = time.monotonic() + patience
    try:
        return session.wait(ticket, patience)
    except WaitTimeoutError:
        pass
    except DiscoError:  # some have died: those that live answer all the same
        gone = {status.rank for status in session.status() if status.state == "dead"}
        if not gone:
            raise
        while not gone.issuperset(ticket.missing) and time.monotonic() < deadline:
            ticket.acquire(0.02)
    return dict(ticket.values)


def _without_answer(status: WorkerStatus) -> dict[str, Any]:
    """The record of a worker that has not answered."""
    if status.state == "dead":
        return {"kind": "dead", "message": status.detail}
    if status.state == "idle":  # as far as is known: it may be stopped
        return {"kind": "missing", "message": status.detail}
    return {"kind": "pending", "message": f"{status.state} {status.detail}"}


def dref_bundle(ref: DRef) -> dict[str, str]:
    """Text and HTML of a DRef for a notebook; never raises for the state of the session."""
    try:
        part = draw_dref(ref)
    except DiscoError:
        return {"text/plain": repr(ref)}
    return {"text/plain": render_text(part), "text/html": render_html(part)}


DRef.draw = staticmethod(dref_bundle)
