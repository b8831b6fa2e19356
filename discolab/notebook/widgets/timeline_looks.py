"""What the workers of one session have recorded, followed live: the facts of `timeline`.

`TimelineLooks` is shared by all pictures of one session of the notebook; who uses it holds `lock`:
the pump's thread, the one for buttons, or the one that runs a cell. All times that leave here are
nanoseconds after `origin`, where the first event began.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import trace
from ...runtime.channel import Ticket
from ...runtime.errors import ArgumentError, DiscoError, WaitTimeoutError
from ...runtime.session import Session
from ...trace import Event, Follower, Span, Trace
from ...trace.folding import ROWS, SPAN_ROWS
from ...trace.profiler import begin_profile, end_profile
from ...views import rank_colour
from ...views.formats import format_bytes, format_seconds, format_workers

_POLLS_EVERY = 0.08  # seconds: two pictures of one session ask once
_PATIENCE = 0.05  # seconds that workers in other processes are given to answer
_A_POLL = 1_000  # events of a worker in one, so that it takes some milliseconds
_LOOK_SHARE = 12  # polls take a twelfth of the time at most
_LONGEST_PAUSE = 1.0  # seconds
ALL_TIME = 60.0  # seconds for all that there is
_PROFILE_SECONDS = 30.0  # that the profiler may take to end: with a GPU it has much to put in order
_SUMMARIES_EVERY = 1.0  # seconds
_SUMMARY_SHARE = 30  # a summary is made in a thirtieth of the time at most
_MOST_SITES = 12


class TimelineLooks:
    """Follows the session that has a name in the notebook.

    Parameters
    ----------
    name
        What the session is called in the notebook.
    find
        Gives the session that has the name now.

    Attributes
    ----------
    origin
        Where time 0 is.
    going
        Whether something goes on at this moment.
    wanted, profiled
        Whether the workers were asked to record, and to run torch's profiler.
    version
        Counts looks that have found something new.
    """

    def __init__(self, name: str, find: Callable[[str], Session]) -> None:
        self.name, self._find = name, find
        self.lock = threading.Lock()
        self.session = find(name)
        self.follower = Follower(self.session)
        self.origin = 0
        self.going = False
        self.wanted = self.profiled = False
        self.version = 0
        self._poll_at = self._summed_at = float("-inf")
        self._summary: dict[str, Any] = {"sites": [], "workers": []}
        self._summed = -1  # the version it is of
        self._cost = 0.0
        self._profile_ends: Ticket | None = None  # until somebody has waited for that

    # -- looks -----------------------------------------------------------------------------------

    def look(self, patience: float | None = None) -> None:
        """Ask once for what is new, if it is time to; or until there is nothing more.

        Parameters
        ----------
        patience
            Seconds after which the rest is left for later; the last commands are known all the
            same. None: ask once.
        """
        session = self._find(self.name)
        if session is not self.session:
            self.session, self.follower, self.origin = session, Follower(session), 0
            self.version += 1
            self._summed_at = float("-inf")
        now = time.monotonic()
        if patience is None and now < self._poll_at:
            return
        states = self.follower.on, self.follower.missing
        while True:
            if self.follower.poll(_PATIENCE, _A_POLL):
                self.version += 1
            done = time.monotonic()
            if not self.follower.behind or done - now >= (patience or 0.0):
                break
        if patience is None:  # who ends a cell does not hold up the next look
            pause = min(max(_POLLS_EVERY, _LOOK_SHARE * (done - now)), _LONGEST_PAUSE)
            self._poll_at = done + pause
        if states != (self.follower.on, self.follower.missing):
            self.version += 1
        going = self.follower.goes_on
        if going or self.going:
            self.version += 1
        self.going = going
        first, _ = self.follower.extent()
        if first and (not self.origin or first < self.origin):
            self.origin = first

    @property
    def on(self) -> bool:
        """Whether the workers record."""
        return any(self.follower.on.values())

    @property
    def count(self) -> int:
        """Of events that are held."""
        return self.follower.count

    def extent(self) -> tuple[int, int]:
        """The first begin and the last end."""
        first, last = self.follower.extent()
        return (first - self.origin, last - self.origin) if first else (0, 0)

    def fold(self, t0: int, t1: int, pixels: int) -> dict[int, list[Span]]:
        """See `Follower.fold`; the window is in times after `origin`."""
        return self.follower.fold(self.origin + t0, self.origin + t1, pixels)

    def trace(self) -> Trace:
        """All that is known now; what torch's profiler has seen, if it has just been ended."""
        ends, self._profile_ends = self._profile_ends, None
        if ends is not None and not self.session.closed:
            with contextlib.suppress(WaitTimeoutError):  # some still compute: without it
                self.session.wait(ends, _PROFILE_SECONDS, interrupt=False)
        self.look(ALL_TIME)
        return self.follower.trace()

    def missing(self) -> list[str]:
        """Of whom nothing, or nothing new, is known, and why."""
        why: dict[str, list[int]] = {}
        for rank, words in self.follower.missing.items():
            why.setdefault(words, []).append(rank)
        return [f"{format_workers(ranks)}: {words}" for words, ranks in why.items()]

    # -- what buttons do ------------------------------------------------------------------------

    def switch(self, on: bool, profile: bool = False) -> None:
        """Have the workers record, or not; what is so already is left alone.

        With `profile` torch.profiler sees what they call, until recording ends; waits for it to
        begin.
        """
        session = self._find(self.name)
        if profile and on and not self.profiled:
            trace.start(session)
            session.fetch(session.call_packed(begin_profile))
            self.profiled = True
        elif on and not self.wanted:
            trace.start(session)
        elif not on and self.wanted:
            self._end_profile(session)
            trace.stop(session)
        self.wanted = on

    def goes_on_with(self, session: Session) -> None:
        """Another session has taken the name."""
        self.profiled = False
        if self.wanted:
            trace.start(session)

    def _end_profile(self, session: Session) -> None:
        if self.profiled and not session.closed:
            self._profile_ends = session.request(session.call_packed(end_profile))
        self.profiled = False

    def clear(self) -> None:
        """Forget all that was recorded."""
        session = self._find(self.name)
        if not session.closed:
            trace.clear(session)

    # -- summary and details ----------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Where the time has gone; made anew at most once a second."""
        now = time.monotonic()
        pause = max(_SUMMARIES_EVERY, _SUMMARY_SHARE * self._cost)
        if self._summed == self.version or now - self._summed_at < pause:
            return self._summary
        self._summed, self._summed_at = self.version, now
        began = time.thread_time()
        try:
            found = self.follower.trace().summary()
        except DiscoError:
            return self._summary
        self._summary = {
            "sites": [_site(one) for one in found.sites[:_MOST_SITES]],
            "more": max(0, len(found.sites) - _MOST_SITES),
            "workers": [_worker(one) for one in found.workers],
        }
        self._cost = time.thread_time() - began
        return self._summary

    def details(self, rank: int, row: int, seq: int, count: int, at: int) -> dict[str, Any]:
        """What is known of the event that began at `at` or so, in words.

        Raises
        ------
        ArgumentError
            If it is not there any more.
        """
        event = self._event(rank, row, seq, at + self.origin)
        if event is None:
            raise ArgumentError("this event is not there any more")
        now = time.perf_counter_ns()
        end = event.until(now)
        facts = [
            ("begins at", format_seconds((event.begin - self.origin) / 1e9)),
            ("lasts", format_seconds((end - event.begin) / 1e9) + ("" if event.end else " so far")),
            ("state", event.state),
            ("called at", event.site),
            ("moves", event.detail if event.kind == "collective" else ""),
            ("gives", format_bytes(event.size) if event.size else ""),
            ("among", format_workers(event.group) if event.group else ""),
            ("group", event.tag),
            ("on", event.detail if event.kind == "span" else ""),
        ]
        if event.kind == "mark":
            facts = [fact for fact in facts if fact[0] not in ("lasts", "state")]
        others = f"the longest of {count} short ones that are drawn as one" if count > 1 else ""
        return {
            "rank": rank,
            "colour": rank_colour(rank),
            "kind": event.kind,
            "name": event.name,
            "others": others,
            "facts": [fact for fact in facts if fact[1]],
            "begin": event.begin - self.origin,
            "end": end - self.origin,
            "members": self._members(event, now),
        }

    def _event(self, rank: int, row: int, seq: int, at: int) -> Event | None:
        """What runs, and what torch's profiler has seen, have no numbers of their own."""
        events = self.follower.events.get(rank, ())
        found = [event for event in events if event.seq == seq and _row(event) == row]
        return min(found, key=lambda event: abs(event.begin - at), default=None)

    def _members(self, event: Event, now: int) -> list[dict[str, Any]]:
        """What each member has done about a collective, the last to arrive last."""
        if event.kind != "collective" or event.number < 0:
            return []
        key = (event.ordinal, event.group, event.tag, event.number)
        calls: dict[int, Event] = {}
        for rank in event.group:
            for other in reversed(self.follower.events.get(rank, ())):
                if (other.ordinal, other.group, other.tag, other.number) == key:
                    calls[rank] = other
                    break
        first = min(call.begin for call in calls.values())
        last = max(call.begin for call in calls.values())
        complete = len(calls) == len(event.group)
        found = []
        for rank, call in sorted(calls.items(), key=lambda item: item[1].begin):
            waited = self.follower.waits.get(rank, {}).get(call.seq)
            if waited is None:
                waited = call.until(now) - call.begin
            found.append(
                {
                    "rank": rank,
                    "colour": rank_colour(rank),
                    "came": "first" if call.begin == first else f"+{_span(call.begin - first)}",
                    "waited": _span(waited),
                    "share": waited,
                    "last": complete and call.begin == last and len(calls) > 1,
                    "begin": call.begin - self.origin,
                    "end": call.until(now) - self.origin,
                    "state": call.state,
                }
            )
        absent = sorted(set(event.group) - calls.keys())
        return found + [
            {"rank": rank, "colour": rank_colour(rank), "came": "", "waited": "", "share": 0,
             "last": False, "begin": 0, "end": 0, "state": "has not arrived"}
            for rank in absent
        ]  # fmt: skip


