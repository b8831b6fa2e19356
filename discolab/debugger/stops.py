"""What the debugger tells, as frozen records that show themselves: a `Stop`, an `Evaluated`.

A stop is what is known of all workers of a program at one moment; `snapshot` puts the state of its
lockstep in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..runtime.display import Pictured
from ..runtime.failures import name_ranks
from ..runtime.sources import lines_of, place
from ..views.parts import Part
from ..views.pictures import picture_of
from .lockstep import ABORTED, BLOCKED, HELD, OUT, PAUSED, RUNNING, Lockstep
from .records import Spot

Record = Mapping[str, Any]


@dataclass(frozen=True)
class WorkerAt:
    """One worker at a stop.

    Attributes
    ----------
    rank
    state
        ``paused``, ``running``, ``collective`` (it waits there for workers that stand), ``done``,
        ``error``, ``aborted``, or ``out``: not among those that run the program.
    stack
        The user's frames, the outermost first; empty if it is not in the program.
    words
        What it waits for, or does: ``waits in all_reduce #1 of float32[4] for worker 2 (paused)``.
    waits_for
        For whom it waits in a collective.
    note
        Why it stopped: ``breakpoint 2``, ``disco_assert failed: ...``, ``raising ValueError: x``.
    error
        What its program ended with, or what went wrong in the condition of a breakpoint.
    variables
        Name -> record (`views.describe`) of the frame that is shown; None: not asked for.
    changed
        The names in it whose values are not what they were at the stop before.
    more
        How many variables there are beyond those.
    found
        Of a NaN hunt: the operation, ``aten.div``, and its inputs and output by name.
    reason
        Why it stopped, as `records.Arrival.reason`; "" if it had none of its own.
    """

    rank: int
    state: str
    stack: tuple[Spot, ...] = ()
    words: str = ""
    waits_for: tuple[int, ...] = ()
    note: str = ""
    error: str = ""
    variables: Mapping[str, Record] | None = None
    changed: frozenset[str] = frozenset()
    more: int = 0
    found: tuple[str, Mapping[str, Record]] | None = None
    reason: str = ""

    @property
    def headline(self) -> str:
        """The first line of its error; what each member of a collective did comes after that."""
        return self.error.partition("\n")[0]

    @property
    def failed(self) -> str:
        """How it failed, in words: ``ended with ValueError: x``."""
        return f"ended with {self.headline}" if self.headline else "has failed"


@dataclass(frozen=True, repr=False)
class Stop(Pictured):
    """All workers of a program at one moment; shows itself.

    Attributes
    ----------
    name
        Of the program: ``Cell In[3]``.
    number
        Of the stop in its program, from 1.
    reason
        In words: ``breakpoint 1 at Cell In[3], line 5``.
    workers
        By rank.
    groups
        The workers that are paused, those at one place together; the furthest behind first.
    frame
        Which frame is shown: 0 is the innermost, 1 its caller.
    finished
        Whether the program has ended on all workers.
    is_past
        Whether it was recorded: nobody goes on from there.
    sources
        The lines of the files that the stacks are in, by file.
    """

    name: str
    number: int
    reason: str
    workers: tuple[WorkerAt, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    frame: int = 0
    finished: bool = False
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_past: bool = False

    @property
    def part(self) -> Part:
        """How it is drawn."""
        return picture_of(self)  # `picture` has registered it

    def spot(self, rank: int) -> Spot | None:
        """Where a worker is, in the frame that is shown; None if it is not in the program."""
        stack = self.workers[rank].stack
        return stack[-1 - min(self.frame, len(stack) - 1)] if stack else None


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Evaluated(Pictured):
    """The value of an expression on some workers; shows itself.

    Attributes
    ----------
    expression
    values
        Rank -> ``("value", record)``, as `views.describe` makes records, or ``("error", text)``.
    """

    expression: str
    values: Mapping[int, tuple[str, Any]]

    @property
    def errors(self) -> dict[int, str]:
        """The workers on which it failed, and how."""
        return {rank: value for rank, (kind, value) in self.values.items() if kind == "error"}

    @property
    def part(self) -> Part:
        """How it is drawn."""
        return picture_of(self)  # `picture` has registered it


# -- from a lockstep -------------------------------------------------------------------------------


def snapshot(lockstep: Lockstep, name: str, frame: int = 0) -> Stop:
    """How things are, without variables and sources; under the lock of the lockstep."""
    return Stop(
        name,
        lockstep.stops,
        _reason(lockstep),
        tuple(_worker_at(lockstep, rank) for rank in lockstep.state),
        lockstep.groups(),
        frame,
        lockstep.finished,
    )


def sources_of(workers: Sequence[WorkerAt]) -> dict[str, tuple[str, ...]]:
    """The lines of the files in which workers are."""
    files = {spot.file for worker in workers for spot in worker.stack}
    return {file: tuple(line.rstrip("\n") for line in lines_of(file)) for file in files}


def not_paused(lockstep: Lockstep, chosen: Sequence[int]) -> str:
    """Why none of some workers can go on, and who can."""
    words = {BLOCKED: "in a collective", OUT: "not in this program", "done": "at its end"}
    groups: dict[str, list[int]] = {}
    for rank in chosen:
        state = lockstep.state[rank]
        groups.setdefault(words.get(state, state), []).append(rank)
    told = ", ".join(f"{name_ranks(ranks)} {text}" for text, ranks in groups.items())
    return f"none of them is paused ({told}); those that can go on: " + name_ranks(
        lockstep.ranks(PAUSED)
    )


def _worker_at(lockstep: Lockstep, rank: int) -> WorkerAt:
    state = lockstep.state[rank]
    if state is OUT:
        return WorkerAt(rank, OUT)
    at = lockstep.at.get(rank)
    shown = RUNNING if state is HELD else state
    if at is not None:
        note = at.detail if at.fired else ""
        raising = f"raising {at.raising}" if at.raising and at.reason != "raised" else ""
        words = "stands at a breakpoint until the others have come" if state is HELD else ""
        note = "; ".join(filter(None, [note, raising]))
        reason = at.reason if at.fired else ""
        return WorkerAt(rank, shown, at.stack, words, note=note, error=at.error, reason=reason)
    wait = lockstep.waits.get(rank)
    if wait is not None:
        return WorkerAt(rank, shown, (), wait.words, wait.whom)
    ended = lockstep.ends.get(rank, "")
    return WorkerAt(rank, shown, words=ended if state == ABORTED else "", error=ended)


def _reason(lockstep: Lockstep) -> str:
    """Why the last stop was: ``breakpoint 1 at Cell In[3], line 5``."""
    if lockstep.finished:
        return "the program has ended"
    if not lockstep.settled:
        return "running"
    stopped = [rank for rank in lockstep.stopped if rank in lockstep.at]
    if not stopped:
        return "those that went on wait for others, or have ended"
    reasons: dict[str, list[int]] = {}
    for rank in stopped:
        at = lockstep.at[rank]
        if at.fired:
            words = {"entry": "first line", "step": "stepped", "pause": "paused"}
            told = at.detail or words.get(at.reason, at.reason)
            reasons.setdefault(told, []).append(rank)
    groups = lockstep.groups()
    here = lockstep.at[groups[0][0]].here
    where = place(here.file, here.line) if len(groups) == 1 else f"{len(groups)} places"
    if len(reasons) == 1:
        ((told, ranks),) = reasons.items()
        whose = "" if len(ranks) == len(stopped) else f" ({name_ranks(ranks)})"
        return f"{told}{whose} at {where}"
    told = ", ".join(f"{text} ({name_ranks(ranks)})" for text, ranks in reasons.items())
    return f"{told} at {where}"
