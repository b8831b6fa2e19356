"""What the workers of a program that is stepped tell the controller: plain records that travel.

On a line a record is the plain tuple that it is: each part of it is something that the protocol
carries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Order = tuple[str, Any]
"""What a worker that stands is told: how it goes on, and an argument of that; see `MODES`."""

MODES = ("step", "next", "out", "until", "continue", "same")
"""To the next line, in functions too; to the next line here; until this function returns; to a
later line here; to a breakpoint; as it went before."""


class Spot(NamedTuple):
    """One frame of the user's code.

    Attributes
    ----------
    file, line, function
        Where it stands; the line is the one that it runs next or, in a caller, that runs now.
    loops
        Those around the line, the outermost first: first and last line, and how often this frame
        has come to the first line since it entered the loop.
    call
        The how-manieth call it is of the line that runs in the user's frame that called it, from 1.
    """

    file: str
    line: int
    function: str
    loops: tuple[tuple[int, int, int], ...] = ()
    call: int = 1

    @property
    def place(self) -> tuple[str, int, str]:
        """Without its loops."""
        return self.file, self.line, self.function


class Arrival(NamedTuple):
    """A worker has come to a place where it may stop.

    Attributes
    ----------
    stack
        The user's frames, the outermost first; in the last one it stands.
    reason
        ``entry``, ``step``, ``break``, ``breakpoint()``, ``pause``, ``assert``, ``non-finite``,
        ``raised`` or ``end``.
    detail
        In words: ``breakpoint 2``.
    fired
        False: it has come to a breakpoint whose condition does not hold here.
    error
        What went wrong in the condition; then `fired` is true.
    hit
        How often this worker has come to this line in this program, from 1.
    ordinal
        Of the call in which it is (`Worker.executed`).
    raising
        The exception that passes through this frame, "" if none.
    """

    stack: tuple[Spot, ...]
    reason: str
    detail: str = ""
    fired: bool = True
    error: str = ""
    hit: int = 1
    ordinal: int = 0
    raising: str = ""

    @property
    def here(self) -> Spot:
        """Where it stands."""
        return self.stack[-1]

    def packed(self) -> tuple[Any, ...]:
        """For a line; `arrival_of` undoes it."""
        return tuple(tuple(spot) for spot in self.stack), *self[1:]


def arrival_of(packed: Any) -> Arrival:
    """What `Arrival.packed` has made; an arrival stays as it is."""
    if type(packed) is Arrival:
        return packed
    stack, *rest = packed
    return Arrival(tuple(Spot(*spot) for spot in stack), *rest)


class Options(NamedTuple):
    """How a program is run.

    Attributes
    ----------
    step
        Stop at its first line.
    breaks
        Its breakpoints, as `breaks.Break.packed` makes them.
    trace
        Names whose values are recorded line by line; () for all; None: nothing is.
    pm
        A worker whose program fails stays where it failed, until it is let go.
    nan
        Stop at the first operation that makes a value that is not finite.
    capacity
        How many recorded lines each worker keeps.
    """

    step: bool = False
    breaks: tuple[Any, ...] = ()
    trace: tuple[str, ...] | None = None
    pm: bool = False
    nan: bool = False
    capacity: int = 10_000
