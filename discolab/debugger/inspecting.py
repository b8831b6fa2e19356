"""What the debugger asks of workers: functions for those that stand, and a probe for the others.

The first are run on the worker's own thread, in the frame in which it stands (`Port`). `depth`
counts frames of the user's from there: 0 is the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.frames import frame_of
from ..runtime.services import probe
from ..runtime.worker import Worker
from . import frames, nan_hunt
from .agent import port_of


def variables(
    worker: Worker, frame: FrameType, depth: int, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The variables of a frame: name -> record; "" -> how many there are, if that is more.

    Of the innermost frame ``(return) inner`` is first: what a function has returned that was
    stepped out of.
    """
    port = port_of(worker)
    port.looked = {}
    found = _frame(worker, frame, depth)
    returned = port.returned if not depth and names is None else {}
    values = {f"(return) {name}": frames.record_of(value) for name, value in returned.items()}
    records = frames.variables(found, names, into=port.looked)
    return {**values, **_counted(records, found if not names else None)}


def evaluate(worker: Worker, frame: FrameType, depth: int, expression: str) -> Any:
    """The record of an expression's value in a frame."""
    return frames.record_of(frames.evaluate(_frame(worker, frame, depth), expression))


def assign(worker: Worker, frame: FrameType, depth: int, name: str, expression: str) -> Any:
    """Give a variable of a frame a new value; its record."""
    found = _frame(worker, frame, depth)
    frames.assign(found, name, expression)
    return frames.record_of(frames.evaluate(found, name))


def found(worker: Worker, frame: FrameType) -> tuple[str, dict[str, Any]] | None:
    """The operation at which a NaN hunt has stopped, and its inputs and output: name -> record."""
    finding = nan_hunt.finding(worker)
    return None if finding is None else (finding.op, finding.records())


@probe
def seen(worker: Worker, depth: int, with_variables: bool) -> tuple[Any, ...]:
    """The stack of a worker at this moment, and the variables of one of its frames."""
    innermost = frame_of(worker.thread_id)
    if innermost is None or worker.current is None:
        return (), {}
    found = frames.user_frames(innermost)
    if not found:
        return (), {}
    stack = tuple(tuple(spot) for spot in frames.stack_of(innermost))
    shown = found[-1 - min(depth, len(found) - 1)]
    return stack, _counted(frames.variables(shown), shown) if with_variables else {}


@probe
def looked(worker: Worker) -> dict[str, Any]:
    """Of the variables that a worker is looking at those that it knows, of the others the type."""
    return dict(port_of(worker).looked)


def _counted(records: dict[str, Any], frame: FrameType | None) -> dict[str, Any]:
    count = 0 if frame is None else frames.number_of_variables(frame)
    return {**records, "": count} if count > len(records) else records


def _frame(worker: Worker, frame: FrameType, depth: int) -> FrameType:
    found = port_of(worker).frames or frames.user_frames(frame)
    if not 0 <= depth < len(found):
        raise ArgumentError(
            f"there is no frame {depth} on worker {worker.worker_id}: the innermost is 0, the "
            f"outermost {len(found) - 1}"
        )
    return found[-1 - depth]
