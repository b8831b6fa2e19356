"""What must come of a random program: an abstract execution that knows nothing of the library.

`foretell` carries out the lists of all workers as far as they can go. As nobody's choice depends
on time, who gets stuck where is the same in every order of execution, with one exception: what
a worker sent before it failed is received or dropped, depending on who is faster. So the
execution is repeated with all messages of those that fail dropped; who fails only then *may* fail.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Typed = tuple[Array, str]  # numbers and dtype
Place = tuple[tuple[int, ...], str, int]  # members, tag and number of a collective
Route = tuple[int | None, int, str]  # sender (None: any), receiver and tag

_FOLD = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}
_COALESCED = "_coalesced"


@dataclass(frozen=True)
class Entry:
    """One thing that one worker does.

    `do` is "collective", "send", "recv", "wait", "raise" or "nap"; `slot` names what is waited
    for later (-1: wait at once); `root` is an index into the group; `key` makes the values.
    """

    do: str
    key: int = 0
    op: str = ""
    group: tuple[int, ...] = ()
    via: str = "list"
    tag: str = ""
    rows: int = 1
    dtype: str = "float32"
    reduction: str = "sum"
    root: int = 0
    peer: int | None = None
    slot: int = -1
    nap: float = 0.0

    def __str__(self) -> str:
        later = f" -> {self.slot}" if self.slot >= 0 else ""
        if self.do == "collective":
            how = f"{self.via} {list(self.group)} {self.tag!r} {self.reduction} root {self.root}"
            return f"{self.op} of {self.rows} {self.dtype} in {how}{later}"
        if self.do in ("send", "recv"):
            return f"{self.do} {self.peer} tag {self.tag!r} of {self.rows} {self.dtype}{later}"
        return f"{self.do} {self.slot if self.do == 'wait' else self.nap or ''}"


Program = tuple[tuple[Entry, ...], ...]


def value(entry: Entry, rank: int, rows: int | None = None) -> np.ndarray[Any, Any]:
    """The input of a worker: 1, 2 and 3, so that everything is exact in every dtype."""
    rows = entry.rows * len(entry.group) if rows is None else rows
    numbers = np.arange(rows * 2) * (entry.key + 3) + np.arange(rows * 2) // 3
    return ((numbers + rank * (1 + entry.key % 2)) % 3 + 1.0).reshape(rows, 2)


def uneven(entry: Entry, sender: int, receiver: int) -> int:
    """How many rows one member sends to another in an all-to-all of lists."""
    return (sender + 2 * receiver + entry.key) % 3 * entry.rows


@dataclass
class Outcome:
    """What a program must come to.

    Attributes
    ----------
    failed
        Where each worker that must fail is stuck: its entry.
    may_fail
        Workers that fail or not, as the others' speed has it.
    results
        Of each worker that comes to its end.
    posts
        Who calls what at each collective for which somebody waits in vain, by rank.
    messages
        How many tensors are sent and never received, those of workers that fail left out.
    receptions
        How many an `irecv` that did not fail still waits for.
    """

    failed: dict[int, Entry] = field(default_factory=dict)
    may_fail: set[int] = field(default_factory=set)
    results: dict[int, list[Any]] = field(default_factory=dict)
    posts: dict[Place, dict[int, Entry]] = field(default_factory=dict)
    messages: int = 0
    receptions: int = 0

    def disagreements(self) -> list[dict[int, Entry]]:
        """The collectives in which members call different things."""
        return [p for p in self.posts.values() if len(set(map(signature, p.values()))) > 1]


def foretell(program: Program) -> Outcome:
    """What must come of a program."""
    outcome = _Run(program, ()).outcome()
    failed = set(outcome.failed)
    while True:
        more = failed | set(_Run(program, failed).outcome().failed)
        if more == failed:
            break
        failed = more
    outcome.may_fail = failed - set(outcome.failed)
    return outcome


def signature(entry: Entry) -> tuple[Any, ...]:
    """What all members must agree on."""
    op = entry.op
    if op == "barrier":
        return (op,)
    reducing = "reduce" in op
    rooted = op in ("broadcast", "scatter", "gather", "reduce")
    return (
        op,
        entry.reduction if reducing else "",
        entry.root if rooted else -1,
        entry.rows,
        entry.dtype,
    )


class _Run:
    """One execution; what workers of `void` sent never comes."""

    def __init__(self, program: Program, void: Collection[int]) -> None:
        ranks = range(len(program))
        self.program, self.void = program, void
        self.at = [0 for _ in ranks]
        self.posted = [False for _ in ranks]
        self.counts: list[dict[Any, int]] = [{} for _ in ranks]
        self.works: list[dict[int, Any]] = [{} for _ in ranks]
        self.results: list[list[Any]] = [[] for _ in ranks]
        self.posts: dict[Place, dict[int, Entry]] = {}
        self.mail: dict[Route, list[Typed]] = {}
        self.lines: dict[Route, list[_Reception]] = {}
        while any(self._advance(rank) for rank in ranks):
            pass

    def outcome(self) -> Outcome:
        found = Outcome()
        for rank, entries in enumerate(self.program):
            if self.at[rank] < len(entries):
                entry = found.failed[rank] = entries[self.at[rank]]
                place = self.works[rank].get(entry.slot)
                if place in self.posts:
                    found.posts[place] = self.posts[place]
            else:
                found.results[rank] = self.results[rank]
        found.messages = sum(
            len(box)
            for (sender, receiver, _), box in self.mail.items()
            if sender not in found.failed and receiver not in found.failed
        )
        found.receptions = sum(
            len(line)
            for (_, receiver, _), line in self.lines.items()
            if receiver not in found.failed
        )
        return found

    def _advance(self, rank: int) -> bool:
        """Go on with one worker as far as possible; whether it moved."""
        start = self.at[rank]
        entries = self.program[rank]
        while self.at[rank] < len(entries) and self._do(rank, entries[self.at[rank]]):
            self.at[rank] += 1
            self.posted[rank] = False
        return self.at[rank] > start

    def _do(self, rank: int, entry: Entry) -> bool:
        """One entry; whether it is over."""
        if entry.do == "raise" or entry.reduction == "mean":
            return False
        if entry.do == "send":
            assert entry.peer is not None
            route = (rank, entry.peer, entry.tag)
            if rank not in self.void:
                sent = (value(entry, entry.group[0], entry.rows), entry.dtype)
                self.mail.setdefault(route, []).append(sent)
        elif entry.do in ("recv", "collective"):
            if not self.posted[rank]:
                start = self._line_up if entry.do == "recv" else self._post
                self.works[rank][entry.slot] = start(rank, entry)
                self.posted[rank] = True
            return entry.slot >= 0 or self._over(rank, -1)
        elif entry.do == "wait":
            return self._over(rank, entry.slot)
        return True

    def _post(self, rank: int, entry: Entry) -> Place:
        group = (entry.group, entry.tag)
        number = self.counts[rank].get(group, 0)
        self.counts[rank][group] = number + 1
        place = (*group, number)
        self.posts.setdefault(place, {})[rank] = entry
        return place

    def _line_up(self, rank: int, entry: Entry) -> _Reception:
        reception = _Reception((entry.peer, rank, entry.tag), (entry.rows, entry.dtype))
        self.lines.setdefault(reception.route, []).append(reception)
        return reception

    def _over(self, rank: int, slot: int) -> bool:
        """Whether what was started in a slot is over; its result is noted then."""
        work = self.works[rank][slot]
        if isinstance(work, _Reception):
            if not self._served(work):
                return False
            self.results[rank].append(work.got)
        elif self._complete(work):
            self.results[rank].append(result(self.posts[work], rank))
        else:
            return False
        return True

    def _complete(self, place: Place) -> bool:
        posts = self.posts[place]
        return len(posts) == len(place[0]) and len(set(map(signature, posts.values()))) == 1

    def _served(self, work: _Reception) -> bool:
        """Hand out messages to the line, up to this one."""
        line = self.lines[work.route]
        while work in line:
            boxes = [box for route, box in self.mail.items() if box and work.takes(route)]
            if not boxes:
                return False
            numbers, dtype = boxes[0][0]
            if (len(numbers), dtype) != line[0].kind:
                return False
            line.pop(0).got = boxes[0].pop(0)
        return True


class _Reception:
    """A recv that was started."""

    def __init__(self, route: Route, kind: tuple[int, str]) -> None:
        self.route, self.kind = route, kind
        self.got: Typed | None = None

    def takes(self, route: Route) -> bool:
        mine = self.route
        return route[1:] == mine[1:] and mine[0] in (None, route[0])


def result(posts: dict[int, Entry], rank: int) -> Any:
    """What a collective gives to one member: arrays with their dtype, lists of them, or None."""
    entry = posts[rank]
    op, group, dtype = entry.op.removesuffix(_COALESCED), entry.group, entry.dtype
    n, me = len(group), group.index(rank)
    if op == "barrier":
        return None
    if op == "all_to_all_list":
        got = []
        for i, sender in enumerate(group):
            got.append((value(entry, sender, uneven(entry, i, me)), dtype))
        return got
    inputs = [value(entry, member) for member in group]
    total = _FOLD[entry.reduction](np.stack(inputs), axis=0)
    found = {
        "all_reduce": total,
        "reduce": total,
        "reduce_scatter": np.split(total, n)[me],
        "all_gather": np.concatenate(inputs),
        "gather": np.concatenate(inputs),
        "broadcast": inputs[entry.root],
        "scatter": np.split(inputs[entry.root], n)[me],
        "all_to_all": np.concatenate([np.split(x, n)[me] for x in inputs]),
    }[op]
    if op in ("reduce", "gather") and me != entry.root:
        return None
    if entry.op.endswith(_COALESCED):
        return [(found, dtype), (found, "int64")]
    return (found, dtype)
