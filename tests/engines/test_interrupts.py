"""Interrupts: what runs ends, what is queued is dropped, and nothing else is touched."""

import _thread
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from discolab import (
    DRef,
    ThreadedSession,
    WorkerError,
    WorkerInterrupted,
    current_worker,
    make_session,
)
from discolab.runtime.controller import _MOST_QUEUED
from discolab.runtime.interrupts import waiting_threads


def spin() -> None:
    while True:
        pass


def eventually(session: ThreadedSession, state: str) -> None:
    """Wait until all workers are in that state."""
    deadline = time.monotonic() + 20
    while {s.state for s in session.status()} != {state}:
        assert time.monotonic() < deadline, session.status()
        time.sleep(0.002)


def assert_works(session: ThreadedSession) -> None:
    ranks = session.call_packed(lambda: current_worker().rank).debug_get_from_all()
    assert ranks == list(range(session.num_workers))
    session.sync_all()


@pytest.mark.conformance
def test_an_endless_loop_ends(sess: ThreadedSession) -> None:
    ref = sess.call_packed(spin)
    eventually(sess, "running")
    start = time.monotonic()
    assert sess.interrupt() == []
    assert time.monotonic() - start < 8
    with pytest.raises(WorkerError, match="WorkerInterrupted") as info:
        ref.debug_get_from_all()
    assert all(f.interrupted for f in info.value.failures)
    assert_works(sess)


@pytest.mark.conformance
def test_a_sleep_ends(sess: ThreadedSession) -> None:
    sess.call_packed(lambda: time.sleep(1000))
    eventually(sess, "waiting")
    assert "for time.sleep(1000)" in sess.status()[0].detail
    start = time.monotonic()
    assert sess.interrupt() == []
    assert time.monotonic() - start < 8
    assert_works(sess)


def test_of_two_interrupts_the_first_says_where(pair: ThreadedSession) -> None:
    """A slow worker may be sent another one on its way out of the code that the first one hit."""

    def first() -> None:
        raise WorkerInterrupted

    def twice() -> None:
        try:
            first()
        finally:
            raise WorkerInterrupted("interrupted")

    with pytest.raises(WorkerError) as info:
        pair.call_packed(twice).debug_get_from_all()
    assert [failure.frames[-1][2] for failure in info.value.failures] == ["first"] * 2
    assert all(failure.interrupted and not failure.earlier for failure in info.value.failures)


