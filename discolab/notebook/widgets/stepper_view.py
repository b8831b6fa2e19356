"""One moment of a program that is stepped, as the debugger's panel knows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...debugger import Debugger, Stop
from ...debugger.breaks import Break
from ...debugger.inspecting import seen
from ...debugger.records import Spot
from ...debugger.stops import sources_of
from ...runtime.errors import DiscoError

_PATIENCE = 0.05  # seconds that workers that run are given to answer


@dataclass(frozen=True)
class View:
    """What there is to see at one moment.

    Attributes
    ----------
    state
        ``idle``, ``running``, ``paused`` or ``ended``.
    stop
        The workers; None if nothing was stepped yet.
    frame, focus
        Which frame of the stack is shown, and whose.
    source, tables
        Made by stepper_frame.py; the tables of variables are `stale` until the workers have told
        of those that there are now.
    pausing
        Whether the workers were told to stop where they are.
    """

    state: str
    count: int
    engine: str
    closed: bool
    stop: Stop | None = None
    frame: int = 0
    focus: int = 0
    source: Any = None
    tables: tuple[Any, ...] = ()
    stale: bool = False
    pausing: bool = False
    breaks: tuple[Break, ...] = ()


def places_now(debugger: Debugger) -> Stop | None:
    """Where the workers are that run; none waits for this."""
    stop, session = debugger.stop, debugger.session
    if stop is None or session.closed:
        return None
    try:
        stacks = session.look(seen, 0, False, timeout=_PATIENCE)
        doing = {one.rank: one for one in session.status()}
    except DiscoError:
        return None
    workers = []
    for worker in stop.workers:
        stack, _ = stacks.get(worker.rank, ((), {}))
        if worker.state in ("running", "collective") and stack:
            worker = replace(worker, stack=tuple(Spot(*spot) for spot in stack))
        status = doing.get(worker.rank)
        if worker.state == "running" and status is not None and status.state == "waiting":
            worker = replace(worker, words=f"waits {status.detail}")
        workers.append(worker)
    return replace(stop, workers=tuple(workers), sources=sources_of(workers))


def state_of(stop: Stop | None) -> str:
    """``idle``, ``running``, ``paused`` or ``ended``."""
    if stop is None:
        return "idle"
    if stop.finished:
        return "ended"
    busy = any(worker.state == "running" for worker in stop.workers)
    return "running" if busy or not stop.groups else "paused"
