"""What threaded sessions change in the process, and that all of it is put back."""

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from discolab import ThreadedSession, current_worker, current_worker_or_none
from discolab.engines.hooks import SWITCH_INTERVAL


def facts() -> tuple[Any, ...]:
    return sys.getswitchinterval(), time.sleep, threading.Thread.start, torch.get_num_threads()


@pytest.fixture(autouse=True)
def all_is_put_back(request: pytest.FixtureRequest) -> Iterator[None]:
    before = facts()
    yield
    if "[ray" not in request.node.name:  # whose session is kept for other tests
        assert facts() == before


def housekeepers() -> int:
    return sum(thread.name == "discolab-housekeeper" for thread in threading.enumerate())


def settles_at(count: int) -> None:
    """Those of earlier sessions may still be on their way out."""
    deadline = time.monotonic() + 5
    while housekeepers() != count:
        assert time.monotonic() < deadline, housekeepers()
        time.sleep(0.01)


def test_hooks_last_from_the_first_session_to_the_end_of_the_last() -> None:
    before = facts()
    first = ThreadedSession(2)
    second = ThreadedSession(1)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    assert time.sleep is not before[1]
    assert threading.Thread.start is not before[2]
    first.shutdown()
    assert time.sleep is not before[1]
    second.shutdown()
    assert facts() == before


def test_what_somebody_else_changed_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interval = sys.getswitchinterval()
    with ThreadedSession(1):
        sys.setswitchinterval(0.001)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    sys.setswitchinterval(interval)


def test_who_wraps_the_hooks_and_stays_does_no_harm() -> None:
    original, start = time.sleep, threading.Thread.start
    try:
        with ThreadedSession(1):
            inner = time.sleep
            inner_start = threading.Thread.start
            time.sleep = lambda seconds: inner(seconds)
            threading.Thread.start = lambda self: inner_start(self)  # type: ignore[method-assign]
        for _ in range(3):
            with ThreadedSession(2, timeout=20) as session:
                time.sleep(0.001)
                session.call_packed(time.sleep, 0.001).debug_get_from_all()
                thread = threading.Thread(target=time.sleep, args=(0.001,))
                thread.start()
                thread.join(20)
    finally:
        time.sleep, threading.Thread.start = original, start  # type: ignore[method-assign]


def test_there_is_one_housekeeper_however_many_sessions_come_and_go() -> None:
    for _ in range(10):
        with ThreadedSession(1), ThreadedSession(1):
            assert housekeepers() >= 1
    with ThreadedSession(1):
        settles_at(1)
    settles_at(0)


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.12])
def test_sleep_on_a_worker_takes_as_long_as_it_says(pair: ThreadedSession, seconds: float) -> None:
    def measure() -> float:
        start = time.perf_counter()
        time.sleep(seconds)
        return time.perf_counter() - start

    took = min(min(pair.call_packed(measure).debug_get_from_all()) for _ in range(5))
    assert seconds <= took < seconds + 0.03


def test_sleep_on_a_worker_refuses_what_it_always_refuses(pair: ThreadedSession) -> None:
    def try_all() -> list[str]:
        errors = []
        for bad in (-1, float("nan"), "1", None):
            try:
                time.sleep(bad)  # type: ignore[arg-type]
            except (ValueError, TypeError) as exc:
                errors.append(type(exc).__name__)
        time.sleep(0)
        return errors

    assert (
        pair.call_packed(try_all).debug_get_from_all()
        == [["ValueError", "ValueError", "TypeError", "TypeError"]] * 2
    )


def test_a_thread_started_by_a_worker_belongs_to_it(pair: ThreadedSession) -> None:
    def ask_threads() -> list[int]:
        found = []
        thread = threading.Thread(target=lambda: found.append(current_worker().rank))
        thread.start()
        thread.join(20)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found += pool.map(lambda _: current_worker().rank, range(2))
        return found

    assert pair.call_packed(ask_threads).debug_get_from_all() == [[0] * 3, [1] * 3]
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(current_worker_or_none()))
    thread.start()
    thread.join(20)
    assert seen == [None]


@pytest.mark.one_process
def test_what_is_submitted_to_a_pool_belongs_to_who_submits_it(pair: ThreadedSession) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_worker_or_none).result(20) is None  # starts its only thread

        def ask_pool() -> list[int]:
            return [pool.submit(lambda: current_worker().rank).result(20) for _ in range(50)]

        assert pair.call_packed(ask_pool).debug_get_from_all() == [[0] * 50, [1] * 50]
        assert pool.submit(current_worker_or_none).result(20) is None


@pytest.mark.one_process
def test_what_is_submitted_to_a_loop_belongs_to_who_submits_it(pair: ThreadedSession) -> None:
    """Also the tasks that it creates there: libraries keep one loop for all."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def rank() -> int | None:
        await asyncio.sleep(0.001)
        worker = current_worker_or_none()
        return None if worker is None else worker.rank

    async def ask() -> list[int | None]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(20), 0.001)
        later = await asyncio.to_thread(current_worker_or_none)
        found = [await rank(), *await asyncio.gather(rank(), rank())]
        assert later is current_worker_or_none()
        return found

    def ask_loop() -> list[int | None]:
        found: list[int | None] = []
        for _ in range(20):
            found += asyncio.run_coroutine_threadsafe(ask(), loop).result(20)
        return found

    try:
        assert pair.call_packed(ask_loop).debug_get_from_all() == [[0] * 60, [1] * 60]
        assert ask_loop() == [None] * 60
        future = asyncio.run_coroutine_threadsafe(asyncio.sleep(20), loop)
        future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.mark.one_process
def test_what_a_loop_never_begins_is_cancelled(pair: ThreadedSession) -> None:
    """Without "was never awaited"; and asyncio shows the task by its function."""
    seen: list[str] = []

    async def wait() -> None:
        await asyncio.sleep(20)

    async def cancel() -> None:
        task = asyncio.ensure_future(wait())
        seen.append(repr(task))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def in_a_loop() -> None:
        loop = asyncio.new_event_loop()
        future = asyncio.run_coroutine_threadsafe(wait(), loop)
        future.cancel()  # before the loop runs at all
        asyncio.run_coroutine_threadsafe(cancel(), loop).add_done_callback(
            lambda _: loop.call_soon_threadsafe(loop.stop)
        )
        loop.run_forever()
        loop.close()
        assert future.cancelled()
        del future
        gc.collect()

    pair.call_packed(in_a_loop).debug_get_from_all()
    assert len(seen) == 2
    assert all("<locals>.wait() running at " in told for told in seen)


@pytest.mark.alone
def test_workers_share_the_cores_and_the_main_thread_keeps_them(pair: ThreadedSession) -> None:
    mine = torch.get_num_threads()
    theirs = pair.call_packed(torch.get_num_threads).debug_get_from_all()
    assert theirs == [max(1, mine // 2)] * 2
    assert torch.get_num_threads() == mine


def test_threads_started_after_the_last_session_have_torchs_threads_again() -> None:
    def count() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    before = count()
    with ThreadedSession(2, timeout=10):
        pass
    assert count() == before
