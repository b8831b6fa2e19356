"""Ten thousand calls in flight at once, and what is left of them: nothing."""

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session
from discolab.rpc import pool
from tests.rpc import functions
from tests.rpc.conftest import Caller, counts
from tests.rpc.functions import eventually

MANY = 10_000


def nothing_left(sess: Session) -> None:
    eventually(lambda: counts(sess, "calls_waiting", "calls_running") == (0, 0))
    eventually(lambda: counts(sess, "values_owned", "references_held") == (0, 0))


def how_many(caller: Caller) -> int:
    """From workers fewer: it is the same code."""
    return MANY if caller.rank < 0 else MANY // 10


def in_flight(rpc: Any, count: int, file: str) -> None:
    """All of them wait for one file, so that they are in flight at once."""
    gates = [rpc.rpc_async(to, functions.await_file, (file, 60)) for to in (2, 3) for _ in range(4)]
    futures = [rpc.rpc_async(2 + n % 2, functions.add, (n, n)) for n in range(count)]
    functions.touch(file)
    found = [future.wait(60) for future in futures]
    assert found == [2 * n for n in range(count)]
    assert rpc.wait_all(gates) == [True] * 8


def test_ten_thousand_at_once(caller: Caller, sess: Session, tmp_path: Path) -> None:
    caller(in_flight, how_many(caller), str(tmp_path / "go"), timeout=100)
    nothing_left(sess)


def holds_them(rpc: Any, count: int, tag: str) -> None:
    """None of them is answered before the last one is asked: they are all in flight."""
    futures = [rpc.rpc_async(2, functions.later, (tag,)) for _ in range(count)]
    eventually(lambda: rpc.rpc_sync(2, functions.promised, (tag,)) == count, seconds=60)
    assert not any(future.done() for future in futures)
    rpc.rpc_sync(2, functions.fulfil, (tag, "it", count), timeout=60)
    found = rpc.wait_all(futures, timeout=60)
    assert sorted(n for _, n in found) == list(range(count))


def test_ten_thousand_held_at_once(caller: Caller, sess: Session, tag: str) -> None:
    caller(holds_them, how_many(caller), tag, timeout=100)
    nothing_left(sess)


def test_every_second_one_fails(sess: Session) -> None:
    futures = [
        sess.rpc.rpc_async(n % 4, functions.fail if n % 2 else functions.double, ("key",))
        for n in range(1000)
    ]
    for n, future in enumerate(futures):
        if n % 2:
            with pytest.raises(KeyError):
                future.wait()
        else:
            assert future.wait() == "keykey"
    del futures, future
    nothing_left(sess)


def test_calls_back_by_the_hundred(sess: Session) -> None:
    """Each holds a thread on both sides while the innermost runs."""
    futures = [sess.rpc.rpc_async(1, functions.bounce, ([2, 1], 5), timeout=60) for _ in range(300)]
    assert sess.rpc.wait_all(futures) == [[1, 2, 1, 2, 1, 2]] * 300
    del futures
    nothing_left(sess)


@pytest.mark.slow
def test_more_calls_back_than_there_can_be_threads(sess: Session) -> None:
    """The right answers, or an error that says so; never a deadlock."""
    futures = [
        sess.rpc.rpc_async(1, functions.bounce, ([2, 1], 3), timeout=60) for _ in range(1500)
    ]
    assert sess.rpc.wait_all(futures, timeout=60) == [[1, 2, 1, 2]] * 1500
    del futures
    nothing_left(sess)


@pytest.mark.slow
def test_memory_does_not_grow(sess: Session, engine: str) -> None:
    def used(to: int) -> int:
        return sess.rpc.rpc_sync(to, _objects)

    def work() -> None:
        for n in range(200):
            to = 2 * (n % 2)
            sess.rpc.rpc_async(to, functions.add, (n,)).wait()
            sess.rpc.remote(to, functions.same, (torch.ones(3),)).to_here()
            sess.rpc.rpc_async(to, functions.fail, ("value",))
        assert len(list(sess.rpc.stream(2, functions.numbers, (50,)))) == 50
        nothing_left(sess)

    work()
    before = {to: used(to) for to in (0, 2)}
    work()
    work()
    # garbage of the last exceptions comes and goes; one object a call would be 600 more at least
    eventually(lambda: all(used(to) - before[to] < 400 for to in before))


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_descriptors_do_not_grow(sess: Session, engine: str) -> None:
    def used(to: int) -> int:
        return sess.rpc.rpc_sync(to, _descriptors)

    def work() -> None:
        for n in range(40):
            big = torch.full((300_000,), float(n))
            found = sess.rpc.rpc_sync(n % 4, functions.same, (big,))
            assert torch.equal(found, big)
        sess.rpc.rpc_sync(1, functions.bounce, ([2, 3], 8))

    work()
    before = [used(to) for to in range(4)]
    work()
    for to in range(4):
        assert used(to) <= before[to] + 8


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_threads_of_the_controller_ask_by_the_thousand(sess: Session) -> None:
    wrong: list[Any] = []

    def ask(number: int) -> None:
        futures = [sess.rpc.rpc_async(n % 4, functions.add, (n, number)) for n in range(500)]
        found = [future.wait(60) for future in futures]
        if found != [n + number for n in range(500)]:
            wrong.append(number)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    nothing_left(sess)


def test_threads_go_down_again(fresh: Callable[..., Session]) -> None:
    def threads() -> int:
        return counts(sess, "threads")[0]

    sess = fresh(4)
    usual = pool._IDLE
    for rank in range(-1, 4):
        sess.rpc.rpc_sync(rank, _end_idle_ones_after, (0.2,))
    try:
        calls = [sess.rpc.rpc_async(1, functions.bounce, ([2, 1], 3)) for _ in range(100)]
        sess.rpc.wait_all(calls)
        eventually(lambda: threads() <= 10, seconds=30)
    finally:
        for rank in range(-1, 4):
            sess.rpc.rpc_sync(rank, _end_idle_ones_after, (usual,))


def _end_idle_ones_after(seconds: float) -> None:
    pool._IDLE = seconds
