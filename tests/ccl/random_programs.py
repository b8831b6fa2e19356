"""Random programs of collectives and messages, as data: how they are made, spoilt and executed.

A program has a list of `Entry` for each worker. `clean_program` draws one that is right,
`faulty_program` plants one fault in one worker's list, and `execute` is the worker function that
carries out the calling worker's list. What must come out is foretold by program_oracle.py, which
knows nothing of the library. All follows from a seed, so a failure is rerun by its number.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from discolab import ccl
from discolab.runtime import current_worker

from .program_oracle import Entry, Outcome, Program, foretell, uneven, value

DTYPES = ("float32", "float64", "int32", "int64", "bfloat16")
REDUCTIONS = ("sum", "prod", "min", "max")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "all_reduce_coalesced")
REDUCING += ("reduce_scatter_coalesced",)
ROOTED = ("broadcast", "scatter", "gather", "reduce")
COLLECTIVES = (
    *REDUCING, "all_gather", "gather", "broadcast", "scatter", "all_to_all", "all_to_all_list",
    "barrier", "all_gather_coalesced",
)  # fmt: skip
FAULTS = (
    "order", "shape", "dtype", "reduction", "root", "operation", "missing call", "exception",
    "bad argument", "early return", "left-out send", "wrong peer",
)  # fmt: skip
SLOW = 0.13  # seconds; more than two looks of those who wait


class Planted(Exception):
    """The exception of a program that is to fail."""


@dataclass(frozen=True)
class Faulty:
    """A program with one fault of one worker, and what must come of it."""

    program: Program
    fault: str
    culprit: int
    outcome: Outcome


def as_tensor(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(getattr(torch, dtype))


# -- drawing ----------------------------------------------------------------------------------


class Draft:
    """A program that grows step by step, the same steps on all workers."""

    def __init__(self, rng: random.Random, workers: int, groups: int) -> None:
        self.rng, self.workers, self.size = rng, workers, workers // groups
        self.lists: list[list[Entry]] = [[] for _ in range(workers)]
        self.pending: list[list[Entry]] = [[] for _ in range(workers)]
        self.slots = 0

    def step(self, key: int) -> None:
        """Add one step, and some of the waits that are due."""
        many = self.workers > 1
        kinds = ["collective"] * 6 + ["crossed", "pair", "ring", "many", "any"] * many
        getattr(self, "add_" + self.rng.choice(kinds))(key)
        for rank, waits in enumerate(self.pending):
            self.rng.shuffle(waits)
            while waits and self.rng.random() < 0.4:
                self.lists[rank].append(waits.pop())
            if self.rng.random() < 0.04:
                self.lists[rank].append(Entry("nap", nap=self.rng.choice([0.001, 0.01])))

    def finish(self) -> Program:
        """The program; a few collectives are never waited for."""
        for rank, waits in enumerate(self.pending):
            kept = [w for w in waits if w.op == "recv" or self.rng.random() < 0.9]
            self.rng.shuffle(kept)
            self.lists[rank] += kept
        return tuple(tuple(entries) for entries in self.lists)

    def some(self, least: int = 1) -> tuple[int, ...]:
        """A random group of at least so many workers."""
        count = self.rng.randint(min(least, self.workers), self.workers)
        return tuple(sorted(self.rng.sample(range(self.workers), count)))

    def add_collective(self, key: int) -> None:
        rng = self.rng
        via, tag = rng.choice(["own", "own", "world", "list", "list", "tagged"]), ""
        groups = [self.some(2)]
        if via == "own":
            starts = range(0, self.workers, self.size)
            groups = [tuple(range(start, start + self.size)) for start in starts]
        elif via == "world":
            groups = [tuple(range(self.workers))]
        elif via == "tagged":
            tag = rng.choice("ab")
        self._meet(key, rng.choice(COLLECTIVES), groups, via, tag, rng.random() < 0.35)

    def add_crossed(self, key: int) -> None:
        """Two collectives of the same workers and different tags, in any order on each."""
        group, before = self.some(2), [len(entries) for entries in self.lists]
        for number, tag in enumerate("ab"):
            op = self.rng.choice(COLLECTIVES)
            self._meet(key + 100 * number, op, [group], "tagged", tag, True)
        for entries, start in zip(self.lists, before, strict=True):
            tail = entries[start:]
            self.rng.shuffle(tail)
            entries[start:] = tail

    def _meet(
        self, key: int, op: str, groups: list[tuple[int, ...]], via: str, tag: str, later: bool
    ) -> None:
        rng = self.rng
        entry = Entry(
            "collective", key, op, via=via, tag=tag, rows=rng.randint(1, 3),
            dtype=rng.choice(DTYPES), reduction=rng.choice(REDUCTIONS),
        )  # fmt: skip
        for group in groups:
            root = rng.randrange(len(group))
            for rank in group:
                slot = self._slot() if later else -1
                self.lists[rank].append(replace(entry, group=group, root=root, slot=slot))
                if later:
                    self.pending[rank].append(Entry("wait", key, op, slot=slot))

    def _slot(self) -> int:
        self.slots += 1
        return self.slots

    def _message(self, key: int, ranks: tuple[int, int], **fields: Any) -> None:
        sender, receiver = ranks
        entry = Entry("send", key, group=(sender,), peer=receiver, **fields)
        self.lists[sender].append(entry)
        slot = self._slot() if self.rng.random() < 0.5 else -1
        self.lists[receiver].append(replace(entry, do="recv", peer=sender, slot=slot))
        if slot >= 0:
            self.pending[receiver].append(Entry("wait", key, "recv", slot=slot))

    def add_pair(self, key: int) -> None:
        sender, receiver = self.rng.sample(range(self.workers), 2)
        fields = {"tag": self.rng.choice(["", "1"]), "dtype": self.rng.choice(DTYPES)}
        self._message(key, (sender, receiver), rows=self.rng.randint(1, 3), **fields)

    def add_many(self, key: int) -> None:
        """Several messages between two workers, some received later and out of order."""
        ranks = self.rng.sample(range(self.workers), 2)
        for number in range(self.rng.randint(2, 4)):
            self._message(key + number, (ranks[0], ranks[1]), rows=2)

    def add_ring(self, key: int) -> None:
        group = self.some(2)
        for place, rank in enumerate(group):
            peer = group[(place + 1) % len(group)]
            self.lists[rank].append(Entry("send", key, group=(rank,), peer=peer))
        for place, rank in enumerate(group):
            self.lists[rank].append(Entry("recv", key, group=(rank,), peer=group[place - 1]))

    def add_any(self, key: int) -> None:
        """One worker receives from all others, in whatever order they come."""
        group = tuple(range(self.workers))
        root = self.rng.randrange(self.workers)
        tag = str(10 + key)
        for rank in group:
            if rank != root:
                self.lists[rank].append(Entry("send", key, group=(root,), peer=root, tag=tag))
                self.lists[root].append(Entry("recv", key, group=(root,), tag=tag))


def clean_program(seed: int, workers: int, groups: int, slow: bool = False) -> Program:
    """A program that must go well; with `slow` one worker is late once."""
    rng = random.Random(f"clean {seed} {workers} {groups}")
    program = _draw(rng, workers, groups)
    if slow:
        rank = rng.randrange(workers)
        entries = list(program[rank])
        entries.insert(rng.randint(0, len(entries)), Entry("nap", nap=SLOW))
        program = _with(program, rank, entries)
    assert foretell(program).failed == {}, "the generator has made a wrong program"
    return program


def faulty_program(seed: int, workers: int, groups: int, fault: str) -> Faulty:
    """A program with one fault by which somebody must fail."""
    rng = random.Random(f"{fault} {seed} {workers} {groups}")
    while True:
        program = _draw(rng, workers, groups)
        culprit = rng.randrange(workers)
        entries = _spoil(rng, list(program[culprit]), fault, culprit, workers)
        if entries is None:
            continue
        spoilt = _with(program, culprit, entries)
        outcome = foretell(spoilt)
        if outcome.failed:
            return Faulty(spoilt, fault, culprit, outcome)


def _draw(rng: random.Random, workers: int, groups: int) -> Program:
    draft = Draft(rng, workers, groups)
    for key in range(rng.randint(3, 12)):
        draft.step(key)
    return draft.finish()


def _with(program: Program, rank: int, entries: list[Entry]) -> Program:
    return (*program[:rank], tuple(entries), *program[rank + 1 :])


# -- faults -----------------------------------------------------------------------------------


def _spoil(
    rng: random.Random, entries: list[Entry], fault: str, rank: int, workers: int
) -> list[Entry] | None:
    """The entries with a fault, None where it can't be planted."""
    places = [i for i, entry in enumerate(entries) if _can_have(fault, entry, workers)]
    if not places:
        return None
    place = rng.choice(places)
    entry = entries[place]
    match fault:
        case "order":
            return _swapped(rng, entries, place)
        case "exception":
            return [*entries[:place], Entry("raise"), *entries[place:]]
        case "early return":
            return entries[:place]
        case "missing call" | "left-out send":
            rest = entries[:place] + entries[place + 1 :]
            return [e for e in rest if e.do != "wait" or e.slot != entry.slot]
    change: dict[str, Callable[[], dict[str, Any]]] = {
        "shape": lambda: {"rows": entry.rows + 1},
        "dtype": lambda: {"dtype": rng.choice([d for d in DTYPES if d != entry.dtype])},
        "reduction": lambda: {
            "reduction": rng.choice([r for r in REDUCTIONS if r != entry.reduction])
        },
        "root": lambda: {"root": (entry.root + 1) % len(entry.group)},
        "operation": lambda: {"op": rng.choice([op for op in COLLECTIVES if op != entry.op])},
        "bad argument": lambda: {"reduction": "mean"},
        "wrong peer": lambda: {
            "peer": rng.choice([r for r in range(workers) if r not in (rank, entry.peer)])
        },
    }
    return [*entries[:place], replace(entry, **change[fault]()), *entries[place + 1 :]]


