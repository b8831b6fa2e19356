"""Streams: what a generator on another worker yields, one by one."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import DiscoError, Session, WaitTimeoutError, WorkerError
from discolab.rpc.queues import MOST_AT_DEPTH
from tests.rpc import functions
from tests.rpc.conftest import Caller, counts
from tests.rpc.functions import eventually


def iterates(rpc: Any) -> None:
    for to in (2, 0, rpc.get_worker_info().id, -1):
        assert list(rpc.stream(to, functions.numbers, (50,))) == list(range(50))
        assert list(rpc.stream(to, functions.numbers, (0,))) == []
        assert list(rpc.stream(to, functions.numbers, kwargs={"count": 3}, buffer=1)) == [0, 1, 2]
        assert list(rpc.stream(to, range, (5,))) == [0, 1, 2, 3, 4], "any iterable"
        assert list(rpc.stream(to, dict, ({"a": 1},))) == ["a"]
    items = rpc.stream(2, functions.numbers, (3,))
    assert iter(items) is items
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(items)


@pytest.mark.conformance
def test_in_order_and_complete(caller: Caller) -> None:
    caller(iterates)


@pytest.mark.parametrize("buffer", [1, 3, 8])
def test_the_generator_is_at_most_a_buffer_ahead(sess: Session, tag: str, buffer: int) -> None:
    items = sess.rpc.stream(2, functions.numbers, (100, tag), buffer=buffer)

    def made() -> int:
        return len(sess.rpc.rpc_sync(2, functions.seen, (tag,)))

    eventually(lambda: made() >= buffer)
    for taken in range(20):
        assert next(items) == taken
        for _ in range(3):
            # one item more than the buffer may have been made, to be sent when there is room
            assert made() <= taken + 1 + buffer + 1
    assert list(items) == list(range(20, 100))
    eventually(lambda: made() == 101)


def stops_early(rpc: Any, tag: str) -> None:
    for number, how in enumerate(("close", "break", "drop")):
        name = f"{tag}{number}"
        items = rpc.stream(2, functions.numbers, (10**6, name))
        if how == "break":
            for item in items:
                if item == 3:
                    break
        else:
            assert list(itertools.islice(items, 3)) == [0, 1, 2]
        if how == "close":
            items.close()
            items.close()
            with pytest.raises(StopIteration):
                next(items)
        del items
        eventually(lambda: rpc.rpc_sync(2, functions.seen, (name,))[-1:] == ["closed"])  # noqa: B023


def test_whoever_stops_early_closes_the_generator(caller: Caller, tag: str) -> None:
    caller(stops_early, tag)


def fails_late(rpc: Any) -> None:
    found: list[int] = []
    with pytest.raises(ValueError, match="in the middle") as info:
        found.extend(rpc.stream(2, functions.numbers_then_fail, (20,)))
    assert found == list(range(20)), "what came before the error is not lost"
    assert isinstance(info.value, WorkerError)
    items = rpc.stream(2, functions.fail, ("key",))
    with pytest.raises(KeyError):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    with pytest.raises(TypeError, match="iter"):
        next(rpc.stream(2, functions.add, (1, 2)))


def test_an_exception_comes_after_the_items_before_it(caller: Caller) -> None:
    caller(fails_late)


def test_an_item_that_does_not_come(caller: Caller, sess: Session, tag: str) -> None:
    def scenario(rpc: Any) -> None:
        items = rpc.stream(2, functions.numbers_then_hang, (3, tag), timeout=1)
        begin = time.monotonic()
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(WaitTimeoutError):
            next(items)
        assert time.monotonic() - begin < 15
        eventually(lambda: rpc.rpc_sync(2, functions.seen, (tag,)) == ["closed"])

    caller(scenario)
    eventually(lambda: counts(sess, "calls_running", ranks=[2]) == (0,))


def test_the_deadline_is_for_each_item(sess: Session) -> None:
    """The consumer's own time does not count, nor is it for all items together."""
    items = sess.rpc.stream(2, functions.numbers, (5,), timeout=1, buffer=1)
    found = []
    for item in items:
        found.append(item)
        time.sleep(0.3)
    assert found == [0, 1, 2, 3, 4]


def interleaves(rpc: Any) -> None:
    streams = [rpc.stream(n % 4, functions.numbers, (n,)) for n in range(40)]
    found = [list(itertools.islice(s, 5)) for s in streams]
    found = [[*some, *s] for some, s in zip(found, streams, strict=True)]
    assert found == [list(range(n)) for n in range(40)]


def test_many_at_once(caller: Caller) -> None:
    caller(interleaves)


def test_of_tensors(caller: Caller) -> None:
    def scenario(rpc: Any) -> None:
        for n, item in enumerate(rpc.stream(2, functions.tensors, (30,))):
            assert torch.equal(item, torch.full((n,), float(n)))

    caller(scenario)


def test_of_a_stream(caller: Caller) -> None:
    def scenario(rpc: Any) -> None:
        assert list(rpc.stream(2, functions.stream_of, (3, 20))) == [2 * n for n in range(20)]
        me = rpc.get_worker_info().id
        assert list(rpc.stream(2, functions.stream_of, (me, 20))) == [2 * n for n in range(20)]

    caller(scenario)


def test_an_item_that_cannot_be_sent(sess: Session, engine: str) -> None:
    items = sess.rpc.stream(2, functions.locks, (3,))
    assert list(itertools.islice(items, 3)) == [0, 1, 2]
    if engine == "threads":
        assert hasattr(next(items), "acquire")
    else:
        with pytest.raises(DiscoError, match="lock"):
            next(items)


def test_a_function_of_a_cell(caller: Caller) -> None:
    def scenario(rpc: Any) -> None:
        def squares(count: int) -> Any:
            for n in range(count):
                yield n * n

        assert list(rpc.stream(2, squares, (4,))) == [0, 1, 4, 9]
        assert list(rpc.stream(2, lambda: (n for n in "ab"))) == ["a", "b"]

    caller(scenario)


def test_streams_that_nobody_reads_do_not_hold_up_calls(sess: Session, tag: str) -> None:
    """A full buffer takes a thread, not the worker; there are more than calls of one depth."""
    count = MOST_AT_DEPTH + 36
    unread = [sess.rpc.stream(2, functions.numbers, (9, tag), buffer=1) for _ in range(count)]
    eventually(lambda: sess.rpc.rpc_sync(2, functions.seen, (tag,)).count(0) == count)
    assert list(unread.pop()) == list(range(9))
    assert list(unread.pop(0)) == list(range(9))
    del unread
    eventually(lambda: sess.rpc.rpc_sync(2, functions.seen, (tag,)).count("closed") == count)


def test_the_worker_dies_in_the_middle(fresh: Any, engine: str) -> None:
    if engine == "threads":
        pytest.skip("workers are threads of this process")
    sess = fresh(3)
    items = sess.rpc.stream(2, functions.numbers_then_die, (3,))
    found: list[int] = []
    with pytest.raises(ConnectionError):
        found.extend(items)
    assert found == [0, 1, 2]
    assert list(sess.rpc.stream(1, functions.numbers, (3,))) == [0, 1, 2]


def test_the_session_ends_in_the_middle(fresh: Any, tmp_path: Path) -> None:
    sess = fresh(2)
    items = sess.rpc.stream(1, functions.numbers, (1000,), buffer=2)
    assert next(items) == 0
    sess.shutdown(cancel=True)
    with pytest.raises(DiscoError):
        list(items)
