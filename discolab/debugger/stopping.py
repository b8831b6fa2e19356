"""Stopping from within a program: what `breakpoint()` and failed assertions do on a worker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from ..runtime.actions import Command, DiscoAction
from ..runtime.user_code import is_user
from ..runtime.worker import Worker, current_worker_or_none
from .port import Port, port_of
from .tracer import Tracer


def is_attached(worker: Worker) -> bool:
    """Whether there is a debugger that is told if this worker stops."""
    return port_of(worker).attached


def stop_here(reason: str, detail: str = "", frame: FrameType | None = None) -> bool:
    """Stop the calling worker until the debugger has it go on.

    In a program that is not traced, its frames and what they call are from then on, until the call
    ends.

    Parameters
    ----------
    reason, detail
        See `records.Arrival`.
    frame
        The user's frame in which it stops; None: the nearest to the caller.

    Returns
    -------
    bool
        Whether it has stopped: False outside of a worker and where no debugger is attached.
    """
    worker = current_worker_or_none()
    if worker is None or not is_attached(worker):
        return False
    if frame is None:
        frame = nearest_user_frame(sys._getframe(1))
    if frame is None:
        return False
    port = port_of(worker)
    if port.tracer is None:
        _trace_from_now_on(port, frame)
    assert port.tracer is not None
    port.tracer.stop_at(frame, reason, detail)
    return True


def nearest_user_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame of the user's code from `frame` outwards."""
    while frame is not None and not is_user(frame.f_code):
        frame = frame.f_back
    return frame


def _trace_from_now_on(port: Port, frame: FrameType) -> None:
    """Trace the rest of the call that runs; the next command finds a worker that is not traced."""
    worker = port.worker
    tracer = port.tracer = Tracer(worker, port)
    before = list(worker.dispatch)

    def ending(do: Callable[[Command], None]) -> Callable[[Command], None]:
        def end(command: Command) -> None:
            worker.dispatch[:] = before
            tracer.disarm()
            port.tracer = None
            do(command)

        return end

    for action in DiscoAction:
        worker.dispatch[action] = ending(before[action])
    tracer.arm(frame, "continue")