def _can_have(fault: str, entry: Entry, workers: int) -> bool:
    meets = entry.do == "collective"
    match fault:
        case "shape" | "dtype":
            return entry.do == "send" or (meets and entry.op != "barrier")
        case "reduction" | "bad argument":
            return meets and entry.op in REDUCING
        case "root":
            return meets and entry.op in ROOTED and len(entry.group) > 1
        case "operation" | "missing call":
            return meets
        case "left-out send":
            return entry.do == "send"
        case "wrong peer":
            return entry.do == "recv" and entry.peer is not None and workers > 2
        case _:
            return True


def _swapped(rng: random.Random, entries: list[Entry], place: int) -> list[Entry] | None:
    """Two collectives or messages in the other order; a wait never comes before its start."""
    others = [i for i, e in enumerate(entries) if e.do in ("collective", "send", "recv")]
    later = [i for i in others if i > place]
    if place not in others or not later:
        return None
    other = rng.choice(later[:3])
    swapped = list(entries)
    swapped[place], swapped[other] = entries[other], entries[place]
    started: set[int] = set()
    for entry in swapped:
        if entry.do == "wait" and entry.slot not in started:
            return None
        started.add(entry.slot)
    return swapped


# -- execution --------------------------------------------------------------------------------


def execute(program: Program) -> list[Any]:
    """Carry out the calling worker's entries; the results in the order in which they come."""
    me = current_worker().rank
    works: dict[int, Any] = {}
    results: list[Any] = []
    for entry in program[me]:
        if entry.do == "nap":
            time.sleep(entry.nap)
        elif entry.do == "raise":
            raise Planted("as the program has it")
        elif entry.do == "send":
            tensor = as_tensor(value(entry, entry.group[0], entry.rows), entry.dtype)
            assert entry.peer is not None
            ccl.send(tensor, entry.peer, tag=int(entry.tag or 0))
            tensor.zero_()
        elif entry.do == "wait":
            results.append(works.pop(entry.slot).wait())
        else:
            start = _receive if entry.do == "recv" else _meet
            result = start(entry, me)
            if entry.slot >= 0:
                works[entry.slot] = result
            else:
                results.append(result)
    return results


