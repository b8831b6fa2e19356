"""What a trace found, as parts: each worker's time drawn, in numbers, and who kept whom waiting.

Pure: takes plain records, asks nothing of the workers. Times come in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .formats import cut, format_bytes, format_seconds
from .parts import Column, Interval, Line, Part, Row, Table, Text, Track, Tracks, VStack

_MOST_TRACKS = 16
_MOST_WORKERS = 64  # rows of the table
_MOST_SITES = 8
_LONGEST = 60  # characters of a cell
_ROWS = {"command": 0, "span": 1, "collective": 2}

Drawn = tuple[int, int, int, str, str, str, int]
"""Row, begin, end, kind, name, state, and the ns that it waited: as `trace.fold` gives it."""


@dataclass(frozen=True)
class WorkerTime:
    """Where one worker's time went, in ns: computing in calls, waiting in collectives, or idle."""

    rank: int
    busy: int
    waiting: int
    idle: int
    commands: int
    collectives: int
    failed: int


@dataclass(frozen=True)
class SiteTime:
    """The collectives of one place in the program.

    `waited` is the waiting of all members together, in ns; `slowest` are the workers that were the
    last to arrive, with how often; `size` is what all have given, in bytes; `failed` counts those
    that failed or were stopped, `going` those that are not over.
    """

    name: str
    site: str
    count: int
    waited: int
    slowest: tuple[tuple[int, int], ...]
    size: int
    failed: int = 0
    going: int = 0


class Times(Protocol):
    """What `Trace.summary` gives."""

    @property
    def workers(self) -> tuple[WorkerTime, ...]:
        """In rank order."""

    @property
    def sites(self) -> tuple[SiteTime, ...]:
        """The worst first."""


def timeline_parts(
    title: str,
    lanes: Mapping[int, Sequence[Drawn]],
    extent: tuple[int, int],
    times: Times,
    notes: Sequence[str] = (),
) -> Part:
    """Draw a trace.

    Parameters
    ----------
    lanes
        What to draw of each worker, by rank; few enough for a screen.
    extent
        The first and the last moment.
    notes
        What the reader should know, one line each.
    """
    begin, end = extent
    head = Line((Text("trace", "title"), Text(f" · {title}", "muted")))
    if end <= begin:
        nothing = Text("nothing was recorded: discolab.trace.start(sess) begins it", "muted")
        return VStack((head, nothing, *_note_parts(notes)))
    parts: list[Part] = [head, Line((_verdict(times, end - begin),))]
    parts.append(_tracks(lanes, begin, end))
    parts.append(_worker_table(times.workers))
    if times.sites:
        parts += [Text("collectives, the most waiting first", "title"), _site_table(times.sites)]
    return VStack((*parts, *_note_parts(notes)))


def _note_parts(notes: Sequence[str]) -> list[Part]:
    return [Text(note, "warning") for note in notes]


def _verdict(times: Times, span: int) -> Text:
    """The first thing to know, in one line."""
    failed = sum(worker.failed for worker in times.workers)
    words = [f"{_time(span)} on the clock"]
    waited = sum(worker.waiting for worker in times.workers)
    busy = sum(worker.busy for worker in times.workers)
    if waited + busy:
        words.append(f"{_share(waited, waited + busy)} of the workers' time in calls is waiting")
    if failed:
        words.append(f"{failed} failed call{'s' if failed > 1 else ''}")
    return Text("; ".join(words), "error" if failed else "plain")


