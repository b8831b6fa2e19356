"""Ends of calls that are rare: odd exceptions, chains without end, futures completed by hand."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ArgumentError, DiscoError, Session, WaitTimeoutError, current_worker, rpc
from tests.rpc import functions
from tests.rpc.functions import eventually


class Opaque(Exception):
    """Tells nobody anything of itself."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


def raise_opaque() -> None:
    raise Opaque


def test_an_exception_that_can_not_be_looked_at(sess: Session) -> None:
    for _ in range(20):  # more than there can be threads at work
        with pytest.raises(DiscoError, match="Opaque"):
            sess.rpc.rpc_sync(1, raise_opaque, timeout=30)
    assert sess.rpc.rpc_sync(1, max, (1, 2), timeout=30) == 2


def block_until(over: str) -> None:
    """Blocks in C, where no interrupt comes, until there is this file."""
    lock = threading.Lock()
    lock.acquire()

    def release() -> None:
        functions.await_file(over, 60)
        lock.release()

    threading.Thread(target=release, daemon=True).start()
    lock.acquire()


def test_a_remote_value_that_blocks_past_its_deadline(sess: Session, tmp_path: Path) -> None:
    over = tmp_path / "over"
    ref = sess.rpc.remote(1, block_until, (str(over),), timeout=0.3)
    try:
        with pytest.raises(TimeoutError, match="gave up"):
            ref.to_here(timeout=30)  # not when the function has ended: that is after this
    finally:
        over.touch()


def count_down(left: int) -> int:
    """Calls itself, on its own rank."""
    if not left:
        return 0
    return 1 + int(rpc.rpc_sync(current_worker().rank, count_down, (left - 1,), timeout=60))


@pytest.mark.slow  # it ends when there are thousands of threads
def test_a_chain_of_calls_without_end_is_an_error(sess: Session) -> None:
    assert sess.rpc.rpc_sync(1, count_down, (100,), timeout=60) == 100
    with pytest.raises(DiscoError):
        sess.rpc.rpc_sync(1, count_down, (100_000,), timeout=60)
    assert sess.rpc.rpc_sync(1, functions.my_rank, timeout=60) == 1
    eventually(lambda: sess.rpc.debug_info(1)["calls_waiting"] == 0, seconds=30)


def test_a_callback_that_exits(sess: Session) -> None:
    def leave(_: Any) -> None:
        raise SystemExit(3)

    after = sess.rpc.rpc_async(1, functions.my_rank).then(leave)
    with pytest.raises(SystemExit):
        after.wait(30)


def test_futures_of_calls_are_not_completed_by_hand(sess: Session) -> None:
    future = sess.rpc.rpc_async(1, functions.my_rank)
    with pytest.raises(RuntimeError, match="future of a call"):
        future.set_result(7)
    with pytest.raises(RuntimeError, match="future of a call"):
        future.set_exception(ValueError("seven"))
    assert future.wait(30) == 1


def test_a_future_of_ones_own() -> None:
    future = rpc.Future()
    with pytest.raises(RuntimeError, match="not done"):
        future.value()
    with pytest.raises(ArgumentError, match="exception"):
        future.set_exception("wrong")  # type: ignore[arg-type]
    assert not future.done()
    future.set_exception(KeyError("mine"))
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            future.wait(30)
    with pytest.raises(RuntimeError, match="done already"):
        future.set_result(1)


def test_wait_all_of_futures_of_torch() -> None:
    first: torch.futures.Future[Any] = torch.futures.Future()
    second: torch.futures.Future[Any] = torch.futures.Future()
    first.set_result(1)
    with pytest.raises(WaitTimeoutError, match=r"1 of 2"):
        rpc.wait_all([first, second], timeout=0.2)
    second.set_result(2)
    assert rpc.wait_all([first, second], timeout=30) == [1, 2]


def slow_items() -> Any:
    """One at once, the next one late."""
    yield 1
    time.sleep(30)
    yield 2


def test_a_stream_that_another_thread_closes(sess: Session) -> None:
    stream = sess.rpc.stream(1, slow_items, timeout=60)
    assert next(stream) == 1
    closer = threading.Timer(0.2, stream.close)
    closer.start()
    begun = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - begun < 20
    closer.join()


@pytest.mark.parametrize("name", ["worker01", "worker", "worker-1", "Worker1", "worker１"])
def test_names_that_are_none(sess: Session, name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        sess.rpc.rpc_sync(name, functions.my_rank)