def _receive(entry: Entry, me: int) -> Any:
    out = as_tensor(value(entry, me, entry.rows) * 0, entry.dtype)
    call = ccl.irecv if entry.slot >= 0 else ccl.recv
    return call(out, entry.peer, tag=int(entry.tag or 0))


def _meet(entry: Entry, me: int) -> Any:
    op, n, place = entry.op, len(entry.group), entry.group.index(me)
    how: dict[str, Any] = {"async_op": entry.slot >= 0, "group": list(entry.group)}
    if entry.via in ("own", "world"):
        how["group"] = None if entry.via == "own" else "world"
    elif entry.via == "tagged":
        how["group"] = ccl.Group(entry.group, entry.tag)
    x = as_tensor(value(entry, me), entry.dtype)
    reduction = [entry.reduction] if op in REDUCING else []
    if op == "barrier":
        return ccl.barrier(**how)
    if op == "all_to_all_list":
        parts = [value(entry, me, uneven(entry, place, j)) for j in range(n)]
        outs = [value(entry, me, uneven(entry, i, place)) * 0 for i in range(n)]
        how["out"] = [as_tensor(out, entry.dtype) for out in outs]
        return ccl.all_to_all([as_tensor(part, entry.dtype) for part in parts], **how)
    if op.endswith("coalesced"):
        return getattr(ccl, op)([x, as_tensor(value(entry, me), "int64")], *reduction, **how)
    if op == "scatter":
        source = x if place == entry.root else None
        return ccl.scatter(source, entry.root, out=x[: entry.rows].clone(), **how)
    root = [entry.root] if op in ROOTED else []
    return getattr(ccl, op)(x, *root, *reduction, **how)
