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
from .events import COLLECTIVE, COMMAND, CPU, FAILED, GPU, STOPPED, Event, event_of
from .folding import Columns, Span, fold, fold_columns
from .packing import unpack
from .reading import clock_shifts, news, profiled
from .recorder import CAPACITY
from .result import Trace
from .rounds import Matcher, waits_of

A_LOOK = 2_000  # events of a worker in one message
_MOST_UNFINISHED = 500  # collectives that are asked for again
_NONE: list[Any] = [0, []]  # no events, packed
_SHIFTS_LAST = 30.0  # seconds after which the clocks of other machines are compared again


class Lane:
    """What is known of one worker: pure state.

    Attributes
    ----------
    events
        By rising number; what is not over has end 0.
    running
        The command that runs, and the open spans in it; before these, commands that are over and
        newer than what has been told up to now.
    newest, cleared, dropped
        The highest number that is known; below which all was forgotten; how many were never told.
    waits
        Of collectives to which all members have come, or that were given up, by number, in ns.
    seen
        When it was known to live, in ns: the last answered question.
    lost
        Whether nothing more can come: the worker has died, or is gone with its session.
    """

    def __init__(self, most: int) -> None:
        self.events: list[Event] = []
        self.running: list[Event] = []
        self.columns = Columns()
        self.newest, self.cleared, self.dropped = -1, 0, 0
        self.there = -1  # the highest number that the worker had when it was asked last
        self.waits: dict[int, int] = {}
        self.seen, self.lost = 0, False
        self.profiled = 0
        self.pending = False  # whether torch's profiler has more
        self.extra: list[Event] = []
        self._most = most
        self._unfinished: dict[int, int] = {}  # number -> ordinal

    @property
    def goes_on(self) -> bool:
        """Whether the worker has something that is not over."""
        return bool(self._unfinished) or any(not event.end for event in self.running)

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
        for values in unpack(answer.get("again", _NONE)):
            event = event_of(values, shift)
            if asked.pop(event.seq, None) is not None and self._put(event):
                changed.append(event)
        for seq in asked:  # the ring has dropped it: nobody knows its end
            changed += self._end(seq, 0)
        fresh = [event_of(values, shift) for values in unpack(answer.get("fresh", _NONE))]
        if fresh:
            self.dropped += self._gap(answer["first"])
            changed += fresh
            changed += self._extend(fresh)
        if len(self.events) > self._most + self._most // 8:
            self._drop(len(self.events) - self._most)
        if [event[:4] for event in before] != [event[:4] for event in self.running]:
            changed += self.running
        return changed, answer["newest"] > self.newest

    def load(self, events: Iterable[Event]) -> None:
        """Begin with what is known already."""
        known = sorted((event for event in events if event.kind not in (CPU, GPU)), key=_number)
        self._extend([event for event in known if event.seq > self.newest])
        self.extra = [event for event in events if event.kind in (CPU, GPU)]
        self.profiled = len(self.extra)

    def lose(self, state: str) -> list[Event]:
        """Nothing more can come: what goes on ended when the worker was last known to live."""
        if self.lost:
            return []
        self.lost = True
        self.running = [
            event if event.end else event._replace(end=event.until(self.seen), state=state)
            for event in self.running
        ]
        changed = []
        for seq in tuple(self._unfinished):
            changed += self._end(seq, self.seen, state)
        return [*changed, *self.running]

    def wait(self, seq: int, waited: int) -> None:
        """Say how long a collective has waited for others."""
        place = self._place(seq)
        if place < len(self.events) and self.events[place].seq == seq:
            self.waits[seq] = waited
            self.columns.wait(place, waited)

    def _gap(self, first: int) -> int:
        """Events between those that are known and the first that is still there."""
        return max(0, first - max(self.newest + 1, self.cleared))

    def _extend(self, fresh: list[Event]) -> list[Event]:
        """Take in new ones; what else has changed by that."""
        if not fresh:
            return []
        changed: list[Event] = []
        self.newest = fresh[-1].seq
        self.events += fresh
        self.columns.extend(fresh)
        for event in fresh:
            if not event.end and len(self._unfinished) < _MOST_UNFINISHED:
                self._unfinished[event.seq] = event.ordinal
            elif event.kind == COMMAND and self._unfinished:
                changed += self._settle(event)
        return changed

    def _put(self, event: Event) -> bool:
        place = self._place(event.seq)
        if place == len(self.events) or self.events[place] == event:
            return False
        self.events[place] = event
        self.columns.put(place, event)
        if event.end:
            self._unfinished.pop(event.seq, None)
        return True

    def _settle(self, command: Event) -> list[Event]:
        """A command is over: so are the collectives in which its worker waited."""
        changed: list[Event] = []
        for seq, ordinal in self._unfinished.copy().items():
            if ordinal <= command.ordinal:
                place = self._place(seq)
                if place < len(self.events) and not self.events[place].asynchronous:
                    changed += self._end(seq, command.end)
        return changed

    def _end(self, seq: int, end: int, state: str = STOPPED) -> list[Event]:
        del self._unfinished[seq]
        place = self._place(seq)
        if place == len(self.events) or self.events[place].seq != seq:
            return []
        event = self.events[place]
        event = event._replace(end=max(end, event.begin), state=state)
        self.events[place] = event
        self.columns.put(place, event)
        return [event]

    def _place(self, seq: int) -> int:
        return bisect_left(self.events, seq, key=_number)

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


