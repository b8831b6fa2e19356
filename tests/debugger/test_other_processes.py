"""Stepping workers that have processes of their own: the same, over lines."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from discolab import DiscoError, ProcessSession, SessionError, WorkerError
from discolab.debugger import Debugger, DebuggerError, debugger_of
from discolab.runtime.interpreter_lock import is_on
from discolab.runtime.session import Session

from .conftest import lines_of, load, states_of
from .test_hostile import swallower
from .test_random_programs import Run, go_on
from .test_stepping import LOOP, PARTED

FILE = "program.py"


@pytest.fixture(scope="module")
def shared_session() -> Iterator[Session]:
    """Four workers, three of them in other processes."""
    with ProcessSession(4, timeout=20) as session:
        session.init_ccl()
        yield session


def test_groups_blocked_workers_and_variables(dbg: Debugger):
    stop = dbg.run(load(PARTED), breaks=["7"], file=FILE)
    assert states_of(stop) == ["collective", "collective", "paused", "collective"]
    assert "worker 2 (paused)" in stop.workers[3].words
    shown = dbg.where()
    assert lines_of(shown) == {0: 9, 1: 9, 2: 7, 3: 9}, "where those stand who wait, too"
    of_running = {"rank", "x"} if is_on() else set()  # docs/pythons.md says why
    assert set(shown.workers[0].variables) == of_running
    assert set(shown.workers[2].variables) == {"rank", "x"}
    dbg.set("x", "x * 100")
    for _ in range(3):
        stop = dbg.next()
    assert stop.groups == ((0, 1, 2, 3),)
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == [816.0] * 4


def test_a_condition_an_evaluation_and_their_errors(dbg: Debugger):
    dbg.run(load(LOOP), breaks=["6 if rank == 3 and i == 1"], file=FILE)
    assert "3" in repr(dbg.eval("rank", ranks=[3]))
    failed = dbg.eval("1 / rank")
    assert list(failed.errors) == [0]
    stopped = dbg.eval("[0 for _ in iter(int, 1)]", ranks=[2], timeout=0.3)
    assert "stopped" in stopped.errors[2]
    assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == [3, 6, 9, 12]


def test_breakpoint_in_a_plain_call_and_its_end(dbg: Debugger, sess: Session):
    source = """\
        from discolab.debugger.tracer import stop_here
        def program():
            a = 1
            stop_here("breakpoint()")
            a = 2
            return a
    """
    ref = sess.call_packed(load(source))
    while not dbg.is_active:
        time.sleep(0.001)
    assert dbg.wait().groups == ((0, 1, 2, 3),)
    with pytest.raises(SessionError, match="paused"):
        sess.sync_all()
    dbg.next()
    assert dbg.continue_().finished
    assert ref.debug_get_from_all() == [2] * 4


def test_a_failure_is_kept_where_it_was_and_told_in_the_end(dbg: Debugger):
    stop = dbg.run(load(PARTED.replace("x + 1", "x + nosuch")), step=False, pm=True, file=FILE)
    assert "NameError" in stop.workers[2].note
    with pytest.raises(DebuggerError, match="failed"):
        dbg.step()
    assert dbg.continue_().finished
    with pytest.raises(WorkerError, match="nosuch"):
        dbg.program.result()


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_same_and_can_be_ended(sess: Session, dbg: Debugger, seed: int):
    import random

    run, choose = Run(seed), random.Random(seed)
    free = sess.call_packed(run).debug_get_from_all()
    stop = dbg.run(run, file=f"random_{seed}.py")
    for _ in range(30):
        if stop.finished:
            break
        stop = go_on(dbg, choose, stop)
    if seed % 3 == 0 and not stop.finished:
        assert dbg.abort() == []
        assert sess.call_packed(run).debug_get_from_all() == free
        return
    if not stop.finished:
        assert dbg.continue_().finished
    assert dbg.program.result().debug_get_from_all() == free


def test_a_worker_that_dies_while_it_is_paused_is_named():
    with ProcessSession(2, timeout=20) as session:
        dbg = debugger_of(session)
        dbg.run(load(LOOP), file=FILE)
        os.kill(session.processes()[1], signal.SIGKILL)
        while dbg.lockstep.state[1] == "paused":
            time.sleep(0.01)
        assert "died" in repr(dbg.where())
        with pytest.raises(DiscoError, match=r"worker 1 .*SIGKILL"):
            dbg.next()
        dbg.abort()
        session.shutdown(cancel=True)


def test_a_program_that_swallows_what_ends_it_is_ended(dbg: Debugger):
    dbg.run(swallower(), step=False, file=FILE)
    assert dbg.abort() == []
    assert states_of(dbg.stop) == ["aborted"] * 4
    stop = dbg.run(load(LOOP), file=FILE)
    assert stop.groups == ((0, 1, 2, 3),)
