"""Any number of events in as few spans as a screen has room for. Pure.

A window is cut in half as many buckets as it has pixels. What is longer than a bucket stays itself;
what is shorter is joined with what begins in the same bucket. So a row never has more spans than
pixels, and nothing is left out: each span says how many events it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .events import COLLECTIVE, COMMAND, CPU, DONE, FAILED, GPU, MARK, SPAN, STOPPED, Event

SPAN_ROWS = 3  # deeper spans share the last of them
ROWS = {COMMAND: 0, SPAN: 1, COLLECTIVE: 5, MARK: 6, CPU: 7, GPU: 8}
_WORST = {FAILED: 3, STOPPED: 2, DONE: 0}  # what is not over: 1

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Span(NamedTuple):
    """One thing to draw: an event, or several short ones that were joined.

    Attributes
    ----------
    row
        0 for commands, 1 to 3 for spans by depth, 5 collectives, 6 marks, 7 and 8 the profiler's.
    begin, end
        Not cut to the window; `now` where it goes on.
    name, seq
        Of the longest event.
    state
        The worst of them.
    count
        How many events.
    waited
        Nanoseconds that were spent waiting for other members.
    """

    row: int
    begin: int
    end: int
    kind: str
    name: str
    state: str
    count: int  # type: ignore[assignment] # hides tuple.count, which nobody needs here
    seq: int
    waited: int


class Columns:
    """The numbers of events, side by side; grows at the end, in step with a list of events."""

    def __init__(self) -> None:
        self._table = np.zeros((5, 256), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, events: Sequence[Event]) -> None:
        """Take in more."""
        first, self._size = self._size, self._size + len(events)
        if self._size > self._table.shape[1]:
            wider = np.zeros((5, 2 * self._size), np.int64)
            wider[:, :first] = self._table[:, :first]
            self._table = wider
        if events:
            self._table[:4, first : self._size] = np.array([_numbers(e) for e in events]).T

    def put(self, place: int, event: Event) -> None:
        """Replace one."""
        self._table[:4, place] = _numbers(event)

    def wait(self, place: int, waited: int) -> None:
        """Say how long one has waited for others."""
        self._table[4, place] = waited

    def drop(self, count: int) -> None:
        """Forget the first ones."""
        left = self._size - count
        self._table[:, :left] = self._table[:, count : self._size].copy()
        self._table[:, left:] = 0
        self._size = left

    def rows(self) -> Numbers:
        """Begins, ends, rows, states and waits."""
        return self._table[:, : self._size]


def _numbers(event: Event) -> tuple[int, int, int, int]:
    """Begin, end, row and how bad it is."""
    row = ROWS[event.kind]
    if event.kind == SPAN:
        row += min(event.depth, SPAN_ROWS - 1)
    return event.begin, event.end, row, _WORST.get(event.state, 1)


def fold(
    events: Sequence[Event],
    t0: int,
    t1: int,
    pixels: int,
    now: int = 0,
    waits: Mapping[int, int] | None = None,
) -> list[Span]:
    """What to draw of one worker's events in a window: at most `pixels` + 1 spans a row.

    Parameters
    ----------
    t0, t1
        The window; what only touches it is in it.
    now
        Where what is not over is drawn to; 0: to the end of the window.
    waits
        Nanoseconds that collectives have waited, by their number.
    """
    columns = Columns()
    columns.extend(events)
    for place, event in enumerate(events):
        if waits and event.kind == COLLECTIVE:
            columns.wait(place, waits.get(event.seq, 0))
    return fold_columns(columns.rows(), events, t0, t1, pixels, now)


def fold_columns(
    columns: Numbers, events: Sequence[Event], t0: int, t1: int, pixels: int, now: int = 0
) -> list[Span]:
    """`fold` for events whose numbers lie in columns already."""
    begins, ends, rows, _, _ = columns
    ends = np.where(ends == 0, np.maximum(now or t1, begins), ends)
    places = np.flatnonzero((begins <= t1) & (ends >= t0))
    width = max(1, -(-2 * (t1 - t0) // max(pixels, 2)))  # of a bucket; rounded up
    spans: list[Span] = []
    for row in np.flatnonzero(np.bincount(rows[places])):
        mine = places[rows[places] == row]
        wide = ends[mine] - begins[mine] >= width
        if wide.sum() > pixels // 2 + 1:  # they overlap: there is no room for each
            wide[:] = False
        long, short = mine[wide], mine[~wide]
        spans += [_alone(columns, events, int(place), int(ends[place])) for place in long]
        spans += _joined(columns, ends, events, short, np.maximum(begins[short] - t0, -1) // width)
    spans.sort(key=lambda span: (span.row, span.begin, span.end))
    return spans


def _alone(columns: Numbers, events: Sequence[Event], place: int, end: int) -> Span:
    event = events[place]
    waited = int(columns[4, place])
    return Span(
        int(columns[2, place]), event.begin, end, event.kind, event.name, event.state, 1,
        event.seq, waited,
    )  # fmt: skip


def _joined(
    columns: Numbers, ends: Numbers, events: Sequence[Event], places: Numbers, buckets: Numbers
) -> list[Span]:
    if not len(places):
        return []
    begins, _, _, worst, waited = columns
    order = np.argsort(buckets, kind="stable")  # nearly in order: fast
    places, buckets = places[order], buckets[order]
    starts = np.flatnonzero(np.r_[True, buckets[1:] != buckets[:-1]])
    lasts = np.r_[starts[1:], len(places)] - 1
    longest_of = _longest(ends[places] - begins[places], starts, lasts)
    first = np.minimum.reduceat(begins[places], starts)
    last = np.maximum.reduceat(ends[places], starts)
    bad = np.maximum.reduceat(worst[places], starts)
    waits = np.add.reduceat(waited[places], starts)
    spans = []
    for i, longest in enumerate(places[longest_of]):
        event = events[longest]
        state = event.state
        if _WORST.get(state, 1) != bad[i]:
            group = places[starts[i] : lasts[i] + 1]
            state = events[group[np.argmax(worst[group])]].state
        row, count = int(columns[2, longest]), int(lasts[i] - starts[i] + 1)
        times = int(first[i]), int(last[i])
        what = event.kind, event.name, state
        spans.append(Span(row, *times, *what, count, event.seq, int(waits[i])))
    return spans


def _longest(lengths: Numbers, starts: Numbers, lasts: Numbers) -> Numbers:
    """Where the longest of each group is, the first of several."""
    counts = lasts - starts + 1
    most = np.repeat(np.maximum.reduceat(lengths, starts), counts)
    places = np.flatnonzero(lengths == most)
    return places[np.searchsorted(places, starts)]
