"""Reads recorders from beside their workers, by probes, and compares the clocks of machines.

What travels is plain: an event is a list in the order of `Event`, many are packed. The controller
asks only for new events, in pieces of a bounded size, and again for events that were not over.
"""

from __future__ import annotations

import math
import socket
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import CodeType
from typing import Any

from ..ccl.call import DONE as CALL_DONE
from ..ccl.call import P2P, WAITING, Call, Signature
from ..runtime.actions import site_text
from ..runtime.errors import DiscoError
from ..runtime.services import probe
from ..runtime.session import Session
from ..runtime.sources import display_name, is_cell
from ..runtime.worker import Worker
from .events import COLLECTIVE, COMMAND, DONE, FAILED, NOW, RUNNING, SPAN, STOPPED
from .packing import pack
from .recorder import CollectiveEntry, Entry, Recorder, recorder_of

_number = itemgetter(0)  # of an entry
_AHEAD = 100  # the last entries, whose commands are told before it is their turn
_PINGS = 7  # round trips of which the fastest tells the difference of two clocks
_CLOCKS = time.perf_counter_ns() - time.monotonic_ns()
_SHIFT = _CLOCKS if abs(_CLOCKS) > 1_000_000 else 0  # they are one clock on Linux and macOS


@probe
def news(worker: Worker, wanted: Sequence[Sequence[Any]], most: int) -> dict[str, Any]:
    """What a recorder has got since it was asked last.

    Parameters
    ----------
    wanted
        For each rank: the highest number that is known, and the numbers of events that were not
        over then.
    most
        Events to tell at most, the oldest first; of what is left the last commands are told too.
    """
    recorder = recorder_of(worker)
    if recorder is None:
        return {"on": False, "first": 0, "newest": -1, "cleared": 0, "profiled": 0}
    since, unfinished = wanted[worker.worker_id]
    now = _running(recorder)  # before the ring: what ends meanwhile is told twice, not never
    first, newest = _ends(recorder)
    ring = _tail(recorder, newest - min([since, *(number - 1 for number in unfinished)]))
    start = bisect_right(ring, since, key=_number)
    fresh = ring[start : start + most]
    formatter = Formatter(worker)
    ahead = [entry for entry in ring[start + most :][-_AHEAD:] if _is_command(entry)]
    return {
        "on": recorder.on,
        "again": pack([formatter.format(entry) for entry in _by_number(ring, unfinished)]),
        "fresh": pack([formatter.format(entry) for entry in fresh]),
        "now": [*([NOW, *formatter.format(entry)[1:]] for entry in ahead), *now],  # they come again
        "first": first,
        "newest": newest,
        "cleared": recorder.cleared,
        "profiled": len(recorder.profiled),
    }


@probe
def profiled(worker: Worker, first: int, most: int) -> list[Any]:
    """What torch's profiler has recorded, from the event at `first` on."""
    recorder = recorder_of(worker)
    return [] if recorder is None else [list(e) for e in recorder.profiled[first : first + most]]


def _ends(recorder: Recorder) -> tuple[int, int]:
    """The numbers of the oldest and the newest entry."""
    try:
        return recorder.ring[0][0], recorder.ring[-1][0]
    except IndexError:
        return 0, -1


def _tail(recorder: Recorder, count: int) -> list[Entry | CollectiveEntry]:
    """The last entries, in the order of their numbers."""
    while count > 0:
        try:
            entries = list(islice(reversed(recorder.ring), count))
        except RuntimeError:  # something was appended just then
            continue
        entries.sort(key=_number)  # a thread of the worker's may have come in between
        return entries
    return []


def _running(recorder: Recorder) -> list[Any]:
    """The command that runs and the spans that are open in it."""
    opened, spans, formatter = recorder.open, recorder.spans.copy(), Formatter(recorder.worker)
    if opened is None or not recorder.on:
        return []
    name, cell, site, begin, ordinal, whose = opened
    entries: list[Entry] = [(NOW, COMMAND, name, cell, site, begin, 0, RUNNING, ordinal, 0, whose)]
    for depth, span in enumerate(spans):
        what = NOW, SPAN, span.name, "", span.place
        entries.append((*what, span.begin, 0, RUNNING, ordinal, depth, ""))
    return [formatter.format(entry) for entry in entries]


