"""What is known of a program at one moment, put in words: from its lockstep to a `Stop`."""

from __future__ import annotations

import linecache
from collections.abc import Sequence

from ..runtime.failures import name_ranks
from ..runtime.sources import place
from .lockstep import ABORTED, BLOCKED, HELD, OUT, PAUSED, RUNNING, Lockstep
from .stops import Stop, WorkerAt


def snapshot(lockstep: Lockstep, name: str, frame: int = 0) -> Stop:
    """How things are, without variables and sources; under the lock of the lockstep."""
    return Stop(
        name,
        lockstep.stops,
        _reason(lockstep),
        tuple(_worker_at(lockstep, rank) for rank in lockstep.state),
        lockstep.groups(),
        frame,
        lockstep.finished,
    )


def sources_of(workers: Sequence[WorkerAt]) -> dict[str, tuple[str, ...]]:
    """The lines of the files in which workers are."""
    files = {spot.file for worker in workers for spot in worker.stack}
    return {file: tuple(line.rstrip("\n") for line in linecache.getlines(file)) for file in files}


def not_paused(lockstep: Lockstep, chosen: Sequence[int]) -> str:
    """Why none of some workers can go on, and who can."""
    words = {BLOCKED: "in a collective", OUT: "not in this program", "done": "at its end"}
    groups: dict[str, list[int]] = {}
    for rank in chosen:
        state = lockstep.state[rank]
        groups.setdefault(words.get(state, state), []).append(rank)
    told = ", ".join(f"{name_ranks(ranks)} {text}" for text, ranks in groups.items())
    return f"none of them is paused ({told}); those that can go on: " + name_ranks(
        lockstep.ranks(PAUSED)
    )


def _worker_at(lockstep: Lockstep, rank: int) -> WorkerAt:
    state = lockstep.state[rank]
    if state is OUT:
        return WorkerAt(rank, OUT)
    at = lockstep.at.get(rank)
    shown = RUNNING if state is HELD else state
    if at is not None:
        note = at.detail if at.fired else ""
        raising = f"raising {at.raising}" if at.raising and at.reason != "raised" else ""
        words = "stands at a breakpoint until the others have come" if state is HELD else ""
        note = "; ".join(filter(None, [note, raising]))
        reason = at.reason if at.fired else ""
        return WorkerAt(rank, shown, at.stack, words, note=note, error=at.error, reason=reason)
    wait = lockstep.waits.get(rank)
    if wait is not None:
        return WorkerAt(rank, shown, (), wait.words, wait.whom)
    ended = lockstep.ends.get(rank, "")
    return WorkerAt(rank, shown, words=ended if state == ABORTED else "", error=ended)


def _reason(lockstep: Lockstep) -> str:
    """Why the last stop was: ``breakpoint 1 at Cell In[3], line 5``."""
    if lockstep.finished:
        return "the program has ended"
    if not lockstep.settled:
        return "running"
    stopped = [rank for rank in lockstep.stopped if rank in lockstep.at]
    if not stopped:
        return "those that went on wait for others, or have ended"
    reasons: dict[str, list[int]] = {}
    for rank in stopped:
        at = lockstep.at[rank]
        if at.fired:
            words = {"entry": "first line", "step": "stepped", "pause": "paused"}
            told = at.detail or words.get(at.reason, at.reason)
            reasons.setdefault(told, []).append(rank)
    groups = lockstep.groups()
    here = lockstep.at[groups[0][0]].here
    where = place(here.file, here.line) if len(groups) == 1 else f"{len(groups)} places"
    if len(reasons) == 1:
        ((told, ranks),) = reasons.items()
        whose = "" if len(ranks) == len(stopped) else f" ({name_ranks(ranks)})"
        return f"{told}{whose} at {where}"
    told = ", ".join(f"{text} ({name_ranks(ranks)})" for text, ranks in reasons.items())
    return f"{told} at {where}"
