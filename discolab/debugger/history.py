"""A variable's history, from what the workers have recorded of a program (recording.py).

The controller's side. It can be asked for while the program runs or stands, and after it. Lines of
several workers belong together if they are the same line for the same time. The order of such rows
keeps that of each worker, as far as they agree on one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ccl.board.rounds import in_order
from ..runtime.drawn import Pictured
from ..runtime.errors import ArgumentError
from ..runtime.failures import name_ranks
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.sources import place
from ..views.parts import Line, Part, Text, VStack
from . import recorded
from .looking import DebuggerError, Ranks
from .playback import Playback, back, forth, playback_of
from .recorded import Facts, Place, Value

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
    answers = session.look(recorded.values, name, last, ranks=chosen, timeout=ANSWER)
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
    answers = session.look(recorded.facts, ranks=ranks, timeout=ANSWER)
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