def _row(event: Event) -> int:
    """The row in which an event is drawn."""
    deeper = min(event.depth, SPAN_ROWS - 1) if event.kind == "span" else 0
    return ROWS[event.kind] + deeper


def _span(ns: int) -> str:
    return format_seconds(ns / 1e9) if ns else "0 ms"


def _site(one: Any) -> dict[str, Any]:
    """A call site of a collective: how long its members have waited, and for whom."""
    rank, times = one.slowest[0] if one.slowest else (None, 0)
    return {
        "name": one.name,
        "site": one.site,
        "count": one.count,
        "waited": _span(one.waited),
        "ns": one.waited,
        "rank": rank,
        "colour": "" if rank is None else rank_colour(rank),
        "times": times,
    }


def _worker(one: Any) -> dict[str, Any]:
    """How a worker has spent its time, in percent."""
    total = max(1, one.busy + one.waiting + one.idle)
    return {
        "rank": one.rank,
        "colour": rank_colour(one.rank),
        "busy": round(100 * one.busy / total),
        "waiting": round(100 * one.waiting / total),
        "idle": round(100 * one.idle / total),
        "failed": one.failed,
    }


def save(found: Trace, name: str, path: str | Path | None = None) -> Path:
    """Write a trace for Chrome's and Perfetto's viewers.

    Parameters
    ----------
    name
        Of the session.
    path
        None: a new file in the working folder, which is the notebook's as a rule.

    Raises
    ------
    ArgumentError
        If it can't be written.
    """
    target = _new_file(name) if path is None else Path(path).expanduser()
    try:
        return found.to_chrome(target).absolute()
    except OSError as exc:
        raise ArgumentError(f"{target} can't be written: {exc.strerror or exc}") from None


def _new_file(name: str) -> Path:
    """A file beside the notebook that is not there yet."""
    for number in range(1, 10_000):
        path = Path(f"timeline-{name}{f'-{number}' if number > 1 else ''}.json")
        if not path.exists():
            return path
    raise ArgumentError(f"there are too many files timeline-{name}-….json here")
