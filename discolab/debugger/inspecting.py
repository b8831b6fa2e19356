"""The variables of a program's workers: what the controller asks for, and what workers answer.

Functions for workers that stand are run on the worker's own thread, in the frame in which it stands
(`DebugAgent`). `depth` counts frames of the user's from there: 0 is the innermost. Of others some
is known by probes. An `Inspector` puts together what all have answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from ..runtime.errors import ArgumentError
from ..runtime.frames import frame_of
from ..runtime.interpreter_lock import is_on
from ..runtime.services import probe
from ..runtime.worker import Worker
from . import frames, nan_hunt
from .agent import agent_of
from .controller import DebugController, Ranks
from .lockstep import BLOCKED, PAUSED, RUNNING
from .records import Spot
from .stops import Stop, WorkerAt, sources_of

_LOOKING = 3.0  # seconds that workers are given to say what their variables are

# -- on the workers ------------------------------------------------------------------------------


def variables(
    worker: Worker, frame: FrameType, depth: int, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The variables of a frame: name -> record; "" -> how many there are, if that is more.

    Of the innermost frame ``(return) inner`` is first: what a function has returned that was
    stepped out of.
    """
    agent = agent_of(worker)
    agent.looked = {}
    found = _frame(worker, frame, depth)
    returned = agent.returned if not depth and names is None else {}
    values = {f"(return) {name}": frames.record_of(value) for name, value in returned.items()}
    records = frames.variables(found, names, into=agent.looked)
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
    if not is_on():  # the frames of a thread that runs can't be looked into
        places = frames.places_beside(worker) if worker.current is not None else ()
        return tuple(tuple(Spot(*place)) for place in places), {}
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
    return dict(agent_of(worker).looked)


def _counted(records: dict[str, Any], frame: FrameType | None) -> dict[str, Any]:
    count = 0 if frame is None else frames.number_of_variables(frame)
    return {**records, "": count} if count > len(records) else records


def _frame(worker: Worker, frame: FrameType, depth: int) -> FrameType:
    found = agent_of(worker).frames or frames.user_frames(frame)
    if not 0 <= depth < len(found):
        raise ArgumentError(
            f"there is no frame {depth} on worker {worker.worker_id}: the innermost is 0, the "
            f"outermost {len(found) - 1}"
        )
    return found[-1 - depth]


# -- on the controller ---------------------------------------------------------------------------

VARIABLES, EVALUATE, ASSIGN, FOUND = (
    f"{__name__}:{function.__name__}" for function in (variables, evaluate, assign, found)
)
"""What a worker that stands can be asked; see `DebugController.ask`."""


@dataclass(frozen=True)
class _Seen:
    """The variables of a worker that were shown last: of which frame, at which stop."""

    whose: Any
    number: int
    records: Mapping[str, Any]
    changed: frozenset[str]


def _is_same(before: Any, now: Any) -> bool:
    """Whether two records tell the same; NaN is NaN, which it isn't to ``==``."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return before.keys() == now.keys() and all(_is_same(before[k], now[k]) for k in now)
    if isinstance(before, list | tuple) and isinstance(now, list | tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    return bool(before == now or (before != before and now != now))


class Inspector:
    """Puts the workers' variables into a `Stop`; one a session.

    It remembers what was shown last, to mark what has changed.
    """

    def __init__(self, controller: DebugController) -> None:
        self._controller = controller
        self._seen: dict[tuple[int, int], _Seen] = {}  # by rank and frame

    def forget(self) -> None:
        """Another program begins: nothing of it was shown yet."""
        self._seen.clear()

    def where(self, frame: int, ranks: Ranks, timeout: float) -> Stop:
        """How things are now, with the variables of a frame of these workers; see `Debugger`."""
        controller = self._controller
        stop = controller.stop(frame)
        chosen = set(controller.ranks(ranks))
        standing = [w.rank for w in stop.workers if w.state == PAUSED and w.rank in chosen]
        deepest = max((len(stop.workers[rank].stack) for rank in standing), default=0)
        if standing and frame >= deepest:
            raise ArgumentError(
                f"there is no frame {frame}: the innermost is 0, the outermost {deepest - 1}"
            )
        standing = [rank for rank in standing if frame < len(stop.workers[rank].stack)]
        found = controller.ask(standing, VARIABLES, (frame, None), min(timeout, _LOOKING))
        late = [rank for rank, (well, _) in found.items() if not well]
        if late:  # they are held up by a value: the others are known
            known = controller.session.look(looked, ranks=late)
            found.update({rank: (True, records) for rank, records in known.items() if records})
        others = [
            w.rank for w in stop.workers if w.state in (RUNNING, BLOCKED) and w.rank in chosen
        ]
        looks = controller.session.look(seen, frame, True, ranks=others) if others else {}
        workers = []
        for worker in stop.workers:
            well, records = found.get(worker.rank, (False, None))
            if worker.rank in looks:
                stack, records = looks[worker.rank]
                well = bool(stack)
                worker = replace(worker, stack=tuple(Spot(*spot) for spot in stack))
            if well:
                worker = self._with_variables(worker, records, stop, frame)
            elif records:
                worker = replace(worker, error=str(records))
            workers.append(worker)
        workers = self._with_operations(workers, standing)
        return replace(stop, workers=tuple(workers), sources=sources_of(workers))

    def _with_operations(
        self, workers: Sequence[WorkerAt], standing: Sequence[int]
    ) -> list[WorkerAt]:
        """Ask those that a NaN hunt has stopped for the operation, its inputs and its output."""
        with self._controller.lock:
            lockstep = self._controller.lockstep
            at = lockstep.at if lockstep is not None else {}
            hunted = [rank for rank in standing if rank in at and at[rank].reason == "non-finite"]
        told = self._controller.ask(hunted, FOUND, (), _LOOKING)
        return [
            replace(worker, found=told[worker.rank][1])
            if told.get(worker.rank, (False, None))[0]
            else worker
            for worker in workers
        ]

    def _with_variables(
        self, worker: WorkerAt, records: Mapping[str, Any], stop: Stop, frame: int
    ) -> WorkerAt:
        """Mark what has changed since it was shown last."""
        count = records.get("", 0)  # see `inspecting.variables`
        records = {name: record for name, record in records.items() if name}
        own = sum(not name.startswith("(") for name in records)
        stack = worker.stack
        spot = stack[-1 - min(frame, len(stack) - 1)]
        whose = (spot.file, spot.function, len(stack) - frame)
        before = self._seen.get((worker.rank, frame))
        changed: frozenset[str] = frozenset()
        if before is not None and before.whose == whose:
            changed = before.changed
            if before.number != stop.number:
                changed = frozenset(
                    n for n, r in records.items() if not _is_same(before.records.get(n), r)
                )
        self._seen[worker.rank, frame] = _Seen(whose, stop.number, records, changed)
        more = max(count - own, 0)
        return replace(worker, variables=records, changed=changed, more=more)
