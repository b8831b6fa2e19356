"""Random programs: 500 that are right and go well, 500 with one fault of one worker, on threads;
some of them on processes, with everything through the coordinator and with nothing. Without
``--all`` it is 20 for each layout.

Of a faulty one, all whom it leaves stuck must fail, nobody else, and the messages must name
whose fault it is; afterwards the session works. A failing seed is rerun by its number:
``pytest tests/ccl/test_random_programs.py -k 'faulty and 3-1'`` and the name in the message.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from discolab import Session, ccl, make_session
from discolab.ccl.backends import exchanges, inline, jobs
from discolab.ccl.board.ledger import ledger_of
from discolab.ccl.rendezvous import remote_p2p_client
from discolab.engines import ThreadedSession
from discolab.runtime import Failure, WaitTimeoutError, WorkerError, current_worker

from .program_oracle import Entry, Outcome, Program, foretell
from .random_programs import FAULTS, Faulty, clean_program, execute, faulty_program

PROGRAMS = 500  # of each kind
LAYOUTS = [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)]
EACH = PROGRAMS // len(LAYOUTS)
PROCESSES = [(3, 1), (4, 2)]
EACH_ON_PROCESSES = int(os.environ.get("DISCOLAB_RANDOM_PROGRAMS", "15"))
WATCHDOG = 10.0  # seconds; what takes longer hangs
SMALL_BLOCK = 48  # bytes: some layouts do even these small tensors block by block
LINE = re.compile(r"^  workers? ([\d, -]+): (.*)$", re.MULTILINE)
MISSING = re.compile(r"missing: workers? ([\d, -]+)")


PARAMS = [("threads", *layout) for layout in LAYOUTS]
PARAMS += [("processes", *layout) for layout in PROCESSES]


@pytest.fixture(scope="module", params=PARAMS, ids=lambda param: "-".join(map(str, param)))
def lab(request: pytest.FixtureRequest) -> Iterator[Session]:
    """One session for all programs of a layout; half of them in blocks, and over process groups."""
    engine, workers, groups = request.param
    with pytest.MonkeyPatch.context() as patch:
        if workers % 2 == 0:
            patch.setattr(jobs, "BLOCK", SMALL_BLOCK)
        sess = make_session(workers, engine, num_groups=groups, devices="cpu", timeout=2 * WATCHDOG)
        if engine != "threads":
            sess.import_python_module(__name__)
        if engine != "threads" and workers % 2 == 0:
            for module, name, value in NOTHING_IS_SMALL:
                patch.setattr(module, name, value)
                sess.call_packed(set_limit, module.__name__, name, value).debug_get_from_all()
        yield sess
        sess.shutdown(cancel=True)


NOTHING_IS_SMALL = [
    (inline, "LARGEST", 0), (exchanges, "SMALL", 24), (exchanges, "PART", SMALL_BLOCK),
    (exchanges, "SPREAD", 24), (remote_p2p_client, "LARGEST", 0),
]  # fmt: skip


def set_limit(module: str, name: str, value: int) -> None:
    setattr(sys.modules[module], name, value)


def each(sess: Session) -> int:
    """How many programs to run there."""
    return EACH if isinstance(sess, ThreadedSession) else EACH_ON_PROCESSES


# -- what is checked --------------------------------------------------------------------------


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


def run(sess: Session, program: Program, queued: bool) -> dict[int, Any]:
    """What each worker gives; the session must then be as good as new.

    With `queued` the next call is on its way before this one is over.
    """
    ref = sess.call_packed(partial(execute, program))
    after = sess.call_packed(fine) if queued else None
    try:
        got = sess.peek(ref, timeout=WATCHDOG)
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


# -- the programs -----------------------------------------------------------------------------


def listing(program: Program) -> str:
    """A program in text, for the report of a failure."""
    return "\n".join(f"worker {r}:\n  " + "\n  ".join(map(str, e)) for r, e in enumerate(program))


def test_faulty_programs(lab: Session, how_many: Callable[..., int]) -> None:
    for seed in range(how_many(each(lab))):
        fault = FAULTS[seed % len(FAULTS)]
        if fault == "wrong peer" and lab.num_workers == 2:
            fault = "exception"
        case = faulty_program(seed, lab.num_workers, lab.num_groups, fault)
        try:
            got = run(lab, case.program, queued=seed % 3 == 0)
            failed = {rank for rank, found in got.items() if isinstance(found, Failure)}
            assert set(case.outcome.failed) <= failed
            assert failed <= set(case.outcome.failed) | case.outcome.may_fail
            check_results(got, case.outcome)
            check_culprit(got, case)
            check_rest(lab, case.outcome)
        except (AssertionError, WaitTimeoutError, WorkerError) as exc:
            exc.add_note(f"seed {seed}: {fault} of worker {case.culprit} in")
            exc.add_note(listing(case.program))
            raise


def test_clean_programs(lab: Session, how_many: Callable[..., int]) -> None:
    for seed in range(how_many(each(lab))):
        program = clean_program(seed, lab.num_workers, lab.num_groups, slow=seed % 10 == 0)
        outcome = foretell(program)
        try:
            got = run(lab, program, queued=seed % 3 == 0)
            check_results(got, outcome)
            check_rest(lab, outcome)
        except (AssertionError, WaitTimeoutError, WorkerError) as exc:
            exc.add_note(f"seed {seed} in")
            exc.add_note(listing(program))
            raise


def test_the_oracle_knows_a_deadlock() -> None:
    """By hand: 0 and 1 wait for each other, 2 has what it needs."""
    meet = Entry("collective", op="barrier", group=(0, 1))
    message = Entry("recv", group=(1,), peer=1)
    sent = Entry("send", group=(1,), peer=2)
    program = ((message,), (sent, meet), (Entry("recv", group=(1,), peer=1),))
    outcome = foretell(program)
    assert outcome.failed == {0: message, 1: meet}
    assert outcome.may_fail == {2}  # for worker 1 fails after it has sent
