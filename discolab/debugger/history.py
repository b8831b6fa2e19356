"""What the workers have recorded of a program, looked at afterwards: the controller's side.

It can be asked for while the program runs or stands, and after it. The worker's side is
recording.py.

A `History` is one variable over time. Lines of several workers belong together if they are the same
line for the same time. The order of such rows keeps that of each worker, as far as they agree on
one.

A `Playback` goes back and forth through the lines: it reads them once, and asks for the variables
of one moment at a time. The present is what was recorded last when it was made.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ccl.board.rounds import in_order
from ..runtime.display import Pictured
from ..runtime.errors import ArgumentError
from ..runtime.failures import name_ranks
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.sources import place
from ..views.parts import Line, Part, Text, VStack
from . import recording
from .controller import DebuggerError, Ranks
from .recording import Facts, Place, Step, Value
from .records import Spot
from .stops import Stop, WorkerAt, sources_of

ANSWER = 5.0  # seconds that workers in other processes are given
_NOTHING = "nothing was recorded: run a cell with %%disco --trace (or --trace NAMES) first"

__all__ = ["History", "Moment", "Playback", "back", "forth", "history", "names", "playback_of"]


@dataclass(frozen=True)
class Moment:
    """A variable after a line has set it: one row.

    Attributes
    ----------
    number
        Of the row, from 1 for the first that is known of, shown or not.
    where
        The line, in words.
    records
        By rank what it was set to, as `views.describe` tells it.
    seconds
        By rank when, since the program began there.
    """

    number: int
    where: str
    records: Mapping[int, Mapping[str, Any]]
    seconds: Mapping[int, float]


@dataclass(frozen=True, repr=False)
class History(Pictured):
    """What a variable was over time, side by side for the workers; shows itself.

    Attributes
    ----------
    name
    moments
        In order of time.
    notes
        What is not in it.
    """

    name: str
    moments: tuple[Moment, ...]
    notes: tuple[str, ...] = ()

    @property
    def part(self) -> Part:
        """How it is drawn."""
        from .picture import history_parts  # which needs this layer's records

        rows = [(moment.number, moment.where, moment.records) for moment in self.moments]
        drawn = history_parts(self.name, rows)
        notes = [Line((Text(note, "muted"),)) for note in self.notes]
        return VStack((drawn, *notes)) if notes else drawn


def history(session: Session, name: str, ranks: Ranks = None, last: int = 50) -> History:
    """What a variable was, line by line, on each worker.

    Parameters
    ----------
    session
    name
        Of a variable that was recorded; of all functions that have one of this name.
    ranks
        The workers to look at; None: all.
    last
        How many of its last values on each worker.

    Raises
    ------
    DebuggerError
        If nothing was recorded.
    ArgumentError
        If that variable was not.
    """
    if isinstance(last, bool) or not isinstance(last, int) or last < 1:
        raise ArgumentError(f"last is how many values to show, 1 or more; got {last!r:.60}")
    chosen = parse_ranks(ranks, session.num_workers, session.current_mesh)
    about = facts_of(session, chosen)
    if not isinstance(name, str) or not any(name in facts.names for facts in about.values()):
        raise ArgumentError(_unknown(name, about))
    answers = session.look(recording.values, name, last, ranks=chosen, timeout=ANSWER)
    found = {rank: [_value(one) for one in told] for rank, (_, told) in answers.items()}
    before = max((count for count, _ in answers.values()), default=0)
    return History(name, _rows(found, before), tuple(notes_of(about, chosen)))


def names(session: Session, ranks: Ranks = None) -> list[str]:
    """The variables that were recorded, in the order in which they were first set.

    Raises
    ------
    DebuggerError
        If nothing was recorded.
    """
    about = facts_of(session, parse_ranks(ranks, session.num_workers, session.current_mesh))
    return list(dict.fromkeys(name for facts in about.values() for name in facts.names))


def facts_of(session: Session, ranks: Sequence[int]) -> dict[int, Facts]:
    """Of the recordings of these workers, as far as they have one and answer.

    Raises
    ------
    DebuggerError
        If none of them has.
    """
    answers = session.look(recording.facts, ranks=ranks, timeout=ANSWER)
    found = {rank: Facts(*answer) for rank, answer in answers.items() if answer is not None}
    if not found:
        raise DebuggerError(_NOTHING)
    return found


def notes_of(about: Mapping[int, Facts], ranks: Sequence[int]) -> list[str]:
    """What is not in a recording, in words."""
    notes = []
    dropped = {rank: facts.dropped for rank, facts in about.items() if facts.dropped}
    if dropped:
        most = max(dropped.values())
        notes.append(f"the first {most:,} recorded lines were dropped on {name_ranks(dropped)}")
    for rank, facts in about.items():
        if facts.error:
            notes.append(f"the recording of worker {rank} ended: {facts.error}")
    missing = [rank for rank in ranks if rank not in about]
    if missing:
        notes.append(f"no recording from {name_ranks(missing)}")
    return notes


def where_words(place_: Place) -> str:
    """``Cell In[3], line 4 in step, time 3``; of an entry where the function begins."""
    words = place(place_.file, place_.ran)
    if place_.function != "<module>":
        words += f" in {place_.function}"
    if place_.entry:
        words = f"before {words}" if place_.function == "<module>" else f"call of {words}"
    return f"{words}, time {place_.times}" if place_.times > 1 else words


def _value(answer: Sequence[Any]) -> Value:
    number, place_, seconds, record = answer
    return Value(number, Place(*place_), seconds, record)


def _rows(found: Mapping[int, Sequence[Value]], before: int) -> tuple[Moment, ...]:
    """One for each line that has set it, of all workers together; there are others before."""
    order = in_order({rank: [value.place for value in values] for rank, values in found.items()})
    at: dict[Place, dict[int, Value]] = {}
    for rank, values in found.items():
        for value in values:
            at.setdefault(value.place, {})[rank] = value
    return tuple(
        Moment(
            number,
            where_words(Place(*key)),
            {rank: value.record for rank, value in at[Place(*key)].items()},
            {rank: value.seconds for rank, value in at[Place(*key)].items()},
        )
        for number, key in enumerate(order, before + 1)
    )


def _unknown(name: object, about: Mapping[int, Facts]) -> str:
    known = list(dict.fromkeys(name for facts in about.values() for name in facts.names))
    if not known:
        return f"no value of {name!r:.60} was recorded, nor of any other variable"
    near = difflib.get_close_matches(str(name), known, n=1)
    told = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return f"no value of {name!r:.60} was recorded" + (
        f"; did you mean {near[0]}?" if near else f"; there are {told}"
    )


# -- back and forth --------------------------------------------------------------------------------


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
        answers = session.look(recording.steps, MOST_STEPS, timeout=_ANSWER)
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
            recording.variables, wanted, ranks=[rank for rank, _ in wanted], timeout=_ANSWER
        )
        workers = tuple(
            self._worker_at(rank, last.get(rank), told.get(rank))
            for rank in range(self.session.num_workers)
        )
        return Stop(
            self.name,
            self.position + 1,
            self._reason(),
            workers,
            self._groups(last),
            sources=sources_of(workers),
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
    answers = session.look(recording.facts, timeout=_ANSWER)
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