def _tracks(lanes: Mapping[int, Sequence[Drawn]], begin: int, end: int) -> Part:
    shown = sorted(lanes)[:_MOST_TRACKS]
    tracks = tuple(Track(rank, _rows(lanes[rank], begin, end)) for rank in shown)
    ticks = tuple((place / 4, _time((end - begin) * place // 4)) for place in range(5))
    drawing = Tracks(tracks, (ticks[0], *ticks[1:]))
    if len(lanes) <= len(shown):
        return drawing
    more = Text(f"and {len(lanes) - len(shown)} more workers, in the table", "muted")
    return VStack((drawing, more))


def _rows(spans: Sequence[Drawn], begin: int, end: int) -> tuple[tuple[Interval, ...], ...]:
    rows: list[list[Interval]] = [[], [], []]
    whole = end - begin
    for _, first, last, kind, name, state, waited in sorted(spans, key=lambda span: span[1]):
        if kind not in _ROWS:
            continue
        start, stop = (min(max((time - begin) / whole, 0.0), 1.0) for time in (first, last))
        row = rows[_ROWS[kind]]
        if kind == "collective":
            row += _collective(start, stop, name, state, waited / whole)
        else:
            look = state if state in ("failed", "stopped") else "span" if kind == "span" else "busy"
            row.append(Interval(round(start, 5), round(stop, 5), look, name))
    return tuple(map(tuple, rows))


def _collective(start: float, stop: float, name: str, state: str, waited: float) -> list[Interval]:
    """First the waiting, then the rest."""
    if state in ("failed", "stopped"):
        return [Interval(round(start, 5), round(stop, 5), state, name)]
    over = stop if state == "waiting" else min(start + waited, stop)
    parts = [("wait", start, over), ("move", over, stop)]
    return [
        Interval(round(first, 5), round(last, 5), look, name)
        for look, first, last in parts
        if last > first or (look == "move" and first == start)
    ]


def _worker_table(workers: Sequence[WorkerTime]) -> Part:
    columns = ("busy", "waiting", "idle", "calls", "collectives", "failed")
    rows = []
    for one in workers[:_MOST_WORKERS]:
        whole = max(1, one.busy + one.waiting + one.idle)
        times = [f"{_time(t)} ({_share(t, whole)})" for t in (one.busy, one.waiting, one.idle)]
        counts = [Text(str(one.commands)), Text(str(one.collectives))]
        failed = Text(str(one.failed), "error" if one.failed else "plain")
        rows.append(Row((*map(Text, times), *counts, failed), (one.rank,)))
    table = Table(tuple(Column(name, "right") for name in columns), tuple(rows))
    if len(workers) <= _MOST_WORKERS:
        return table
    more = Text(f"and {len(workers) - _MOST_WORKERS} more workers", "muted")
    return VStack((table, more))


def _site_table(sites: Sequence[SiteTime]) -> Part:
    columns = (
        Column("collective"),
        Column("called at"),
        Column("times", "right"),
        Column("waited", "right"),
        Column("last to arrive"),
        Column("data", "right"),
        Column(""),
    )
    rows = [
        Row(
            (
                Text(one.name),
                Text(cut(one.site, _LONGEST)),
                Text(str(one.count)),
                Text(_time(one.waited)),
                Text(_slowest(one)),
                Text(format_bytes(one.size)),
                _not_done(one),
            )
        )
        for one in sites[:_MOST_SITES]
    ]
    table = Table(columns, tuple(rows))
    if len(sites) <= _MOST_SITES:
        return table
    return VStack((table, Text(f"and {len(sites) - _MOST_SITES} more places", "muted")))


def _not_done(site: SiteTime) -> Text:
    words = [f"{site.failed} failed"] if site.failed else []
    if site.going:
        words.append(f"{site.going} not over")
    return Text(", ".join(words), "error" if site.failed else "plain")


def _slowest(site: SiteTime) -> str:
    """``worker 3, 7 of 9 times``."""
    if not site.slowest:
        return ""
    rank, times = site.slowest[0]
    return f"worker {rank}, {times} of {sum(count for _, count in site.slowest)} times"


def _time(nanoseconds: int) -> str:
    if nanoseconds == 0:
        return "0"
    return format_seconds(nanoseconds / 1e9) if nanoseconds >= 10_000 else f"{nanoseconds} ns"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f} %"
