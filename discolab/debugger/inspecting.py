"""What the debugger asks of workers: functions for those that stand, and a probe for the others.

The first are run on the worker's own thread, in the frame in which it stands (`Port`). `depth`
counts frames of the user's from there: 0 is the innermost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.probes import probe
from ..runtime.worker import Worker
from ..views import describe
from . import frames
from .port import port_of


def variables(
    worker: Worker, frame: FrameType, depth: int, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The variables of a frame: name -> record."""
    return frames.variables(_frame(worker, frame, depth), names)


def evaluate(worker: Worker, frame: FrameType, depth: int, expression: str) -> Any:
    """The record of an expression's value in a frame."""
    return describe(frames.evaluate(_frame(worker, frame, depth), expression))


def assign(worker: Worker, frame: FrameType, depth: int, name: str, expression: str) -> Any:
    """Give a variable of a frame a new value; its record."""
    found = _frame(worker, frame, depth)
    frames.assign(found, name, expression)
    return describe(frames.evaluate(found, name))


@probe
def seen(worker: Worker, depth: int, with_variables: bool) -> tuple[Any, ...]:
    """The stack of a worker at this moment, and the variables of one of its frames."""
    innermost = sys._current_frames().get(worker.thread_id)
    if innermost is None or worker.current is None:
        return (), {}
    found = frames.user_frames(innermost)
    if not found:
        return (), {}
    stack = tuple(tuple(spot) for spot in frames.stack_of(innermost))
    shown = found[-1 - min(depth, len(found) - 1)]
    return stack, frames.variables(shown) if with_variables else {}


def _frame(worker: Worker, frame: FrameType, depth: int) -> FrameType:
    found = port_of(worker).frames or frames.user_frames(frame)
    if not 0 <= depth < len(found):
        raise ArgumentError(
            f"there is no frame {depth} on worker {worker.worker_id}: the innermost is 0, the "
            f"outermost {len(found) - 1}"
        )
    return found[-1 - depth]
