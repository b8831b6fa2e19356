"""The life of a session: with, shutdown, being dropped, and several at once."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import discolab
from discolab import DRef, SessionClosedError, ThreadedSession, WorkerError, current_worker


def spin() -> None:
    while True:
        pass


def assert_ended(threads: list[threading.Thread], within: float = 10) -> None:
    deadline = time.monotonic() + within
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread.name for thread in threads if thread.is_alive()]


def test_with_waits_for_the_work_and_ends_the_workers() -> None:
    done: list[int] = []
    with ThreadedSession(2) as session:
        session.call_packed(time.sleep, 0.05)
        session.call_packed(done.append, 1)
    assert done == [1, 1]
    assert session.closed
    assert_ended(session._threads, 0.1)


def test_with_raises_what_failed_and_ends_the_workers() -> None:
    session = ThreadedSession(2)
    with pytest.raises(WorkerError, match="ZeroDivisionError"), session:
        session.call_packed(lambda: 1 / 0)
    assert session.closed
    assert_ended(session._threads, 0.1)


def test_an_exception_in_a_with_block_does_not_wait_for_the_work() -> None:
    start = time.monotonic()
    session = ThreadedSession(2)
    session.call_packed(spin)
    with pytest.raises(LookupError), session:
        raise LookupError
    assert time.monotonic() - start < 3
    assert_ended(session._threads, 0.1)


def test_a_session_shut_down_inside_its_with_block_is_left_quietly() -> None:
    with ThreadedSession(2) as session:
        session.shutdown()
    with pytest.raises(SessionClosedError), session:
        pass


def test_shutdown_finishes_queued_work_first() -> None:
    session = ThreadedSession(2)
    done: list[int] = []
    for number in range(100):
        session.call_packed(done.append, number)
    session.shutdown()
    assert sorted(done) == sorted([*range(100)] * 2)


def test_shutdown_interrupts_what_takes_too_long() -> None:
    session = ThreadedSession(2)
    ran: list[int] = []
    session.call_packed(spin)
    session.call_packed(ran.append, 1)
    session.shutdown(timeout=0.1)
    assert_ended(session._threads)
    assert ran == []


def test_shutdown_from_two_threads_at_once() -> None:
    session = ThreadedSession(2)
    threads = [threading.Thread(target=session.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert_ended(threads)
    assert_ended(session._threads)


def test_a_dropped_session_ends_its_queued_work_and_its_threads() -> None:
    session = ThreadedSession(2, devices="cpu")
    done: list[int] = []
    session.empty(3, "float32")  # uses a handle that the session keeps
    for number in range(50):
        session.call_packed(time.sleep, 0.001)
        session.call_packed(done.append, number)
    threads, gone = session._threads, weakref.ref(session)
    gc.disable()  # by reference count, without the help of the collector
    try:
        del session
        assert gone() is None
        assert_ended(threads)
    finally:
        gc.enable()
    assert sorted(done) == sorted([*range(50)] * 2)


def test_a_dref_keeps_its_session() -> None:
    ref = ThreadedSession(2, timeout=20).call_packed(torch.ones, 2)
    gc.collect()
    assert ref.debug_get_from_remote(1).tolist() == [1, 1]
    threads = ref.session._threads  # type: ignore[attr-defined]
    del ref
    assert_ended(threads)


def test_a_session_collected_in_a_cycle_on_a_worker_of_another_ends(
    pair: ThreadedSession,
) -> None:
    session: Any = ThreadedSession(2)
    ring = [session, session.call_packed(torch.ones, 2)]
    ring.append(ring)
    threads = session._threads
    del session, ring
    pair.call_packed(gc.collect).debug_get_from_all()
    assert_ended(threads)


def test_several_sessions_live_side_by_side() -> None:
    with (
        ThreadedSession(1, timeout=20) as one,
        ThreadedSession(2, timeout=20) as two,
        ThreadedSession(4, 2, timeout=20) as four,
    ):
        for session in (one, two, four):
            session["x"] = session.num_workers
        one.call_packed(lambda: time.sleep(0.1))
        for session in (two, four, one):
            ranks: list[DRef] = [session.call_packed(lambda: current_worker().rank)]
            assert ranks[0].debug_get_from_all() == list(range(session.num_workers))
            assert session.pull("x") == [session.num_workers] * session.num_workers


def test_a_worker_may_drive_another_session(pair: ThreadedSession) -> None:
    def nested() -> list[int]:
        mine = current_worker().rank
        with ThreadedSession(2, timeout=20) as inner:
            got = inner.call_packed(lambda a: a * 10 + current_worker().rank, mine)
            values: list[int] = got.debug_get_from_all()
        assert current_worker().rank == mine
        return values

    assert pair.call_packed(nested).debug_get_from_all() == [[0, 1], [10, 11]]


def test_many_sessions_one_after_the_other() -> None:
    before = threading.active_count()
    for number in range(40):
        with ThreadedSession(2, timeout=20) as session:
            assert session.call_packed(int, number).debug_get_from_all() == [number] * 2
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_threads_that_cannot_be_started_leave_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(threading.enumerate())
    start = threading.Thread.start
    names: list[str] = []

    def refuse_the_third(thread: threading.Thread) -> None:
        names.append(thread.name)
        if len(names) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ThreadedSession(4)
    monkeypatch.undo()
    gc.collect()
    assert_ended([t for t in threading.enumerate() if t not in before])


@pytest.mark.conformance
def test_facts_of_a_session(sess: ThreadedSession, engine: str) -> None:
    assert (sess.num_workers, sess.num_groups, sess.engine) == (4, 2, engine)
    assert sess.devices == (torch.device("cpu"),) * 4
    assert repr(sess) == f"<{type(sess).__name__}: 4 workers, 2 groups on cpu>"
    assert not sess.closed
    assert isinstance(discolab.make_session(1), ThreadedSession)


def test_devices_may_be_given_one_for_each_worker() -> None:
    with ThreadedSession(2, devices=["cpu", torch.device("cpu")]) as session:
        devices = session.call_packed(lambda: current_worker().device).debug_get_from_all()
    assert devices == [torch.device("cpu")] * 2
