"""A stop: what is known of all workers of a program at one moment, as frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..runtime.drawn import Pictured
from ..views.parts import Part
from ..views.pictures import picture_of
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
