"""Stepping back and forth through what the workers have recorded: the controller's side.

A `Playback` reads the lines once, and asks for the variables of one moment at a time. The present
is what was recorded last when it was made.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ..ccl.board.rounds import in_order
from ..runtime.errors import ArgumentError
from ..runtime.session import Session
from . import recorded
from .looking import DebuggerError
from .recorded import Facts, Place, Step
from .records import Spot
from .stops import Stop, WorkerAt

MOST_STEPS = 2_000
_ANSWER = 5.0  # seconds that workers in other processes are given
_NO_RECORDING = "has no recording"  # it took no part, or its process is gone
_playbacks: weakref.WeakKeyDictionary[Session, Playback] = weakref.WeakKeyDictionary()


class Playback:
    """A recording, and a place in it.

    Attributes
    ----------
    session
    name
        Of the program.
    rows
        Lines of the program in order of time, each with the number of the recorded line on those
        workers that have run it.
    position
        The row that is shown.
    """

    def __init__(self, session: Session, name: str = "") -> None:
        self.session = session
        self.name = name or "the recording"
        self.facts = _facts(session)
        if not any(facts.lines for facts in self.facts.values()):
            raise DebuggerError(
                "nothing was recorded: run a cell with %%disco --trace (or --trace NAMES) first"
            )
        answers = session.look(recorded.steps, MOST_STEPS, timeout=_ANSWER)
        self._steps = {rank: [_step(one) for one in answer] for rank, answer in answers.items()}
        order = in_order(
            {rank: [step.place for step in steps] for rank, steps in self._steps.items()}
        )
        self.rows: list[dict[int, Step]] = [{} for _ in order]
        rows = {key: row for row, key in enumerate(order)}
        for rank, steps in self._steps.items():
            for step in steps:
                self.rows[rows[step.place]][rank] = step
        self.position = len(self.rows) - 1

    @property
    def steps_back(self) -> int:
        """How far the row that is shown is from the last."""
        return len(self.rows) - 1 - self.position

    def back(self, n: int = 1) -> Stop:
        """`n` lines back, or to the first that is kept; how things were then."""
        return self._go(-_count(n))

    def forth(self, n: int = 1) -> Stop:
        """`n` lines forth, or to the last; how things were then."""
        return self._go(_count(n))

    def _go(self, n: int) -> Stop:
        self.position = min(max(self.position + n, 0), len(self.rows) - 1)
        return self.stop()

    def stop(self) -> Stop:
        """How things were when the line had run at which this is."""
        last = self._last_steps()
        wanted = [(rank, step.number) for rank, (_, step) in last.items()]
        told = self.session.look(
            recorded.variables, wanted, ranks=[rank for rank, _ in wanted], timeout=_ANSWER
        )
        workers = tuple(
            self._worker_at(rank, last.get(rank), told.get(rank))
            for rank in range(self.session.num_workers)
        )
        files = dict.fromkeys(spot.file for worker in workers for spot in worker.stack)
        sources = {
            file: tuple(line.rstrip("\n") for line in linecache.getlines(file)) for file in files
        }
        return Stop(
            self.name,
            self.position + 1,
            self._reason(),
            workers,
            self._groups(last),
            sources=sources,
            is_past=True,
        )

    def _last_steps(self) -> dict[int, tuple[int, Step]]:
        """What each worker had run last by now: the row, and its step."""
        found: dict[int, tuple[int, Step]] = {}
        for row in range(self.position, -1, -1):
            for rank, step in self.rows[row].items():
                found.setdefault(rank, (row, step))
            if len(found) == len(self._steps):
                break
        return found

    def _worker_at(self, rank: int, at: tuple[int, Step] | None, told: Any) -> WorkerAt:
        if at is None:
            early = "nothing of it is recorded so early"
            return WorkerAt(rank, "out", words=early if self._steps.get(rank) else _NO_RECORDING)
        _, step = at
        stack = (*(Spot(*caller) for caller in step.callers), _spot(step))
        note = _note(step)
        if told is None:
            return WorkerAt(rank, "paused", stack, words="its values are not kept any more")
        held, changed = told
        return WorkerAt(
            rank, "paused", stack, note=note, variables=held, changed=frozenset(changed)
        )

    def _groups(self, last: Mapping[int, tuple[int, Step]]) -> tuple[tuple[int, ...], ...]:
        """Who is at one place, the furthest behind first."""
        groups: dict[Any, list[int]] = {}
        for rank, (row, step) in sorted(last.items(), key=lambda item: (item[1][0], item[0])):
            groups.setdefault((row, step.now, step.callers), []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def _reason(self) -> str:
        if not self.steps_back:
            return "recorded, the last line"
        steps = "1 step" if self.steps_back == 1 else f"{self.steps_back:,} steps"
        words = f"recorded, {steps} back"
        if self.position:
            return words
        dropped = max(facts.dropped for facts in self.facts.values())
        more = max(facts.lines - facts.dropped for facts in self.facts.values()) > MOST_STEPS
        if dropped or more:
            return f"{words}: the first that is kept"
        return f"{words}: where the recording begins"


def playback_of(session: Session, name: str = "") -> Playback:
    """The playback of what is recorded now; the same one until there is something newer."""
    found = _playbacks.get(session)
    if found is None or found.facts != _facts(session):
        found = _playbacks[session] = Playback(session, name)
    return found


def back(session: Session, n: int = 1, name: str = "") -> Stop:
    """Step back through what was recorded: how things were `n` lines before.

    Raises
    ------
    DebuggerError
        If nothing was recorded.
    """
    return playback_of(session, name).back(n)


def forth(session: Session, n: int = 1, name: str = "") -> Stop:
    """The other way."""
    return playback_of(session, name).forth(n)


def _facts(session: Session) -> dict[int, Facts]:
    answers = session.look(recorded.facts, timeout=_ANSWER)
    return {rank: Facts(*answer) for rank, answer in answers.items() if answer is not None}


def _step(answer: Sequence[Any]) -> Step:
    number, place, now, callers = answer
    return Step(number, Place(*place), now, tuple((f, line, name) for f, line, name in callers))


def _spot(step: Step) -> Spot:
    return Spot(step.place.file, step.now or step.place.ran, step.place.function)


def _note(step: Step) -> str:
    if step.place.entry:
        return ""
    return f"line {step.place.ran} has run" + ("" if step.now else ", and left the function")


def _count(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ArgumentError(f"give a number of lines, 1 or more; got {n!r:.60}")
    return n
