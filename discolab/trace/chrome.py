"""A trace as a file for Perfetto and chrome://tracing: the Trace Event Format, as a JSON object.

Each worker is a process of its rank. What its own thread does is thread 0, where things lie within
each other; what may overlap that has threads of its own. Arrows go from the member of a collective
that came last to those that waited for it. Times are microseconds from the trace's beginning.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .events import COLLECTIVE, COMMAND, CPU, FAILED, GPU, MARK, SPAN, STOPPED, Event
from .rounds import Round

MAIN, ASYNC, PROFILER, FIRST_GPU, FIRST_THREAD = 0, 1, 2, 10, 100  # numbers of threads
_NAMES = {MAIN: "worker", ASYNC: "asynchronous collectives", PROFILER: "torch.profiler"}
_LEAST = 1  # ns that everything lasts, so that arrows find it


def write(path: Path, document: dict[str, Any]) -> Path:
    """Save a `document`; with the suffix ``.gz`` compressed."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def document(
    title: str,
    events: Mapping[int, tuple[Event, ...]],
    rounds: Iterable[Round],
    extent: tuple[int, int],
    devices: Mapping[int, str],
    missing: Mapping[int, str],
) -> dict[str, Any]:
    """The file's contents; the arguments are what a `Trace` has."""
    begin, end = extent
    written: list[dict[str, Any]] = []
    for rank, mine in sorted(events.items()):
        lane = _Lane(rank, begin, end, mine)
        written += lane.events()
        written += lane.names(devices.get(rank, ""))
    for number, round in enumerate(rounds):
        written += _arrows(round, number, begin, end)
    return {
        "traceEvents": written,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "discolab",
            "session": title,
            "begin_ns": str(begin),
            **{f"worker {rank}": why for rank, why in missing.items()},
        },
    }


class _Lane:
    """One worker's events."""

    def __init__(self, rank: int, begin: int, end: int, events: tuple[Event, ...]) -> None:
        self._rank, self._begin, self._end, self._all = rank, begin, end, events
        self._threads: dict[str, int] = {}
        self._used: dict[int, str] = {MAIN: _NAMES[MAIN]}
        self._commands: Mapping[int, Event] = {
            event.ordinal: event for event in events if event.kind == COMMAND
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """All of them; call `names` after."""
        for event in self._all:
            thread = self._thread(event)
            begin, end = event.begin, event.until(self._end)
            around = self._commands.get(event.ordinal)
            if thread == MAIN and event.kind == COLLECTIVE and around is not None:
                end = min(end, around.end or self._end)  # an interrupt closed it later
            entry: dict[str, Any] = {
                "name": event.name,
                "cat": event.kind,
                "pid": self._rank,
                "tid": thread,
                "ts": (begin - self._begin) / 1000,
                "args": _arguments(event),
            }
            if event.state in (FAILED, STOPPED):
                entry["cname"] = "terrible"  # red in chrome://tracing
            if event.kind == MARK:
                yield {**entry, "ph": "i", "s": "t"}
            elif thread == ASYNC:  # these overlap each other
                identity = {"id2": {"local": f"{self._rank}.{event.seq}"}}
                yield {**entry, **identity, "ph": "b"}
                over = {**entry, **identity, "ph": "e", "ts": (end - self._begin) / 1000}
                over.pop("args")
                yield over
            else:
                yield {**entry, "ph": "X", "dur": max(end - begin, _LEAST) / 1000}

    def names(self, device: str) -> Iterator[dict[str, Any]]:
        """What the worker and its threads are called, and their order."""
        rank = self._rank
        name = f"worker {rank}" + (f" ({device})" if device else "")
        yield _about(rank, MAIN, "process_name", {"name": name})
        yield _about(rank, MAIN, "process_sort_index", {"sort_index": rank})
        for thread, title in sorted(self._used.items()):
            yield _about(rank, thread, "thread_name", {"name": title})
            yield _about(rank, thread, "thread_sort_index", {"sort_index": thread})

    def _thread(self, event: Event) -> int:
        if event.kind == COLLECTIVE:
            thread, name = (ASYNC if event.asynchronous else MAIN), ""
        elif event.kind == CPU:
            thread, name = PROFILER, ""
        elif event.kind == GPU:
            thread = FIRST_GPU + self._threads.setdefault(event.detail, len(self._threads))
            name = event.detail
        elif event.kind == SPAN and event.detail:  # a span on a thread that the worker started
            thread = FIRST_THREAD + self._threads.setdefault(event.detail, len(self._threads))
            name = event.detail
        else:
            return MAIN
        self._used.setdefault(thread, name or _NAMES[thread])
        return thread


def _arguments(event: Event) -> dict[str, Any]:
    arguments: dict[str, Any] = {"state": event.state}
    if event.site:
        arguments["called at"] = event.site
    if event.ordinal >= 0:
        arguments["call"] = event.ordinal
    if event.kind == COLLECTIVE:
        arguments |= {"data": event.detail, "bytes": event.size, "group": list(event.group)}
        if event.number >= 0:
            arguments["number"] = event.number
    if not event.end:
        arguments["unfinished"] = True
    return arguments


def _about(rank: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "cat": "__metadata", "pid": rank, "tid": thread, "ts": 0,
            "args": args}  # fmt: skip


def _arrows(round: Round, number: int, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """From the member that came last to each of the others, at the moment at which it came."""
    if round.slowest is None or round.asynchronous:
        return
    last = round.begins[round.slowest]
    for rank in round.group:
        if rank == round.slowest or not round.begins[rank] <= last < (round.ends[rank] or end):
            continue
        arrow = {
            "name": round.name,
            "cat": "waits for",
            "id": f"{number}.{rank}",
            "tid": MAIN,
            "ts": (last - begin) / 1000,
        }
        yield {**arrow, "ph": "s", "pid": round.slowest}
        yield {**arrow, "ph": "f", "bp": "e", "pid": rank}
