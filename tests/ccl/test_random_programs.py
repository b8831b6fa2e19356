"""Random programs: 500 that are right and go well, 500 with one fault of one worker, on threads;
some of them on processes, with everything through the coordinator and with nothing. Without
``--all`` it is 20 for each layout.

Of a faulty one, all whom it leaves stuck must fail, nobody else, and the messages must name
whose fault it is; afterwards the session works. A failing seed is rerun by its number:
``pytest tests/ccl/test_random_programs.py -k 'faulty and 3-1'`` and the name in the message.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from discolab import Session, make_session
from discolab.ccl.backends import exchanges, jobs, remote_gloo
from discolab.ccl.rendezvous import remote_p2p_client
from discolab.engines import ThreadedSession
from discolab.runtime import Failure, WaitTimeoutError, WorkerError

from .program_checks import WATCHDOG, check_culprit, check_rest, check_results, listing, run
from .program_oracle import Entry, Program, foretell
from .random_programs import FAULTS, clean_program, faulty_program

PROGRAMS = 500  # of each kind
LAYOUTS = [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2)]
EACH = PROGRAMS // len(LAYOUTS)
PROCESSES = [(3, 1), (4, 2)]
EACH_ON_PROCESSES = int(os.environ.get("DISCOLAB_RANDOM_PROGRAMS", "15"))
SMALL_BLOCK = 48  # bytes: some layouts do even these small tensors block by block


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
    (remote_gloo, "LARGEST", 0), (exchanges, "SMALL", 24), (exchanges, "PART", SMALL_BLOCK),
    (exchanges, "SPREAD", 24), (remote_p2p_client, "LARGEST", 0),
]  # fmt: skip


def set_limit(module: str, name: str, value: int) -> None:
    setattr(sys.modules[module], name, value)


def each(sess: Session) -> int:
    """How many programs to run there."""
    return EACH if isinstance(sess, ThreadedSession) else EACH_ON_PROCESSES


# -- the programs -----------------------------------------------------------------------------


def collectives(seed: int, sess: Session) -> Program:
    """A program that is right and sends nothing: what the one beside it leaves is not for it."""
    drawn = (clean_program(seed + 1000 * n, sess.num_workers, sess.num_groups) for n in count())
    return next(p for p in drawn if not any(e.do in ("send", "recv") for own in p for e in own))


def test_faulty_programs(lab: Session, how_many: Callable[..., int]) -> None:
    for seed in range(how_many(each(lab))):
        fault = FAULTS[seed % len(FAULTS)]
        if fault == "wrong peer" and lab.num_workers == 2:
            fault = "exception"
        case = faulty_program(seed, lab.num_workers, lab.num_groups, fault)
        try:
            beside = collectives(seed, lab) if seed % 3 == 0 else None
            got = run(lab, case.program, beside is not None, beside=beside)
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