def _by_number(
    ring: Sequence[Entry | CollectiveEntry], numbers: Sequence[int]
) -> list[Entry | CollectiveEntry]:
    places = [bisect_left(ring, number, key=_number) for number in numbers]
    return [
        ring[place]
        for place, number in zip(places, numbers, strict=True)
        if place < len(ring) and ring[place][0] == number
    ]


def _is_command(entry: Entry | CollectiveEntry) -> bool:
    return len(entry) > 2 and entry[1] == COMMAND


class Formatter:
    """Makes entries of a ring plain; made for one question, as it remembers call sites."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sites: dict[Any, str] = {}

    def format(self, entry: Entry | CollectiveEntry) -> list[Any]:
        """An entry as it travels."""
        return self._event(entry) if len(entry) > 2 else self._collective(*entry)

    def _event(self, entry: Any) -> list[Any]:
        seq, kind, name, cell, site, begin, end, state, ordinal, depth, thread = entry
        if cell:
            name, site = (display_name(cell) if is_cell(cell) else name), None
        place = self._site(site)
        return [
            seq, kind, name, begin, end, state, place, ordinal, depth, -1, (), thread, 0, "", False
        ]  # fmt: skip

    def _collective(self, seq: int, call: Call) -> list[Any]:
        ended = call.ended
        state = _state(call, self._worker) if ended else WAITING
        begin, end = (int(t * 1e9) + _SHIFT if t else 0 for t in (call.began, ended))
        detail, size = _contents(call.signature)
        number = call.number if call.signature.op not in P2P else -1
        group = call.group
        return [
            seq, COLLECTIVE, call.name, begin, end, state, self._site(call.site), call.ordinal, 0,
            number, tuple(group.ranks), detail, size, group.tag, call.asynchronous,
        ]  # fmt: skip

    def _site(self, site: Any) -> str:
        if site is None:
            return ""
        text = self._sites.get(site)
        if text is None:
            text = site_text(_with_line(*site) if len(site) == 3 else site)
            self._sites[site] = text
        return text


def _with_line(code: CodeType, instruction: int, _: None) -> tuple[CodeType, int]:
    """A call site whose line is not worked out yet."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return code, line
    return code, code.co_firstlineno


def _state(call: Call, worker: Worker) -> str:
    if call.state is CALL_DONE:
        return DONE
    return STOPPED if call.ordinal < worker.resumed_at else FAILED


@lru_cache(maxsize=1024)
def _contents(signature: Signature) -> tuple[str, int]:
    """What a collective moves, as text and in bytes."""
    facts = [signature.of.removeprefix(" of ")] if signature.kinds else []
    if signature.reduction:
        facts.append(signature.reduction)
    if signature.op in P2P:
        whom = "any worker" if signature.root is None else f"worker {signature.root}"
        facts.append(f"{'to' if signature.op == 'send' else 'from'} {whom}")
    elif signature.root is not None:
        facts.append(f"root worker {signature.root}")
    size = sum(math.prod(shape or ()) * dtype.itemsize for dtype, shape in signature.kinds)
    return ", ".join(facts), size


# -- clocks ----------------------------------------------------------------------------------


@probe
def clock_here(worker: Worker) -> list[Any]:
    """This worker's clock, and what tells machines apart."""
    return [time.perf_counter_ns(), _machine()]


@lru_cache(maxsize=1)
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return boot or socket.gethostname()


def clock_shifts(session: Session, timeout: float) -> dict[int, tuple[int, int]]:
    """How far each worker's clock is ahead of the controller's, and the bound of the error, in ns.

    Workers of this machine have our clock; the others are asked a few times each, and the fastest
    answer counts. A worker that does not answer is not in it.
    """
    began = time.perf_counter_ns()
    answers = session.look(clock_here, timeout=timeout)
    ended = time.perf_counter_ns()
    shifts: dict[int, tuple[int, int]] = {}
    for rank, (there, machine) in answers.items():
        if machine == _machine() and began <= there <= ended:
            shifts[rank] = 0, 0
        else:
            shift = _ask_often(session, rank, timeout)
            if shift is not None:
                shifts[rank] = shift
    return shifts


def _ask_often(session: Session, rank: int, timeout: float) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    for _ in range(_PINGS):
        began = time.perf_counter_ns()
        try:
            answers = session.look(clock_here, ranks=[rank], timeout=timeout)
        except DiscoError:
            return best
        ended = time.perf_counter_ns()
        if rank not in answers:
            return best
        half = (ended - began + 1) // 2
        if best is None or half < best[1]:
            best = answers[rank][0] - (began + half), half
    return best
