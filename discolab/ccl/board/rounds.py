"""The ledger's lines side by side: which calls of several workers are the same collective.

Pure functions on the workers' stories. A `Round` is one collective with what each member did
about it; a message has a round of its own on each side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...runtime.actions import site_text
from ...runtime.errors import CollectiveError, WaitTimeoutError
from ...runtime.failures import Failure
from ..call import DONE, FAILED, P2P, WAITING, Call, Site
from ..groups import Group
from .ledger import LENGTH
from .peers import Peer

_COLLECTIVE = ("CollectiveError", "CollectiveAborted")
MISSING, STARTED, STOPPED, LEFT, LATE = "missing", "started", "stopped", "left", "late"
_Key = tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """What one worker did about one collective.

    Attributes
    ----------
    what
        ``all_reduce(sum) of float32[4]``; of a member that is missing, what it did instead.
    state
        ``done``, ``waiting``, ``failed``; ``started`` if it is asynchronous and not waited for,
        ``stopped`` by an interrupt, ``left`` if its command ended without it, ``late`` if it came
        when another member's patience had ended, or ``missing``.
    odd
        Whether this member does not do what the others do.
    seconds
        From the call until it was over, or until now; None for a member that is missing.
    """

    rank: int
    what: str
    state: str
    odd: bool = False
    site: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Round:
    """One collective: the ordinal of its command, its number within that as error messages count
    it, its group, and an entry for each member in rank order.

    `number` is None for a message, and for a call that has met nobody.
    """

    ordinal: int
    number: int | None
    group: tuple[int, ...]
    tag: str
    entries: tuple[Entry, ...]


def align(
    stories: Mapping[int, Sequence[Call]],
    workers: Mapping[int, Peer],
    failures: Mapping[int, Mapping[int, Failure]],
    chosen: Collection[int],
    n: int,
    wanted: Callable[[Group], bool],
) -> tuple[Round, ...]:
    """The last `n` collectives of each chosen worker, those that it should have called included.

    Parameters
    ----------
    stories
        The calls of each worker, the oldest first.
    failures
        Of each worker, by the ordinal of the command.
    wanted
        Whether to show the collectives of a group.

    Returns
    -------
    tuple of Round
        In an order that each worker's own calls have, if there is one; the same for the same
        stories, whenever they were written.
    """
    calls: dict[_Key, dict[int, Call]] = {}
    lines: dict[int, list[_Key]] = {rank: [] for rank in stories}
    for rank, story in stories.items():
        for place, call in enumerate(story):
            if wanted(call.group):
                lines[rank].append(_key(call, place))
                calls.setdefault(lines[rank][-1], {})[rank] = call
    order = in_order(lines)
    shown: set[_Key] = set()
    for rank in chosen:
        shown.update([key for key in order if rank in _members(calls[key])][-n:])
    return tuple(_round(calls[key], stories, workers, failures) for key in order if key in shown)


def in_order(lines: Mapping[int, Sequence[_Key]]) -> list[_Key]:
    """Merge sequences into one that keeps the order of each, as far as they agree on one.

    Examples
    --------
    >>> in_order({0: [("a",), ("c",)], 1: [("b",), ("c",)]})
    [('a',), ('b',), ('c',)]
    """
    at = dict.fromkeys(sorted(lines), 0)
    left = Counter(key for line in lines.values() for key in line)
    merged: list[_Key] = []
    done: set[_Key] = set()
    while True:
        for rank, line in lines.items():
            while at[rank] < len(line) and line[at[rank]] in done:
                at[rank] += 1
        heads = Counter(lines[rank][at[rank]] for rank in at if at[rank] < len(lines[rank]))
        if not heads:
            return merged
        free = [key for key, count in heads.items() if count == left[key]]
        merged.append(min(free or heads))  # without a free one the workers' orders contradict
        done.add(merged[-1])


def _key(call: Call, place: int) -> _Key:
    """What the calls of one collective have in common; ordered by command, messages first."""
    if call.number < 0:
        return call.ordinal, False, (call.rank,), "", place
    return call.ordinal, True, call.group.ranks, call.group.tag, call.number


def _members(calls: Mapping[int, Call]) -> Collection[int]:
    """Whom a collective is about: those too that have not called."""
    one = next(iter(calls.values()))
    return one.group.ranks if one.number >= 0 else calls.keys()


def _round(
    calls: Mapping[int, Call],
    stories: Mapping[int, Sequence[Call]],
    workers: Mapping[int, Peer],
    failures: Mapping[int, Mapping[int, Failure]],
) -> Round:
    one = next(iter(calls.values()))
    usual, late = _usual(calls.values()), _late(calls, failures)
    ends = (line.get(one.ordinal) for line in failures.values())
    was_stopped = any(end is not None and end.interrupted for end in ends)
    entries = []
    for rank in _members(calls):
        call = calls.get(rank)
        if call is not None:
            odd = call.signature not in usual
            entry = _entry(call, workers[rank], failures[rank].get(call.ordinal), odd, was_stopped)
            if rank in late and entry.state is FAILED:
                entry = replace(entry, state=LATE, odd=True)
            entries.append(entry)
        elif not any(other.state is DONE for other in calls.values()):
            entries.append(_absent(rank, one.ordinal, stories, workers, failures))
    number = one.number + 1 if one.number >= 0 else None
    return Round(one.ordinal, number, one.group.ranks, one.group.tag, tuple(entries))


def _usual(calls: Collection[Call]) -> set[Any]:
    """What most members ask for; nothing if two things are asked for equally often."""
    counts = Counter(call.signature for call in calls).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return set()
    return {counts[0][0]}


def _late(
    calls: Mapping[int, Call], failures: Mapping[int, Mapping[int, Failure]]
) -> Collection[int]:
    """The members that called only after another one had given up."""
    failed = [call for call in calls.values() if call.state is FAILED]
    ends = [failures[call.rank].get(call.ordinal) for call in failed]
    if not any(end is not None and _gave_up(end) for end in ends):
        return ()
    over = min(call.ended for call in failed)
    return [call.rank for call in failed if call.began > over]


def _entry(
    call: Call, worker: Peer, failure: Failure | None, odd: bool, was_stopped: bool
) -> Entry:
    seconds = (call.ended or time.monotonic()) - call.began
    state = _state(call, worker, failure, was_stopped)
    return Entry(call.rank, _words(call), state, odd, in_words(call.site), seconds)


def _words(call: Call) -> str:
    signature = call.signature
    if signature.op not in P2P:
        return str(signature)
    whom = "any worker" if signature.root is None else f"worker {signature.root}"
    return f"{signature.op} {'to' if signature.op == 'send' else 'from'} {whom}{signature.of}"


def _state(call: Call, worker: Peer, failure: Failure | None, was_stopped: bool) -> str:
    """How far a call has come; `was_stopped`: an interrupt has ended its command somewhere."""
    if call.state is DONE:
        return DONE
    if call.state is FAILED and not was_stopped:  # before a later command was stopped
        return FAILED
    if call.ordinal < worker.resumed_at or (failure is not None and failure.interrupted):
        return STOPPED
    if call.state is FAILED:
        return FAILED
    if call.asynchronous and not _waits_for(worker, call):
        return STARTED
    return LEFT if worker.executed > call.ordinal else WAITING


def _waits_for(worker: Peer, call: Call) -> bool:
    call_of = getattr(worker.waiting_for, "call_of", None)
    return call_of is not None and call_of(call.rank) is call


def _absent(
    rank: int,
    ordinal: int,
    stories: Mapping[int, Sequence[Call]],
    workers: Mapping[int, Peer],
    failures: Mapping[int, Mapping[int, Failure]],
) -> Entry:
    """A member that has not called."""
    worker, story = workers.get(rank), stories.get(rank, ())
    if worker is None:
        return Entry(rank, "is in another process, not seen from here", MISSING)
    if len(story) >= LENGTH and story[0].ordinal > ordinal:
        return Entry(rank, "was so long ago that it is forgotten", MISSING)
    failure = failures[rank].get(ordinal)
    if failure is not None and failure.interrupted:
        words = "was stopped before it called"
    elif failure is not None and failed_in_collective(failure):
        words = "has failed in another one before"
    elif failure is not None:
        words = f"failed before it: {failure.headline.splitlines()[0]}"
    elif worker.ended:
        words = "has ended"
    elif ordinal < worker.joined_at:
        words = "was lost; another worker has its place now"
    elif worker.executed > ordinal:
        words = "finished without it"
    else:
        words = "has not called it"
    return Entry(rank, words, MISSING, True)


def in_words(site: Site | None) -> str:
    """``Cell In[3], line 4, in step``; "" if it is not known."""
    text = site_text(site)
    name = getattr(site[0], "co_name", "") if site is not None else ""
    return f"{text}, in {name}" if text and name.isidentifier() else text


def failed_in_collective(failure: Failure) -> bool:
    """Whether a failure is what a collective told, or follows from it."""
    if failure.exception is None:  # it was in another process
        return failure.type_name in _COLLECTIVE or _gave_up(failure)
    return isinstance(failure.exception, CollectiveError) or _gave_up(failure)


def _gave_up(failure: Failure) -> bool:
    exception = failure.exception
    late = failure.type_name == "WaitTimeoutError" and exception is None
    return (late or isinstance(exception, WaitTimeoutError)) and " waiting for " in failure.message
