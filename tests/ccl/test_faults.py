"""Random programs of several calls with one planted fault: only the call that has it fails."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.engines import ThreadedSession
from discolab.runtime import Failure, WorkerError, current_worker

PROGRAMS, SESSIONS = 200, 8
FAULTS = ("raise", "shape", "dtype", "operation", "skip", "return")
MESSAGES = ("ring", "line")
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "barrier",
    *MESSAGES,
)


class Planted(Exception):
    pass


@dataclass(frozen=True)
class Step:
    op: str
    group: tuple[int, ...]
    root: int
    reduction: str
    rows: int
    nap: float


@dataclass(frozen=True)
class Fault:
    kind: str
    step: int
    rank: int


def value(step: Step, number: int, rank: int) -> torch.Tensor:
    """Small integers, so that every reduction is exact."""
    size = step.rows * len(step.group)
    return (torch.arange(size) % 3 + rank + number).float()


def execute(steps: list[Step], fault: Fault | None) -> list[Any]:
    me = current_worker().rank
    results: list[Any] = []
    for number, step in enumerate(steps):
        if me not in step.group:
            continue
        x, op = value(step, number, me), step.op
        if step.nap and me == step.group[step.root]:
            time.sleep(step.nap)
        if fault is not None and (fault.step, fault.rank) == (number, me):
            if fault.kind == "raise":
                raise Planted
            if fault.kind == "return":
                return results
            if fault.kind == "skip":
                continue
            x = torch.cat([x, x]) if fault.kind == "shape" else x
            x = x.double() if fault.kind == "dtype" else x
            op = "scatter" if fault.kind == "operation" else op
        results.append(one(op, step, x, me))
    return results


def one(op: str, step: Step, x: torch.Tensor, me: int) -> Any:
    group = step.group
    index, n = group.index(me), len(group)
    match op:
        case "all_reduce" | "reduce_scatter":
            return getattr(ccl, op)(x, step.reduction, group=group)
        case "all_gather":
            return ccl.all_gather(x, group=group)
        case "broadcast" | "gather":
            return getattr(ccl, op)(x, step.root, group=group)
        case "reduce":
            return ccl.reduce(x, step.root, step.reduction, group=group)
        case "barrier":
            return ccl.barrier(group=group)
        case "scatter":
            return ccl.scatter(x, step.root, group=group, out=x[: len(x) // n].clone())
        case "ring":
            ccl.send(x, group[(index + 1) % n])
            return ccl.recv(torch.empty_like(x), group[index - 1])
        case _:
            before = ccl.recv(torch.empty_like(x), group[index - 1]) if index else None
            if index + 1 < n:
                ccl.send(x, group[index + 1])
            return before


def expected(steps: list[Step], rank: int) -> list[Any]:
    results: list[Any] = []
    for number, step in enumerate(steps):
        if rank not in step.group:
            continue
        index, n = step.group.index(rank), len(step.group)
        xs = [value(step, number, member) for member in step.group]
        stack = torch.stack(xs)
        total = {
            "sum": stack.sum(0),
            "prod": stack.prod(0),
            "min": stack.amin(0),
            "max": stack.amax(0),
        }[step.reduction]
        results.append(
            {
                "all_reduce": total,
                "all_gather": torch.cat(xs),
                "reduce_scatter": total.chunk(n)[index],
                "broadcast": xs[step.root],
                "reduce": total if index == step.root else None,
                "gather": torch.cat(xs) if index == step.root else None,
                "barrier": None,
                "ring": xs[index - 1],
                "line": xs[index - 1] if index else None,
            }[step.op]
        )
    return results


def draw_call(rng: random.Random, n: int, operations: tuple[str, ...]) -> list[Step]:
    groups = [tuple(range(n))] * 2
    groups += [tuple(sorted(rng.sample(range(n), rng.randint(2, n)))) for _ in range(3)]
    steps = []
    for _ in range(rng.randint(1, 6)):
        group = rng.choice(groups)
        nap = rng.choice([0, 0, 0, 0, 0.002, 0.03])
        root, reduction = rng.randrange(len(group)), rng.choice(["sum", "prod", "min", "max"])
        steps.append(Step(rng.choice(operations), group, root, reduction, rng.randint(1, 3), nap))
    return steps


def draw_fault(rng: random.Random, steps: list[Step]) -> Fault | None:
    """A fault that must be noticed in its own call.

    Without an error, a send that is left out means only that a later call's may come instead.
    """
    kind = rng.choice(FAULTS)
    number = rng.randrange(len(steps))
    op = steps[number].op
    if kind in ("skip", "return") and any(step.op in MESSAGES for step in steps):
        kind = "raise"
    if kind in ("shape", "dtype") and op == "barrier":
        kind = "operation"
    if kind in ("shape", "dtype", "operation") and op in MESSAGES:
        kind = "raise"
    return Fault(kind, number, rng.choice(steps[number].group))


def agree(got: list[Any], want: list[Any]) -> bool:
    return len(got) == len(want) and all(
        (g is None and w is None)
        or (isinstance(g, torch.Tensor) and isinstance(w, torch.Tensor) and torch.equal(g, w))
        for g, w in zip(got, want, strict=True)
    )


def run_program(sess: ThreadedSession, seed: int) -> list[str]:
    """What went wrong with the program of this seed."""
    rng = random.Random(seed)
    n = sess.num_workers
    operations = OPERATIONS if rng.random() < 0.7 else OPERATIONS[: -len(MESSAGES)]
    calls = [draw_call(rng, n, operations) for _ in range(rng.randint(3, 5))]
    faulty = rng.randrange(len(calls)) if rng.random() < 0.8 else -1
    fault = draw_fault(rng, calls[faulty]) if faulty >= 0 else None
    refs = [
        sess.call_packed(partial(execute, steps, fault if i == faulty else None))
        for i, steps in enumerate(calls)
    ]
    wrong = []
    for i, (ref, steps) in enumerate(zip(refs, calls, strict=True)):
        got = sess.peek(ref)
        bad = {rank: v.headline for rank, v in got.items() if isinstance(v, Failure)}
        if i == faulty:
            assert fault is not None
            # who leaves a call without an error has done nothing that fails on itself
            if not bad or (fault.rank not in bad and fault.kind not in ("skip", "return")):
                wrong.append(f"seed {seed}: call {i} should fail for {fault}, failed on {bad}")
        elif bad:
            wrong.append(f"seed {seed}: clean call {i} failed; {fault} in call {faulty}: {bad}")
        elif not all(agree(got[rank], expected(steps, rank)) for rank in range(n)):
            wrong.append(f"seed {seed}: call {i} gave another result; {fault} in call {faulty}")
    try:
        sess.sync_all()
    except WorkerError:
        if faulty < 0:
            wrong.append(f"seed {seed}: a clean program raised")
    return wrong


def test_only_the_faulty_call_fails(start: Any, how_many: Any) -> None:
    programs = how_many(PROGRAMS)

    def drive(part: int) -> list[str]:
        with start(3 + part % 2) as sess:
            seeds = range(part, programs, SESSIONS)
            return [text for seed in seeds for text in run_program(sess, seed)]

    began = time.monotonic()
    with ThreadPoolExecutor(SESSIONS) as pool:
        wrong = [text for texts in pool.map(drive, range(SESSIONS)) for text in texts]
    assert wrong == []
    assert time.monotonic() - began < 60


def leaves_early() -> None:
    """Worker 1 forgets a barrier, and is in the next call before worker 2 has come to it."""
    me = current_worker().rank
    if me == 1:
        time.sleep(0.03)
    if me == 2:
        time.sleep(0.045)
        ccl.barrier(group=[1, 2])


def forgets_to_send() -> None:
    if current_worker().rank == 2:
        ccl.recv(torch.zeros(1), 1)


def waits_for_one_who_failed() -> None:
    if current_worker().rank == 1:
        raise Planted
    if current_worker().rank == 2:
        time.sleep(0.045)
        ccl.recv(torch.zeros(1), 1, timeout=5)


def clean() -> float:
    return float(ccl.all_reduce(torch.ones(())))


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("func", "ranks", "words"),
    [
        (leaves_early, [2], "worker 1: finished the call without it"),
        (forgets_to_send, [2], "workers 0-1: has left this call, and in a later one is waiting"),
        (waits_for_one_who_failed, [1, 2], "worker 1 failed: Planted"),
    ],
)
def test_the_next_call_does_not_fail_with_this_one(
    start: Any, func: Any, ranks: list[int], words: str
) -> None:
    with start(3) as sess:
        for _ in range(8):
            faulty, fine = sess.call_packed(func), sess.call_packed(clean)
            assert fine.debug_get_from_all() == [3.0] * 3
            failures = {r: f for r, f in sess.peek(faulty).items() if isinstance(f, Failure)}
            assert sorted(failures) == ranks
            assert words in failures[2].message
            with pytest.raises(WorkerError):
                sess.sync_all()
