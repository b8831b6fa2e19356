"""Lockstep: who runs, who stands, and who may go on, as pure state.

Workers say where they have come to (`arrive`), that they have ended (`end`), and, looked at from
outside, that they wait in a collective for somebody who stands (`blocked`); a person says who shall
go on and how (`command`). Each of these returns what is to be done: orders to workers. There is no
thread and no line here; whoever uses it holds a lock.

A worker that comes to a place where it may stop is *held* there until nobody runs any more: that is
the rendezvous. Then it is decided: if one of them has a reason to stop, all that are held are
*paused*; else all go on. `settled` says that nobody runs, so there is something to see.

Which workers are at one place: those with the same frames, each at the same line, in the same trip
of the loops around it. Of several groups that one is behind which is in an earlier trip of a loop
that both are in, or else at an earlier line. So workers that have parted in a branch or a loop meet
again after it, if always those behind go on.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .records import Arrival, Order, Spot

RUNNING, HELD, PAUSED, BLOCKED = "running", "held", "paused", "collective"
OUT, DONE, ERROR, ABORTED = "out", "done", "error", "aborted"
ENDED = (DONE, ERROR, ABORTED)
TOGETHER = ("step", "next")  # only those who are behind go on
_PASSED = ("break", "breakpoint()")  # what "continue N" counts
_FREEZES = ("raised", "non-finite")  # who stops for these has the others stop where they are
_STORY = 2_000


class Action(NamedTuple):
    """Something to tell a worker: ``go`` with an order, ``pause``, or ``free``: to run to a break
    point from its next line on.
    """

    what: str
    rank: int
    order: Order | None = None


class Blocking(NamedTuple):
    """For whom a worker waits: all of `whom`, or with `any_of` one of them; in words."""

    whom: tuple[int, ...]
    any_of: bool = False
    words: str = ""


class Lockstep:
    """The workers of one program.

    Attributes
    ----------
    state
        Of each worker, by rank.
    at
        Where those that are held or paused stand.
    waits
        What those that are blocked wait for.
    ends
        What those that have ended say of it.
    stops
        How many stops there were.
    stopped
        The workers that the last stop has newly paused.
    """

    def __init__(self, ranks: Collection[int], num_workers: int) -> None:
        self.state = {rank: RUNNING if rank in ranks else OUT for rank in range(num_workers)}
        self.at: dict[int, Arrival] = {}
        self.waits: dict[int, Blocking] = {}
        self.ends: dict[int, str] = {}
        self.stops = 0
        self.stopped: tuple[int, ...] = ()
        self._pass = 0  # breakpoints that fire and are passed all the same
        self._freezing = False
        self._shown = False  # whether what is settled now was counted as a stop
        self._story: deque[tuple[Any, ...]] = deque(maxlen=_STORY)

    # -- facts -------------------------------------------------------------------------------

    def ranks(self, *states: str) -> list[int]:
        """The workers in one of these states."""
        return [rank for rank, state in self.state.items() if state in states]

    @property
    def settled(self) -> bool:
        """Whether nobody runs."""
        return RUNNING not in self.state.values() and HELD not in self.state.values()

    @property
    def finished(self) -> bool:
        """Whether all have ended."""
        return all(state in ENDED or state is OUT for state in self.state.values())

    @property
    def paused(self) -> bool:
        """Whether it is settled and somebody can go on."""
        return self.settled and PAUSED in self.state.values()

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The paused workers, those at one place together; the furthest behind first."""
        found: dict[Any, list[int]] = {}
        for rank in self.ranks(PAUSED):
            found.setdefault(place_of(self.at[rank]), []).append(rank)

        def compared(mine: list[int], theirs: list[int]) -> int:
            return order(self.at[mine[0]], self.at[theirs[0]])

        behind = sorted(found.values(), key=functools.cmp_to_key(compared))
        return tuple(tuple(ranks) for ranks in behind)

    def story(self, rank: int | None = None) -> list[tuple[Any, ...]]:
        """What has happened, the oldest first; with a rank, to that worker."""
        return [entry for entry in self._story if rank is None or rank in entry[1]]

    # -- events ------------------------------------------------------------------------------

    def arrive(self, rank: int, arrival: Arrival) -> list[Action]:
        """A worker stands at a place."""
        self._note("arrive", (rank,), arrival.reason, arrival.here.place)
        if self.state[rank] in ENDED or self.state[rank] is OUT:
            return [Action("go", rank, ("continue", None))]
        self.at[rank] = arrival
        self.waits.pop(rank, None)
        if self._shown:  # it has come free by itself, as from a collective that has failed
            self.state[rank] = PAUSED
            return []
        self.state[rank] = HELD
        actions = []
        if arrival.reason in _FREEZES and not self._freezing:
            self._freezing = True
            actions = [Action("pause", other) for other in self.ranks(RUNNING)]
        return actions + self._decide()

    def end(self, rank: int, how: str, words: str = "") -> list[Action]:
        """A worker has left the program: ``done``, ``error`` or ``aborted``."""
        if self.state[rank] in ENDED or self.state[rank] is OUT:
            return []
        self._note("end", (rank,), how)
        self.state[rank] = how
        self.ends[rank] = words
        self.at.pop(rank, None)
        self.waits.pop(rank, None)
        if self.waits:  # for those whom this has freed; it will be seen who has to wait on
            self._resume()
            self._shown = False
        return self._decide()

    def blocked(self, waiting: Mapping[int, Blocking]) -> list[Action]:
        """What the workers that run wait for in collectives, at one moment at which all who stood
        before still stood after.
        """
        for rank in self.ranks(BLOCKED):  # somebody for whom it waited has come since
            if rank in waiting and waiting[rank].whom:
                self.waits[rank] = waiting[rank]
        standing = set(self.ranks(HELD, PAUSED, BLOCKED))
        left = {r: waiting[r] for r in self.ranks(RUNNING) if r in waiting and waiting[r].whom}
        found: dict[int, Blocking] = {}
        while True:
            new = {
                rank: wait
                for rank, wait in left.items()
                if rank not in found
                and (all if wait.any_of else any)(one in standing for one in wait.whom)
            }
            if not new:
                break
            found.update(new)
            standing.update(new)
        for rank, wait in found.items():
            self._note("blocked", (rank,), wait.words)
            self.state[rank] = BLOCKED
            self.waits[rank] = wait
        return self._decide() if found else []

    def command(
        self, mode: str, argument: Any = None, ranks: Collection[int] | None = None
    ) -> list[Action]:
        """Those who shall go on do: of ``step`` and ``next`` the group that is furthest behind, of
        the others all; or, of those who are paused, `ranks`.

        With ``continue`` the argument is at how many stops not to stop.
        """
        paused = self.ranks(PAUSED)
        if ranks is not None:
            movers: Iterable[int] = [rank for rank in paused if rank in ranks]
        elif mode in TOGETHER and paused:
            movers = self.groups()[0]
        else:
            movers = paused
        self._pass = int(argument or 0) if mode == "continue" else 0
        order_ = (mode, None if mode == "continue" else argument)
        return self._release(movers, order_)

    # -- inside ------------------------------------------------------------------------------

    def _release(self, movers: Iterable[int], order: Order) -> list[Action]:
        movers = list(movers)
        if not movers:
            return []
        self._note("go", tuple(movers), order)
        actions = []
        # who comes free of a collective stops at its next line too, or goes on as the others do
        if order[0] != "same":
            what = "free" if order[0] == "continue" else "pause"
            actions = [Action(what, rank) for rank in self.ranks(BLOCKED)]
        self._resume()
        self._shown = self._freezing = False
        for rank in movers:
            self.state[rank] = RUNNING
            del self.at[rank]
            actions.append(Action("go", rank, order))
        return actions

    def _resume(self) -> None:
        """Take those that are blocked for running: whom that is wrong of will be seen."""
        for rank in self.ranks(BLOCKED):
            self.state[rank] = RUNNING
        self.waits.clear()

    def _decide(self) -> list[Action]:
        """What follows once nobody runs."""
        if RUNNING in self.state.values() or self._shown:
            return []
        held = self.ranks(HELD)
        firing = [rank for rank in held if self.at[rank].fired]
        if held and not firing:
            return self._release_held(held)
        if firing and self._pass and all(self.at[rank].reason in _PASSED for rank in firing):
            self._pass -= 1
            return self._release_held(held)
        for rank in held:
            self.state[rank] = PAUSED
        self._shown = True
        if not self.finished:
            self.stops += 1
            self.stopped = tuple(held)
            self._note("stop", tuple(held))
        return []

    def _release_held(self, held: Sequence[int]) -> list[Action]:
        """Nobody stops at this rendezvous: all go on as they did."""
        return self._release(held, ("same", None))

    def _note(self, what: str, ranks: tuple[int, ...], *more: Any) -> None:
        self._story.append((what, ranks, *more))

    def validate(self) -> None:
        """Check what must always hold; for tests.

        Raises
        ------
        AssertionError
        """
        for rank, state in self.state.items():
            assert state in (RUNNING, HELD, PAUSED, BLOCKED, OUT, *ENDED), (rank, state)
            assert (rank in self.at) == (state in (HELD, PAUSED)), (rank, state, self.story(rank))
            assert (rank in self.waits) == (state is BLOCKED), (rank, state, self.story(rank))
            assert (rank in self.ends) == (state in ENDED), (rank, state, self.story(rank))
        if HELD in self.state.values():
            assert RUNNING in self.state.values(), ("nobody decides", list(self._story)[-20:])
        if BLOCKED in self.state.values():
            standing = self.ranks(HELD, PAUSED, RUNNING)
            assert standing, ("all are blocked", list(self._story)[-20:])
        grouped = [rank for group in self.groups() for rank in group]
        assert sorted(grouped) == self.ranks(PAUSED)


def place_of(arrival: Arrival) -> Any:
    """What is the same for workers at one place."""
    return tuple(
        (spot.file, spot.line, spot.function, spot.loops, spot.call) for spot in arrival.stack
    )


def order(a: Arrival, b: Arrival) -> int:
    """Below 0 if `a` is behind `b`, above 0 if it is ahead."""
    for mine, theirs in zip(a.stack, b.stack, strict=False):
        found = _order(mine, theirs)
        if found:
            return found
    return len(a.stack) - len(b.stack)


def _order(a: Spot, b: Spot) -> int:
    if a.call != b.call:
        return a.call - b.call
    if (a.file, a.function) != (b.file, b.function):
        return -1 if (a.file, a.line) < (b.file, b.line) else 1
    for mine, theirs in zip(a.loops, b.loops, strict=False):
        if mine[:2] != theirs[:2]:
            break
        if mine[2] != theirs[2]:
            return mine[2] - theirs[2]
    return a.line - b.line
