"""Waits: deadlines that say what workers do, shutdown during a wait, status, many threads."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from discolab import (
    ArgumentError,
    DRef,
    Session,
    SessionClosedError,
    ThreadedSession,
    WaitTimeoutError,
    WorkerError,
    current_worker,
)
from tests.conftest import Gate


def hold_back(gate: Any, ranks: tuple[int, ...] = (0, 1)) -> int:
    rank = current_worker().rank
    if rank in ranks:
        gate.wait(20)
    return rank


@pytest.mark.conformance
def test_a_deadline_says_what_each_worker_does_and_the_work_goes_on(
    pair: ThreadedSession, gate: Gate
) -> None:
    ref = pair.call_packed(hold_back, gate, (1,))
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError) as info:
        ref.debug_get_from_all(timeout=0.2)
    assert 0.15 < time.monotonic() - start < 2
    text = str(info.value)
    assert "gave up after 0.2 s waiting for register" in text
    assert "worker 0: idle" in text
    assert "worker 1: running call of 'hold_back'" in text
    assert f"{__file__}:" in text
    assert info.value.partial == {0: 0}
    gate.set()
    assert ref.debug_get_from_all() == [0, 1]


def fail_or_wait(gate: Gate) -> None:
    if current_worker().rank == 0:
        raise ValueError("why\nmore")
    gate.wait(20)


@pytest.mark.conformance
def test_a_deadline_tells_who_has_failed(pair: ThreadedSession, gate: Gate) -> None:
    """Who has is idle: what the others wait for may be the consequence."""
    ref = pair.call_packed(fail_or_wait, gate)
    with pytest.raises(
        WaitTimeoutError, match=r"worker 0 failed in call of 'fail_or_wait' .*why\n"
    ):
        ref.debug_get_from_all(timeout=0.5)
    gate.set()
    with pytest.raises(WorkerError, match="why"):
        ref.debug_get_from_all()


@pytest.mark.parametrize("what", ["sync_all", "sync_worker", "fetch", "copy", "set"])
def test_every_wait_takes_a_deadline(pair: ThreadedSession, gate: Gate, what: str) -> None:
    ref = pair.empty(2, "float32")
    pair.call_packed(lambda: gate.wait(20))
    waits: dict[str, Callable[[], object]] = {
        "sync_all": lambda: pair.sync_all(timeout=0.05),
        "sync_worker": lambda: pair.sync_worker(1, timeout=0.05),
        "fetch": lambda: ref.debug_get_from_remote(0, timeout=0.05),
        "copy": lambda: pair.copy_from_worker_0(np.zeros(2, np.float32), ref, timeout=0.05),
        "set": lambda: ref.debug_copy_from(0, torch.ones(2), timeout=0.05),
    }
    with pytest.raises(WaitTimeoutError):
        waits[what]()
    gate.set()
    pair.sync_all()


@pytest.mark.parametrize("timeout", [0, 1e-9, np.float32(0)])
def test_a_deadline_that_is_past_gives_up_at_once(
    pair: ThreadedSession, gate: Gate, timeout: float
) -> None:
    pair.call_packed(lambda: gate.wait(20))
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        pair.sync_all(timeout=timeout)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("timeout", [-1, math.nan, "3", 10**400, True, []])
def test_what_is_no_time_is_refused_before_anything_is_sent(
    pair: ThreadedSession, timeout: Any
) -> None:
    ref = pair.empty(2, "float32")
    host = np.zeros(2, np.float32)
    sent = pair.statistics().commands_sent
    waits: list[Callable[[], object]] = [
        lambda: pair.sync_all(timeout),
        lambda: pair.sync_worker(0, timeout),
        lambda: pair.pull("x", timeout=timeout),
        lambda: ref.debug_get_from_all(timeout),
        lambda: ref.debug_copy_from(0, host, timeout),
        lambda: pair.copy_from_worker_0(host, ref, timeout),
        lambda: pair.copy_to_worker_0(host, timeout=timeout),
        lambda: pair.interrupt(timeout),
        lambda: pair.shutdown(timeout),
        lambda: ThreadedSession(1, timeout=timeout),
    ]
    for wait in waits:
        with pytest.raises(ArgumentError, match="timeout is a number of seconds"):
            wait()
    assert pair.statistics().commands_sent == sent


def test_an_infinite_time_is_no_limit() -> None:
    session = ThreadedSession(1, timeout=math.inf)
    assert session.call_packed(int).debug_get_from_all(timeout=math.inf) == [0]
    assert session.interrupt(math.inf) == []
    assert session.shutdown(math.inf) == []


def test_checks_of_a_wait_are_not_starved_by_wake_ups(pair: ThreadedSession) -> None:
    class Seen(Exception):
        pass

    def check() -> None:
        raise Seen

    def wait() -> float:
        worker, start = current_worker(), time.monotonic()

        def ready() -> bool:
            worker.wake()  # as a busy peer does
            return time.monotonic() - start > 5

        with pytest.raises(Seen):
            worker.wait_for(ready, "what never comes", check=check)
        return time.monotonic() - start

    assert max(pair.call_packed(wait).debug_get_from_all()) < 2


def test_a_session_has_a_deadline_for_all_waits(gate: Gate) -> None:
    session = ThreadedSession(1, timeout=0.1)
    session.call_packed(lambda: gate.wait(20))
    with pytest.raises(WaitTimeoutError):
        session.sync_all()
    gate.set()
    session.sync_all(timeout=20)
    session.shutdown()


def test_a_failure_is_not_lost_with_the_wait_that_was_given_up(
    pair: ThreadedSession, gate: Gate
) -> None:
    def fail_late() -> None:
        if current_worker().rank == 1:
            gate.wait(20)
            raise ValueError("late")

    def fail_at_once() -> None:
        if current_worker().rank == 0:
            raise ValueError("early")

    pair.call_packed(fail_at_once)
    pair.sync_worker(1)
    pair.call_packed(fail_late)
    for _ in range(2):
        with pytest.raises(WaitTimeoutError):
            pair.sync_all(timeout=0.1)
    gate.set()
    with pytest.raises(WorkerError) as info:
        pair.sync_all()
    assert [(f.rank, f.message) for f in info.value.failures] == [(0, "early"), (1, "late")]
    pair.sync_all()


def test_nobody_asked_is_nobody_waited_for(pair: ThreadedSession) -> None:
    assert pair.fetch(pair.call_packed(int), []) == []
    assert pair.fetch(pair.call_packed(int), [1, 1, 0]) == [0, 0, 0]


def test_shutdown_ends_the_waits_of_other_threads(gate: Gate) -> None:
    session = ThreadedSession(2, timeout=30)
    session.call_packed(lambda: gate.wait(20))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(session.sync_all)
        time.sleep(0.1)
        session.shutdown(timeout=0.1, cancel=True)
        error = waiter.exception(timeout=20)
        gate.set()
    assert error is None or isinstance(error, SessionClosedError)


def test_status_and_statistics_never_wait(pair: ThreadedSession, gate: Gate) -> None:
    started = Gate(gate.path + " started")

    def busy() -> None:
        started.set()
        gate.wait(20)

    before = pair.statistics()
    refs = [pair.call_packed(busy), pair.call_packed(int), pair.call_packed(int)]
    assert started.wait(20)
    time.sleep(0.05)
    stats = pair.statistics()
    assert stats.live_registers == before.live_registers + 3
    assert stats.commands_sent == before.commands_sent + 3
    for status in stats.workers:
        if status.state == "running":
            assert "call of 'test_status_and_statistics_never_wait.<locals>.busy'" in status.detail
            assert status.queued == 2
            assert str(status).startswith(f"worker {status.rank}: running call of")
    assert "running" in [status.state for status in stats.workers]
    gate.set()
    pair.sync_all()
    assert [(s.rank, s.state, s.queued) for s in pair.status()] == [(0, "idle", 0), (1, "idle", 0)]
    del refs


@pytest.mark.conformance
def test_two_threads_use_one_session(sess: ThreadedSession) -> None:
    def work(number: int) -> None:
        x = sess.call_packed(torch.full, (2,), float(number))
        for _ in range(50):
            x = x + 1
            sess.call_packed(lambda t: t * 2, x)
        values = x.debug_get_from_all()
        assert all(v.tolist() == [number + 50.0] * 2 for v in values)
        host = torch.zeros(2)
        sess.copy_from_worker_0(host, x, timeout=20)
        assert host.tolist() == [number + 50.0] * 2

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8), timeout=60))
    sess._registers.validate()


@pytest.mark.conformance
def test_all_workers_run_commands_of_all_threads_in_one_order(sess: ThreadedSession) -> None:
    def note(thread: int, number: int) -> None:
        current_worker().namespace.setdefault("order", []).append((thread, number))

    def send(thread: int) -> None:
        for number in range(200):
            sess.call_without_result(note, thread, number)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(send, range(3), timeout=60))
    orders = sess.pull("order")
    assert len(orders[0]) == 600
    assert orders[0] == orders[1] == orders[2] == orders[3]


def registers(session: Session) -> list[int]:
    return session.call_packed(lambda: len(current_worker().registers)).debug_get_from_all()


def test_drefs_dropped_from_several_threads_leave_no_register_behind(
    sess: ThreadedSession,
) -> None:
    sess.sync_all()
    before = registers(sess)
    refs: list[list[DRef]] = [[sess.call_packed(int, n) for n in range(2500)] for _ in range(4)]
    start = threading.Barrier(4)

    def drop(mine: list[DRef]) -> None:
        start.wait(20)
        while mine:
            mine.pop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(drop, refs, timeout=60))
    sess.sync_all()
    assert registers(sess) == before
    sess._registers.validate()


def test_a_busy_worker_does_not_freeze_the_dropping_of_drefs(
    pair: ThreadedSession, gate: Gate
) -> None:
    refs = [pair.call_packed(int) for _ in range(1000)]
    pair.call_packed(lambda: gate.wait(60))
    for _ in range(10_000):
        pair.call_packed(int)
    start = time.monotonic()
    refs.clear()
    assert time.monotonic() - start < 2
    gate.set()
    pair.sync_all(timeout=60)


@pytest.mark.conformance
def test_calls_wait_for_a_worker_that_is_far_behind(pair: ThreadedSession, gate: Gate) -> None:
    pair.call_packed(lambda: gate.wait(60))
    behind: list[int] = []

    def release() -> None:
        time.sleep(0.3)
        while not behind or pair.status()[0].queued != behind[-1]:
            behind.append(pair.status()[0].queued)
            time.sleep(0.2)
        gate.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(release)
        refs = [pair.call_packed(int, 1) for _ in range(25_000)]
        done.result(timeout=60)
    assert 16_000 < behind[-1] < 20_000
    pair.sync_all(timeout=60)
    assert refs[-1].debug_get_from_all() == [1, 1]


def test_a_call_to_a_worker_far_behind_has_the_sessions_deadline(gate: Gate) -> None:
    session = ThreadedSession(1, timeout=0.5)
    session.call_packed(lambda: gate.wait(60))

    def call_on() -> None:
        for _ in range(25_000):
            session.call_packed(int)

    with pytest.raises(WaitTimeoutError, match="room in the queue"):
        call_on()
    gate.set()
    session.sync_all(timeout=60)
    session.shutdown()


def test_a_queue_that_gets_shorter_is_waited_for() -> None:
    session = ThreadedSession(1, timeout=0.3)
    for _ in range(17_000):  # those that are too many take longer than the deadline
        session.call_packed(time.sleep, 0.0001)
    assert session.interrupt(timeout=20) == []
    session.shutdown()