@pytest.mark.one_process
def test_an_interrupt_after_a_failure_does_not_hide_it(
    pair: ThreadedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second try of an interrupt may come while the worker notes what the first one did."""
    worker = pair.workers_here()[0]

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise WorkerInterrupted

    def fail() -> None:
        if current_worker().rank == 0:
            monkeypatch.setattr(worker, "_absorb", interrupted)
        raise KeyError("k")

    ref = pair.call_packed(fail)
    with pytest.raises(WorkerError) as info:
        ref.debug_get_from_all()
    first, second = info.value.failures
    assert (first.type_name, first.frames) == (second.type_name, second.frames)
    assert first.frames[-1][0] == __file__
    assert_works(pair)


def test_a_loop_that_swallows_the_exception_ends_all_the_same(pair: ThreadedSession) -> None:
    def stubborn() -> None:
        swallowed = current_worker().namespace.setdefault("swallowed", [])
        for _ in range(4):
            try:
                spin()
            except BaseException as exc:
                swallowed.append(isinstance(exc, WorkerInterrupted))
        spin()

    pair.call_packed(stubborn)
    eventually(pair, "running")
    deadline = time.monotonic() + 20  # where workers are processes it is unpickled first
    while not all(s.detail.count(__file__) == 2 for s in pair.status()):
        assert time.monotonic() < deadline, pair.status()
        time.sleep(0.01)
    assert pair.interrupt(timeout=20) == []
    assert pair.pull("swallowed") == [[True] * 4] * 2
    assert_works(pair)


def test_what_cleans_up_after_a_wait_has_time(pair: ThreadedSession) -> None:
    """The wait has raised already: an interrupt that is sent as well would hit what cleans up."""

    def clean_up_slowly() -> None:
        until = time.monotonic() + 0.35  # an interrupt of what goes on is sent again after 0.2 s
        while time.monotonic() < until:
            pass

    def work() -> None:
        try:
            time.sleep(60)
        finally:
            clean_up_slowly()
            current_worker().namespace["cleaned"] = True

    pair.call_packed(work)
    eventually(pair, "waiting")
    assert pair.interrupt(timeout=20) == []
    assert pair.pull("cleaned") == [True, True]
    assert_works(pair)


@pytest.mark.conformance
def test_what_is_queued_is_dropped_and_what_comes_later_is_not(pair: ThreadedSession) -> None:
    pair.push({"ran": []})
    ran = pair["ran"]
    pair.call_packed(spin)
    refs = [pair.call_packed(list.append, ran, n) for n in range(100)]
    eventually(pair, "running")
    assert pair.interrupt() == []
    later = pair.call_packed(list.append, ran, 1000)
    later.debug_get_from_all()
    assert ran.debug_get_from_all() == [[1000], [1000]]
    with pytest.raises(WorkerError, match="cancelled before it began"):
        refs[50].debug_get_from_all()
    pair.sync_all()  # who interrupts knows it


def test_an_interrupt_of_idle_workers_is_harmless(sess: ThreadedSession) -> None:
    ref = sess.call_packed(torch.ones, 2)
    sess.sync_all()
    for _ in range(20):
        assert sess.interrupt() == []
    assert ref.debug_get_from_remote(3).tolist() == [1, 1]
    assert_works(sess)


@pytest.mark.conformance
def test_a_worker_inside_a_call_that_python_cannot_end_is_named(pair: ThreadedSession) -> None:
    def stuck() -> None:
        if current_worker().rank == 1:
            lock = threading.Lock()  # Lock.acquire sees no asynchronous exception
            lock.acquire()
            lock.acquire(timeout=1)

    pair.call_packed(stuck)
    time.sleep(0.2)
    assert pair.interrupt(timeout=0.2) == [1]
    assert_works(pair)


def test_fifty_interrupts_with_work_between_lose_nothing_and_hit_nothing_else(
    sess: ThreadedSession,
) -> None:
    def work(number: int) -> int:
        total = 0
        for n in range(2000):
            total += n
        return number

    x = sess.call_packed(torch.zeros, 1)
    sess.sync_all()
    for number in range(50):
        for n in range(number % 7):
            sess.call_packed(work, n)
        if number % 3 == 0:
            sess.call_packed(spin)
        if number % 2:
            time.sleep(0.001 * (number % 5))
        assert sess.interrupt(timeout=20) == []
        refs = [sess.call_packed(work, n) for n in range(3)]
        x = x + 1
        assert [ref.debug_get_from_all() for ref in refs] == [[0] * 4, [1] * 4, [2] * 4]
        sess.sync_all()
    assert [v.item() for v in x.debug_get_from_all()] == [50] * 4
    executed = sess.call_packed(lambda: current_worker().executed).debug_get_from_all()
    assert len(set(executed)) == 1


def test_several_threads_interrupt_at_once(sess: ThreadedSession) -> None:
    for _ in range(10):
        sess.call_packed(spin)
        threads = [threading.Thread(target=sess.interrupt, args=(20,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert_works(sess)


@pytest.mark.conformance
def test_no_later_command_is_hit_when_the_interrupt_comes_as_one_ends(
    pair: ThreadedSession,
) -> None:
    def short() -> int:
        return sum(range(50))

    for _ in range(50):
        for _ in range(30):
            pair.call_packed(short)
        pair.interrupt()
        later = [pair.call_packed(short) for _ in range(5)]
        assert [ref.debug_get_from_remote(1) for ref in later] == [1225] * 5


def raise_in_main(after: float, once: Callable[[], bool] = lambda: True) -> threading.Thread:
    """Ctrl-C, as the stop button of a notebook sends it, some time after something is so."""

    def wait_and_raise() -> None:
        while not once():
            time.sleep(0.01)
        time.sleep(after)
        _thread.interrupt_main()

    thread = threading.Thread(target=wait_and_raise)
    thread.start()
    return thread


@pytest.fixture
def ctrl_c_raises() -> Any:
    """KeyboardInterrupt on SIGINT, whatever the runner of the tests did with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("busy", [spin, lambda: time.sleep(1000)], ids=["loop", "sleep"])
@pytest.mark.conformance
def test_ctrl_c_in_a_sync_is_seen_promptly_and_ends_the_work(
    sess: ThreadedSession, busy: Any
) -> None:
    main = threading.get_ident()
    sess.call_packed(busy)
    start = time.monotonic()
    # not before it waits: workers that spin may keep the main thread from it
    thread = raise_in_main(0.1, lambda: main in waiting_threads)
    with pytest.raises(KeyboardInterrupt):
        sess.sync_all(timeout=60)
    assert time.monotonic() - start < 3
    thread.join(20)
    assert_works(sess)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_is_seen_by_a_call_that_waits_for_room(pair: ThreadedSession) -> None:
    pair.call_packed(spin)
    eventually(pair, "running")

    def call_on() -> None:
        for _ in range(30_000):
            pair.call_packed(int)

    def is_full() -> bool:
        return any(channel.pending() >= _MOST_QUEUED for channel in pair._channels)

    gc.collect()
    gc.disable()  # Python drops an exception that lands in what a collection calls
    try:
        thread = raise_in_main(0.5, is_full)
        with pytest.raises(KeyboardInterrupt):
            call_on()
    finally:
        gc.enable()
    thread.join(20)
    assert_works(pair)


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.usefixtures("drops_exceptions")
def test_ctrl_c_in_a_loop_of_calls_leaves_the_workers_in_step(sess: ThreadedSession) -> None:
    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    func = sess.get_global_func("runtime.disco.worker_id")
    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for number in range(60):
            try:
                # again and again: Python drops one that falls into a finalizer
                signal.setitimer(signal.ITIMER_REAL, 0.001 + number * 1e-4, 0.01)
                while True:
                    func()
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass  # one more came before the timer was off
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    sess.sync_all(timeout=60)
    executed = sess.call_packed(lambda: current_worker().executed).debug_get_from_all()
    assert len(set(executed)) == 1
    assert_works(sess)
    sess._registers.validate()


@pytest.fixture
def alarm(ctrl_c_raises: None) -> Iterator[Callable[[float], None]]:
    """Have Ctrl-C pressed, once, after some seconds."""
    press = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
    before = signal.signal(signal.SIGALRM, press)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_no_ctrl_c_is_lost_where_drefs_are_dropped(
    pair: ThreadedSession, alarm: Callable[[float], None]
) -> None:
    """A finalizer of Python would swallow one that comes in it."""

    def drop_drefs(seconds: float) -> None:
        deadline = time.monotonic() + 5
        alarm(seconds)
        while time.monotonic() < deadline:
            refs = [pair.call_packed(int) for _ in range(30)]
            del refs

    gc.collect()
    gc.disable()  # Python drops an exception that lands in what a collection calls
    try:
        for number in range(60):
            with pytest.raises(KeyboardInterrupt):
                drop_drefs(0.002 + number * 5e-5)
    finally:
        gc.enable()
    assert_works(pair)
    pair._registers.validate()


def test_ctrl_c_in_the_first_moments_of_a_fetch_ends_the_work(
    pair: ThreadedSession, alarm: Callable[[float], None]
) -> None:
    def fetch(ref: DRef, seconds: float) -> None:
        alarm(seconds)
        ref.debug_get_from_all(timeout=20)

    within = 0
    for number in range(60):
        ref = pair.call_packed(spin)
        with pytest.raises(KeyboardInterrupt) as info:
            fetch(ref, 1e-5 + number * 2e-5)
        ours = [entry for entry in info.traceback if "discolab/runtime" in str(entry.path)]
        if len(ours) > 1:  # not as the first function of ours begins
            within += 1
        else:
            pair.interrupt()  # it came before the fetch
        del ref, info
        pair.sync_all(timeout=20)
    assert within > 20


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP here")
def test_after_ctrl_c_an_idle_worker_that_is_late_is_not_said_to_be_in_a_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with make_session(2, "processes", devices="cpu", timeout=20) as session:
        session.sync_all()
        os.kill(session.processes()[1], signal.SIGSTOP)  # as one that gets no time
        try:
            ref = session.call_packed(time.sleep, 1000)
            threading.Timer(0.2, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                ref.debug_get_from_remote(0)
        finally:
            os.kill(session.processes()[1], signal.SIGCONT)
        words = capsys.readouterr().err
        assert "worker 1 did nothing when last heard, and has not confirmed the stop" in words
        assert "can't interrupt" not in words
        assert session.call_packed(int, 3).debug_get_from_all() == [3, 3]


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.one_process
def test_a_second_ctrl_c_during_the_first_leaves_the_session_usable(
    pair: ThreadedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_workers = pair._interrupt_workers

    def torn() -> None:
        pair._workers[0].interrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr(pair, "_interrupt_workers", torn)
    pair.call_packed(spin)
    with pytest.raises(KeyboardInterrupt):
        pair.interrupt()
    monkeypatch.setattr(pair, "_interrupt_workers", interrupt_workers)
    assert pair.interrupt(timeout=20) == []
    assert_works(pair)


def test_shutdown_ends_a_loop_that_swallows_the_exception() -> None:
    session = ThreadedSession(2)

    def stubborn() -> None:
        for _ in range(4):
            try:
                spin()
            except BaseException:
                pass
        spin()

    session.call_packed(stubborn)
    eventually(session, "running")
    assert session.shutdown(cancel=True) == []
