"""Ask the workers for records of a DRef, and draw it: what a notebook shows for one.

Runs on the controller. It waits at most a second: a worker that is busy is drawn as busy.
"""

from __future__ import annotations

from typing import Any, Literal

from ..runtime.dref import DRef
from ..runtime.errors import DiscoError, WaitTimeoutError
from ..runtime.failures import Failure
from .describe import describe
from .dref_view import dref_parts
from .html import render_html
from .parts import Part
from .text import render_text

_PATIENCE = 1.0  # seconds
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
    try:
        answers = session.peek(described, timeout=_PATIENCE)
    except WaitTimeoutError as exc:
        answers = exc.partial
        busy = [status for status in session.status() if status.state != "idle"]
        if all(status.detail.startswith(_DRAWING) for status in busy):
            session.interrupt(timeout=0.2)  # nothing but a slow __repr__ is in the way
    states = {status.rank: status for status in session.status()}
    records: dict[int, dict[str, Any]] = {}
    for rank in range(session.num_workers):
        answer = answers.get(rank)
        if isinstance(answer, Failure):
            records[rank] = {
                "kind": "failure",
                "message": f"{answer.headline} (in {answer.summary})",
            }
        elif answer is None:
            status = states[rank]
            records[rank] = {"kind": "pending", "message": f"{status.state} {status.detail}"}
        else:
            records[rank] = answer
    return dref_parts(
        records,
        name=ref.name,
        num_workers=session.num_workers,
        placements=ref.placements,
        num_groups=session.num_groups,
    )


def dref_bundle(ref: DRef) -> dict[str, str]:
    """Text and HTML of a DRef for a notebook; never raises for the state of the session."""
    try:
        part = draw_dref(ref)
    except DiscoError:
        return {"text/plain": repr(ref)}
    return {"text/plain": render_text(part), "text/html": render_html(part)}


DRef.draw = staticmethod(dref_bundle)
