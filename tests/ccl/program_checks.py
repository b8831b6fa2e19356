"""What is checked of random programs of collectives: results, whose fault it is, what is left.

For the tests of these programs and for the soak.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from discolab import Session, ccl
from discolab.ccl.board.ledger import ledger_of
from discolab.runtime import Failure, WaitTimeoutError, WorkerError, current_worker

from .program_oracle import Outcome, Program, foretell
from .random_programs import Faulty, execute

WATCHDOG = 10.0  # seconds; what takes longer hangs
LINE = re.compile(r"^  workers? ([\d, -]+): (.*)$", re.MULTILINE)
MISSING = re.compile(r"missing: workers? ([\d, -]+)")


def fine() -> float:
    return float(ccl.all_reduce(torch.tensor(current_worker().rank + 1.0), group="world"))


def state() -> tuple[ccl.BackendStatistics, bool]:
    ledger_of(current_worker()).validate()
    return ccl.statistics(), True


def same(got: Any, want: Any) -> bool:
    if want is None or got is None:
        return got is None and want is None
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    numbers, dtype = want
    right = str(got.dtype) == f"torch.{dtype}" and tuple(got.shape) == numbers.shape
    return right and bool(np.array_equal(got.double().numpy(), numbers))


def run(
    sess: Session,
    program: Program,
    queued: bool,
    watchdog: float = WATCHDOG,
    beside: Program | None = None,
) -> dict[int, Any]:
    """What each worker gives; the session must then be as good as new.

    With `queued` the next call is on its way before this one is over, and so is `beside`, a program
    that is right, both before and after it. What takes longer than `watchdog` seconds hangs.
    """
    neighbours = [sess.call_packed(partial(execute, beside))] if beside else []
    ref = sess.call_packed(partial(execute, program))
    neighbours += [sess.call_packed(partial(execute, beside))] if beside else []
    after = sess.call_packed(fine) if queued else None
    try:
        got = sess.peek(ref, timeout=watchdog)
    except WaitTimeoutError:
        sess.interrupt()
        raise
    failed = sorted(rank for rank, found in got.items() if isinstance(found, Failure))
    if failed:
        with pytest.raises(WorkerError) as caught:
            ref.debug_get_from_all()
        assert caught.value.ranks == failed
        first = caught.value.failures[0]
        assert not first.victim, f"only victims: {caught.value}"
        got["first"] = first.rank
    after = sess.call_packed(fine) if after is None else after
    n = sess.num_workers
    assert after.debug_get_from_all() == [n * (n + 1) / 2] * n
    for neighbour in neighbours:
        assert beside is not None
        check_results(sess.peek(neighbour), foretell(beside))
    sess.sync_all()
    return got


def check_results(got: dict[int, Any], outcome: Outcome) -> None:
    for rank, want in outcome.results.items():
        if rank not in outcome.may_fail:
            found = got[rank]
            assert not isinstance(found, Failure), f"worker {rank}: {found.headline}"
            assert len(found) == len(want)
            for number, pair in enumerate(zip(found, want, strict=True)):
                assert same(*pair), f"worker {rank}, result {number}: {pair}"


def check_rest(sess: Session, outcome: Outcome) -> None:
    """Nothing is left but what was sent and, rightly, not received."""
    left, _ = sess.call_packed(state).debug_get_from_remote(0)
    assert left.collectives == 0, left.waiting
    assert left.waiting == ()
    if not outcome.may_fail:
        assert left.messages == outcome.messages, (left.messages, outcome.messages)
    if left.messages or outcome.receptions:
        sess.interrupt()  # or the next program would get them
        left, _ = sess.call_packed(state).debug_get_from_remote(0)
        assert left.messages == 0


def mentioned(ranks: str) -> set[int]:
    """The workers of a text such as ``0-2, 5``."""
    spans = [part.partition("-") for part in ranks.split(", ")]
    return {rank for low, _, high in spans for rank in range(int(low), int(high or low) + 1)}


def lines_of(text: str) -> dict[int, str]:
    """What a message says of each worker."""
    return {rank: what for ranks, what in LINE.findall(text) for rank in mentioned(ranks)}


def names(failure: Failure, culprit: int) -> bool:
    """Whether a message tells whose fault it is: that worker did what nobody else did.

    Of a deadlock nobody can know who should have acted otherwise: it must be waited for there.
    """
    text = failure.message
    if "has room for" in text:
        return f"worker {culprit}" in text.splitlines()[0]
    told = lines_of(text)
    if told and culprit in told:
        if all(told[rank] != told[culprit] for rank in told if rank != culprit):
            return True
        if "from any worker" in text:
            return True
        if text.startswith("deadlock"):
            missing = [mentioned(ranks) for ranks in MISSING.findall(text)]
            return any(culprit in ranks for ranks in missing) or f"from worker {culprit} " in text
        return False
    return failure.rank == culprit or bool(re.search(rf"worker {culprit}\b", text))


def check_culprit(got: dict[int, Any], case: Faulty) -> None:
    """The causes that are told name the culprit; whoever failed with it says so."""
    failures = [found for found in got.values() if isinstance(found, Failure)]
    causes = [failure for failure in failures if not failure.victim]
    if case.fault in ("exception", "bad argument"):
        kind = "Planted" if case.fault == "exception" else "ArgumentError"
        assert [(f.rank, f.type_name) for f in causes] == [(case.culprit, kind)]
        assert got["first"] == case.culprit
        others = [f.message for f in failures if f.victim]
        assert not others or any(f"worker {case.culprit}" in text for text in others)
        return
    for failure in causes:
        assert failure.type_name == "CollectiveError", failure.headline
        assert names(failure, case.culprit), failure.headline
    if case.outcome.disagreements():
        # on a busy machine a circle of waits may be complete before those that disagree have come
        telling = ("disagree", "has room for", "deadlock")
        assert any(text in failure.message for failure in causes for text in telling)


def listing(program: Program) -> str:
    """A program in text, for the report of a failure."""
    return "\n".join(f"worker {r}:\n  " + "\n  ".join(map(str, e)) for r, e in enumerate(program))
