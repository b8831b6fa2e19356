"""Follows a session's recorders: asks for what is new, keeps the last events of each worker.

One thread uses a `Follower`. Looking never waits for a worker's thread, so it works while they
compute, wait or hang. What it holds is pure state once it has come in (`Lane`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from ..runtime.errors import DiscoError
from ..runtime.session import Session
from .events import COLLECTIVE, COMMAND, CPU, GPU, STOPPED, Event, event_of
from .folding import Columns, Span, fold, fold_columns
from .looks import clock_shifts, news, profiled
from .recorder import CAPACITY
from .result import Trace
from .rounds import Matcher, waits_of

A_LOOK = 2_000  # events of a worker in one message
_MOST_UNFINISHED = 500  # collectives that are asked for again
_SHIFTS_LAST = 30.0  # seconds after which the clocks of other machines are compared again


class Lane:
    """What is known of one worker: pure state.

    Attributes
    ----------
    events
        By rising number; what is not over has end 0.
    running
        The command that runs, and the open spans in it.
    newest, cleared, dropped
        The highest number that is known; below which all was forgotten; how many were never told.
    waits
        Of collectives to which all members have come, by number, in ns.
    """

    def __init__(self, most: int) -> None:
        self.events: list[Event] = []
        self.running: list[Event] = []
        self.columns = Columns()
        self.newest, self.cleared, self.dropped = -1, 0, 0
        self.there = -1  # the highest number that the worker had when it was asked last
        self.waits: dict[int, int] = {}
        self.profiled = 0
        self.pending = False  # whether torch's profiler has more
        self.extra: list[Event] = []
        self._most = most
        self._unfinished: dict[int, int] = {}  # number -> ordinal

    def question(self) -> list[Any]:
        """What to ask for."""
        return [self.newest, list(self._unfinished)]

    def take(self, answer: dict[str, Any], shift: int) -> tuple[list[Event], bool]:
        """Take in an answer: the events that are new or have changed; whether more is waiting."""
        before, self.there = self.running, answer["newest"]
        self.running = [event_of(values, shift) for values in answer.get("now", ())]
        if answer["cleared"] > self.cleared:
            self.cleared = answer["cleared"]
            self._drop(self._place(self.cleared))
        asked = dict(self._unfinished)
        changed: list[Event] = []
        fresh = False
        for values in answer["events"]:
            event = event_of(values, shift)
            if event.seq > self.newest:
                if not fresh:
                    self.dropped += self._gap(answer["first"])
                    fresh = True
                self._append(event)
                changed.append(event)
            elif asked.pop(event.seq, None) is not None and self._put(event):
                changed.append(event)
        for seq in asked:  # the ring has dropped it: nobody knows its end
            changed += self._end(seq, 0)
        if len(self.events) > self._most + self._most // 8:
            self._drop(len(self.events) - self._most)
        if [event[:4] for event in before] != [event[:4] for event in self.running]:
            changed += self.running
        return changed, answer["newest"] > self.newest

    def load(self, events: Iterable[Event]) -> None:
        """Begin with what is known already."""
        for event in events:
            if event.kind in (CPU, GPU):
                self.extra.append(event)
                self.profiled += 1
            elif event.seq > self.newest:
                self._append(event)

    def wait(self, seq: int, waited: int) -> None:
        """Say how long a collective has waited for others."""
        place = self._place(seq)
        if place < len(self.events) and self.events[place].seq == seq:
            self.waits[seq] = waited
            self.columns.wait(place, waited)

    def _gap(self, first: int) -> int:
        """Events between those that are known and the first that is still there."""
        return max(0, first - max(self.newest + 1, self.cleared))

    def _append(self, event: Event) -> None:
        self.newest = event.seq
        self.events.append(event)
        self.columns.append(event)
        if not event.end and len(self._unfinished) < _MOST_UNFINISHED:
            self._unfinished[event.seq] = event.ordinal
        elif event.kind == COMMAND and self._unfinished:
            self._settle(event)

    def _put(self, event: Event) -> bool:
        place = self._place(event.seq)
        if place == len(self.events) or self.events[place] == event:
            return False
        self.events[place] = event
        self.columns.put(place, event)
        if event.end:
            self._unfinished.pop(event.seq, None)
        return True

    def _settle(self, command: Event) -> None:
        """A command is over: so are the collectives in which its worker waited."""
        for seq, ordinal in tuple(self._unfinished.items()):
            if ordinal <= command.ordinal:
                place = self._place(seq)
                if place < len(self.events) and not self.events[place].asynchronous:
                    self._end(seq, command.end)

    def _end(self, seq: int, end: int) -> list[Event]:
        del self._unfinished[seq]
        place = self._place(seq)
        if place == len(self.events) or self.events[place].seq != seq:
            return []
        event = self.events[place]
        event = event._replace(end=max(end, event.begin), state=STOPPED)
        self.events[place] = event
        self.columns.put(place, event)
        return [event]

    def _place(self, seq: int) -> int:
        return bisect_left(self.events, seq, key=lambda event: event.seq)

    def _drop(self, count: int) -> None:
        del self.events[:count]
        self.columns.drop(count)
        first = self.events[0].seq if self.events else self.newest + 1
        self.waits = {seq: waited for seq, waited in self.waits.items() if seq >= first}
        self._unfinished = {seq: at for seq, at in self._unfinished.items() if seq >= first}

    def validate(self) -> None:
        """Check what must always hold; for tests.

        Raises
        ------
        AssertionError
        """
        numbers = [event.seq for event in self.events]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == len(self.columns)
        assert not numbers or numbers[-1] <= self.newest
        assert set(self._unfinished) <= set(numbers)
        assert set(self.waits) <= set(numbers)


class Follower:
    """What a session's workers have recorded, as far as it was asked for.

    Parameters
    ----------
    most
        Events of each worker to hold; the oldest go first.

    Attributes
    ----------
    on
        Whether each worker records, as of the last poll.
    missing
        In words, why nothing is known of a worker, or nothing new.
    behind
        Whether more is waiting: poll again soon.
    """

    def __init__(self, session: Session, most: int = CAPACITY) -> None:
        self._session = session
        self._most = most
        self._lanes = {rank: Lane(most) for rank in range(session.num_workers)}
        self._matcher = Matcher(2 * most)
        self._shifts: dict[int, tuple[int, int]] = {}
        self._shifts_at = 0.0
        self.on: dict[int, bool] = {}
        self.missing: dict[int, str] = {}
        self.behind = False

    def poll(self, timeout: float = 0.2) -> int:
        """Ask for what is new; how many events are new or have changed. Never raises.

        `timeout` is how many seconds workers of other processes are given.
        """
        session = self._session
        wanted = [lane.question() for lane in self._lanes.values()]
        found: dict[int, dict[str, Any]] = {}
        try:
            self._compare_clocks(timeout)
            found = session.look(news, wanted, A_LOOK, timeout=timeout)
            found = {rank: answer for rank, answer in found.items() if rank in self._shifts}
        except DiscoError:
            pass  # one of them can't be looked at: said below
        self.on = {rank: answer["on"] for rank, answer in found.items()}
        self.missing = self._why([rank for rank in self._lanes if rank not in found])
        self.behind = False
        changed = 0
        for rank, answer in found.items():
            events, more = self._lanes[rank].take(answer, self._shifts[rank][0])
            self.behind |= more
            self._match(rank, events)
            changed += len(events)
            changed += self._take_profiled(rank, answer["profiled"], timeout)
        return changed

    def load(self, trace: Trace) -> None:
        """Begin with what an earlier trace of the session has."""
        for rank, events in trace.events.items():
            lane = self._lanes[rank]
            lane.load(events)
            lane.dropped = trace.dropped.get(rank, 0)
            self._match(rank, lane.events)

    def catch_up(self, timeout: float) -> None:
        """Ask until all is known that there was when this was called."""
        self.poll(timeout)
        goals = {rank: lane.there for rank, lane in self._lanes.items()}
        while self.behind and any(
            lane.newest < goals[rank] or lane.pending for rank, lane in self._lanes.items()
        ):
            if not self.poll(timeout) and self.missing:
                return

    def _compare_clocks(self, timeout: float) -> None:
        now = time.monotonic()
        unknown = self._lanes.keys() - self._shifts.keys()
        apart = any(error for _, error in self._shifts.values())
        if unknown or (apart and now - self._shifts_at > _SHIFTS_LAST):
            self._shifts.update(clock_shifts(self._session, timeout))
            self._shifts_at = now

    def _why(self, ranks: list[int]) -> dict[int, str]:
        if not ranks:
            return {}
        if self._session.closed:
            return dict.fromkeys(ranks, "is gone with its session, and what it had recorded")
        dead = {status.rank for status in self._session.status() if status.state == "dead"}
        lost = "has died, and what it had recorded is lost"
        silent = "does not answer: it is inside a call that holds Python's lock"
        return {rank: lost if rank in dead else silent for rank in ranks}

    def _match(self, rank: int, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind == COLLECTIVE:
                members = self._matcher.add(rank, event)
                if members is not None:
                    for member, waited in waits_of(members).items():
                        self._lanes[member].wait(members[member].seq, waited)

    def _take_profiled(self, rank: int, there: int, timeout: float) -> int:
        lane = self._lanes[rank]
        if there < lane.profiled:  # cleared, or profiled anew
            lane.profiled, lane.extra = 0, []
        if there == lane.profiled:
            return 0
        found = self._session.look(profiled, lane.profiled, A_LOOK, ranks=[rank], timeout=timeout)
        shift = self._shifts[rank][0]
        events = [event_of(values, shift) for values in found.get(rank, ())]
        lane.extra += events
        lane.profiled += len(events)
        lane.pending = lane.profiled < there
        self.behind |= lane.pending
        return len(events)

    # -- what is known -----------------------------------------------------------------------

    @property
    def events(self) -> dict[int, list[Event]]:
        """By rank: what is over or waits, by number; then what torch's profiler has; what runs."""
        return {
            rank: [*lane.events, *lane.extra, *lane.running] for rank, lane in self._lanes.items()
        }

    @property
    def waits(self) -> dict[int, dict[int, int]]:
        """By rank and number: how long collectives have waited for their last member, in ns."""
        return {rank: lane.waits for rank, lane in self._lanes.items()}

    def extent(self) -> tuple[int, int]:
        """The earliest begin and the latest end; now, if something goes on. (0, 0) if empty."""
        begins, ends = [], []
        for lane in self._lanes.values():
            columns = lane.columns.rows()
            if len(lane.columns):
                begins.append(int(columns[0].min()))
                ends.append(int(columns[1].max()))
            begins += [event.begin for event in (*lane.running, *lane.extra[:1])]
            ends += [event.end for event in lane.extra[-1:]]
            if lane.running or lane.question()[1]:
                ends.append(time.perf_counter_ns())
        return (min(begins), max(ends)) if begins else (0, 0)

    def fold(
        self, t0: int, t1: int, pixels: int, ranks: Iterable[int] | None = None
    ) -> dict[int, list[Span]]:
        """What to draw of each worker in a window: see `discolab.trace.fold`."""
        now = time.perf_counter_ns()
        spans: dict[int, list[Span]] = {}
        for rank in self._lanes if ranks is None else ranks:
            lane = self._lanes[rank]
            spans[rank] = fold_columns(lane.columns.rows(), lane.events, t0, t1, pixels, now)
            spans[rank] += fold([*lane.extra, *lane.running], t0, t1, pixels, now)
        return spans

    def trace(self) -> Trace:
        """What is known now, to keep."""
        events = {rank: tuple(events) for rank, events in self.events.items()}
        return Trace(
            self._session_title(),
            events,
            dict(self.missing),
            {rank: lane.dropped for rank, lane in self._lanes.items() if lane.dropped},
            {rank: error for rank, (_, error) in self._shifts.items()},
            {rank: str(device) for rank, device in enumerate(self._session.devices)},
            time.perf_counter_ns(),
        )

    def _session_title(self) -> str:
        session = self._session
        kind = f"{session.num_workers} workers, engine {session.engine}"
        return f"{session.name}: {kind}" if session.name else kind