def _number(event: Event) -> int:
    return event.seq


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

    def poll(self, timeout: float = 0.2, most: int | None = None) -> int:
        """Ask for what is new; how many events are new or have changed. Never raises.

        `timeout` is how many seconds workers of other processes are given, `most` how many events
        of each worker are asked for.
        """
        session, asked = self._session, time.perf_counter_ns()
        wanted = [lane.question() for lane in self._lanes.values()]
        answers: dict[int, dict[str, Any]] = {}
        try:
            self._compare_clocks(timeout)
            answers = session.look(news, wanted, most or A_LOOK, timeout=timeout)
            answers = {rank: answer for rank, answer in answers.items() if rank in self._shifts}
        except DiscoError:
            pass  # one of them can't be looked at: said below
        self.on = {rank: answer["on"] for rank, answer in answers.items()}
        self.behind = False
        changed = self._miss([rank for rank in self._lanes if rank not in answers])
        for rank, answer in answers.items():
            self._lanes[rank].seen = asked
            events, more = self._lanes[rank].take(answer, self._shifts[rank][0])
            self.behind |= more
            self._match(rank, events)
            changed += len(events)
            changed += self._take_profiled(rank, answer["profiled"], timeout)
        return changed

    def skip(self, timeout: float) -> None:
        """Leave out what the workers have recorded up to now."""
        wanted = [lane.question() for lane in self._lanes.values()]
        for rank, answer in self._session.look(news, wanted, 0, timeout=timeout).items():
            self._lanes[rank].newest = answer["newest"]

    def load(self, trace: Trace) -> None:
        """Begin with what an earlier trace of the session has."""
        for rank, events in trace.events.items():
            lane = self._lanes[rank]
            lane.load(events)
            lane.dropped = trace.dropped.get(rank, 0)
            self._match(rank, lane.events)
            lane.seen = max((event.until(0) for event in events), default=0)

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

    def _miss(self, ranks: list[int]) -> int:
        """Say why some do not answer; how many events have changed by that."""
        self.missing = {}
        if not ranks:
            return 0
        changed, closed = 0, self._session.closed
        dead = set() if closed else self._dead()
        for rank in ranks:
            if not closed and rank not in dead:
                self.missing[rank] = "no answer, from inside a call that holds Python's lock"
                continue
            lane = self._lanes[rank]
            events = lane.lose(STOPPED if closed else FAILED)
            self._match(rank, events)
            changed += len(events)
            known = lane.events or lane.running
            lost = "what came after the last look" if known else "what was recorded there"
            self.missing[rank] = f"{'gone with the session' if closed else 'dead'}; {lost} is lost"
        return changed

    def _dead(self) -> set[int]:
        return {status.rank for status in self._session.status() if status.state == "dead"}

    def _match(self, rank: int, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind == COLLECTIVE:
                members = self._matcher.add(rank, event)
                if members is not None:
                    for member, waited in waits_of(members).items():
                        self._lanes[member].wait(members[member].seq, waited)
                elif event.state in (FAILED, STOPPED) and not event.asynchronous:
                    self._lanes[rank].wait(event.seq, event.until(0) - event.begin)

    def _take_profiled(self, rank: int, there: int, timeout: float) -> int:
        lane = self._lanes[rank]
        if there < lane.profiled:  # cleared, or profiled anew
            lane.profiled, lane.extra = 0, []
        if there == lane.profiled:
            return 0
        answers = self._session.look(profiled, lane.profiled, A_LOOK, ranks=[rank], timeout=timeout)
        shift = self._shifts[rank][0]
        events = [event_of(values, shift) for values in answers.get(rank, ())]
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
            ends += [event.end for event in (*lane.running, *lane.extra[-1:])]
            if lane.goes_on:
                ends.append(time.perf_counter_ns())
        return (min(begins), max(*begins, *ends)) if begins else (0, 0)

    @property
    def count(self) -> int:
        """Of events that are held."""
        lanes = self._lanes.values()
        return sum(len(lane.events) + len(lane.extra) + len(lane.running) for lane in lanes)

    @property
    def goes_on(self) -> bool:
        """Whether a worker has something that is not over."""
        return any(lane.goes_on for lane in self._lanes.values())

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
