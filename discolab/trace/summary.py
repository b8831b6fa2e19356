"""What a trace comes to: where each worker's time went, and which collectives cost waiting.

Waiting is what a member of a collective spends until the last one calls; what the collective itself
takes then counts as busy. One that never became whole is waiting until it ended. What is started
with ``async_op`` is no waiting. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..views.parts import Part
from ..views.timeline_view import Drawn, SiteTime, WorkerTime, timeline_parts
from .events import COLLECTIVE, COMMAND, FAILED, SPAN, Event
from .folding import fold
from .rounds import Round

_PIXELS = (120, 60, 30, 16)  # of a drawing that is a part of a saved notebook
_MOST_SPANS = 400  # in it; else it is drawn coarser
_MOST_LANES = 16
_DRAWN = (COMMAND, SPAN, COLLECTIVE)


@dataclass(frozen=True)
class Summary:
    """Of a trace: `workers` in rank order, `sites` with the most waiting first; times in ns."""

    workers: tuple[WorkerTime, ...]
    sites: tuple[SiteTime, ...]


def sum_up(
    events: Mapping[int, Sequence[Event]], rounds: Iterable[Round], extent: tuple[int, int]
) -> Summary:
    """See `Trace.summary`; what is not over ends with the extent."""
    rounds = tuple(rounds)
    begin, end = extent
    waiting = _waiting(events, rounds, end)
    workers = []
    for rank, mine in sorted(events.items()):
        commands = [event for event in mine if event.kind == COMMAND]
        calls = [event for event in commands if event.is_call]
        called = sum(event.until(end) - event.begin for event in commands)
        waited = min(waiting[rank], called)
        workers.append(
            WorkerTime(
                rank,
                called - waited,
                waited,
                max(0, end - begin - called),
                len(calls),
                sum(event.kind == COLLECTIVE for event in mine),
                sum(event.state == FAILED for event in calls),
            )
        )
    return Summary(tuple(workers), _sites(rounds, end))


def _waiting(
    events: Mapping[int, Sequence[Event]], rounds: Iterable[Round], end: int
) -> Counter[int]:
    waits = _by_begin(rounds, end)
    waiting: Counter[int] = Counter()
    for rank, mine in events.items():
        for event in mine:
            if event.kind == COLLECTIVE and not event.asynchronous:
                taken = event.until(end) - event.begin
                known = waits.get((rank, event.begin, event.number), taken)
                waiting[rank] += min(known, taken)
    return waiting


def _by_begin(rounds: Iterable[Round], end: int) -> dict[tuple[int, int, int], int]:
    """How long each member of each has waited, by its rank, its begin and the number."""
    return {
        (rank, round.begins[rank], round.number): waited
        for round in rounds
        for rank, waited in round.waits_until(end).items()
    }


def _sites(rounds: Iterable[Round], end: int) -> tuple[SiteTime, ...]:
    """By place in the program and operation."""
    by_place: dict[tuple[str, str], list[Round]] = {}
    for round in rounds:
        by_place.setdefault((round.site, round.name), []).append(round)
    sites = []
    for (site, name), mine in by_place.items():
        last = Counter(round.slowest for round in mine if round.slowest is not None)
        sites.append(
            SiteTime(
                name,
                site,
                len(mine),
                sum(sum(round.waits_until(end).values()) for round in mine),
                tuple(sorted(last.items(), key=lambda item: (-item[1], item[0]))),
                sum(round.size * len(round.begins) for round in mine),
                sum(round.failed for round in mine),
                sum(round.goes_on and not round.failed for round in mine),
            )
        )
    return tuple(sorted(sites, key=lambda site: (-site.waited, site.site, site.name)))


def parts_of(
    title: str,
    events: Mapping[int, Sequence[Event]],
    rounds: Iterable[Round],
    extent: tuple[int, int],
    notes: Sequence[str],
) -> Part:
    """A trace as it is drawn; the arguments are what a `Trace` has."""
    rounds = tuple(rounds)
    waits = _by_begin(rounds, extent[1])
    lanes: dict[int, list[Drawn]] = {rank: [] for rank in sorted(events)}
    for pixels in _PIXELS:
        for rank in tuple(lanes)[:_MOST_LANES]:
            lanes[rank] = _drawn(events[rank], rank, extent, pixels, waits)
        if sum(map(len, lanes.values())) <= _MOST_SPANS:
            break
    return timeline_parts(title, lanes, extent, sum_up(events, rounds, extent), notes)


def _drawn(
    events: Sequence[Event],
    rank: int,
    extent: tuple[int, int],
    pixels: int,
    waits: Mapping[tuple[int, int, int], int],
) -> list[Drawn]:
    begin, end = extent
    mine = {
        event.seq: waits.get((rank, event.begin, event.number), 0)
        for event in events
        if event.kind == COLLECTIVE
    }
    shown = [e for e in events if e.kind in _DRAWN and not e.depth and not e.asynchronous]
    return [
        (span.row, span.begin, span.end, span.kind, span.name, span.state, span.waited)
        for span in fold(shown, begin, end, pixels, end, mine)
    ]
