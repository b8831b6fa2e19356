"""A collective that can't complete ends on every member, quickly, and says why."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.engines import ThreadedSession
from discolab.runtime import (
    CollectiveError,
    Failure,
    WaitTimeoutError,
    WorkerError,
    current_worker,
)

pytestmark = pytest.mark.any_engine


def rank() -> int:
    return current_worker().rank


def fine() -> float:
    """A collective that works: the session is usable after what came before."""
    return ccl.all_reduce(torch.ones(3), group="world").sum().item()


def failures_of(sess: ThreadedSession, func: Callable[[], Any]) -> dict[int, Failure]:
    """Run what fails; the session must be usable after it."""
    started = time.monotonic()
    ref = sess.call_packed(func)
    with pytest.raises(WorkerError) as caught:
        ref.debug_get_from_all()
    assert time.monotonic() - started < 5.0
    sess.sync_all()  # what was told once is not told again
    want = 3.0 * sess.num_workers
    assert sess.call_packed(fine).debug_get_from_all() == [want] * sess.num_workers
    return {failure.rank: failure for failure in caught.value.failures}


def expect(
    failures: dict[int, Failure], ranks: list[int], kind: str, *words: str, victim: bool = False
) -> None:
    assert sorted(failures) == ranks
    for failure in failures.values():
        assert failure.type_name == kind, failure
        assert failure.victim is victim
        for word in words:
            assert word in failure.message, failure.message


def other_shape() -> None:
    ccl.all_reduce(torch.ones(4, 4 + (rank() == 2)))


def other_dtype() -> None:
    ccl.all_gather(torch.ones(4, dtype=torch.float64 if rank() == 0 else torch.float32))


def other_reduction() -> None:
    ccl.all_reduce(torch.ones(4), "max" if rank() == 3 else "sum")


def other_root() -> None:
    ccl.broadcast(torch.ones(4), int(rank() == 1))


def other_operation() -> None:
    if rank() == 1:
        ccl.barrier()
    else:
        ccl.all_reduce(torch.ones(4))


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (other_shape, ["shape", "float32[4, 4]", "float32[4, 5]", "worker 2: called all_reduce"]),
        (other_dtype, ["dtype", "float64[4]", "workers 1-3"]),
        (other_reduction, ["reduction", "all_reduce(max)", "all_reduce(sum)", "worker 3"]),
        (other_root, ["root", "root worker 0", "root worker 1"]),
        (other_operation, ["operation", "worker 1: called barrier", "all_reduce(sum)"]),
    ],
)
def test_members_disagree(start: Any, func: Callable[[], None], words: list[str]) -> None:
    with start(4) as sess:
        failures = failures_of(sess, func)
    site = f"test_failures.py:{func.__code__.co_firstlineno + 1}"
    words = [*words, "disagree", f"in {func.__name__}"]
    if func is not other_operation:
        words.append(site)
    expect(failures, [0, 1, 2, 3], "CollectiveError", *words)
    assert len({failure.headline for failure in failures.values()}) == 1


def disagree_while_one_sleeps() -> None:
    if rank() == 3:
        time.sleep(0.3)
    ccl.all_reduce(torch.ones(2 + (rank() == 1)))


def test_disagreement_is_told_before_the_last_has_come(start: Any) -> None:
    with start(4) as sess:
        failures = failures_of(sess, disagree_while_one_sleeps)
    words = ["shape", "worker 3: has not come to it yet", "time.sleep"]
    expect(failures, [0, 1, 2, 3], "CollectiveError", *words)


def raises() -> None:
    if rank() == 2:
        raise ValueError("boom")
    ccl.all_reduce(torch.ones(4))


def wrong_argument() -> None:
    ccl.all_reduce(torch.ones(4), "mean" if rank() == 2 else "sum")


@pytest.mark.parametrize(
    ("func", "kind", "word"),
    [(raises, "ValueError", "boom"), (wrong_argument, "ArgumentError", "unknown op 'mean'")],
)
def test_a_member_fails(start: Any, func: Callable[[], None], kind: str, word: str) -> None:
    with start(4) as sess:
        failures = failures_of(sess, func)
    expect({2: failures.pop(2)}, [2], kind, word)
    words = ["worker 2: failed", word, "workers 0-1, 3: called all_reduce(sum) of float32[4]"]
    expect(failures, [0, 1, 3], "CollectiveAborted", *words, victim=True)


def fails_in_one_group() -> float:
    if rank() == 3:
        raise ValueError("boom")
    return float(ccl.all_reduce(torch.ones(())))


def test_other_groups_go_on(start: Any) -> None:
    with start(4, 2) as sess:
        ref = sess.call_packed(fails_in_one_group)
        assert [ref.debug_get_from_remote(i) for i in (0, 1)] == [2.0, 2.0]
        with pytest.raises(WorkerError, match="boom") as caught:
            sess.sync_all()
        assert {f.rank: f.victim for f in caught.value.failures} == {2: True, 3: False}


def returns_early() -> None:
    if rank():
        ccl.all_gather(torch.ones(4))


def one_more_than_the_others() -> None:
    for _ in range(3 + (rank() == 1)):
        ccl.barrier()


def test_a_member_returns_early(start: Any) -> None:
    with start(3) as sess:
        words = ["worker 0: finished the call without it", "workers 1-2: called all_gather"]
        expect(failures_of(sess, returns_early), [1, 2], "CollectiveError", *words)
        words = ["barrier #4", "workers 0, 2: finished the call without it"]
        expect(failures_of(sess, one_more_than_the_others), [1], "CollectiveError", *words)


def takes(_: Any) -> None:
    ccl.barrier()


def test_a_member_has_a_poisoned_argument(start: Any) -> None:
    with start(3) as sess:
        poisoned = sess.call_packed(lambda: 1 // rank())
        ref = sess.call_packed(takes, poisoned)
        with pytest.raises(WorkerError) as caught:
            ref.debug_get_from_all()
        kinds = {f.rank: f.type_name for f in caught.value.failures}
        assert kinds == {0: "ZeroDivisionError", 1: "CollectiveAborted", 2: "CollectiveAborted"}
        assert "worker 0: failed: ZeroDivisionError" in caught.value.failures[1].message


def circle_of_recv() -> None:
    ccl.recv(torch.ones(4), (rank() + 1) % 4)


def mixed_circle() -> None:
    if rank() < 2:
        ccl.barrier(group=[0, 1, 2])
    elif rank() == 2:
        ccl.all_reduce(torch.ones(1), group=[2, 3])
    else:
        ccl.recv(torch.ones(3), 0)


def groups_in_other_order() -> None:
    for group in ([[0, 1], [0, 2, 3]] if rank() == 0 else [[0, 2, 3], [0, 1]])[:2]:
        if rank() in group:
            ccl.barrier(group=group)
    if rank() == 1:
        ccl.barrier(group=[1, 2])
    if rank() == 2:
        ccl.recv(torch.ones(1), 1)


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (circle_of_recv, ["worker 3: waiting in recv of float32[4] from worker 0"]),
        (mixed_circle, ["workers 0-1: waiting in barrier", "worker 2: waiting in all_reduce"]),
    ],
)
def test_deadlock(start: Any, func: Callable[[], None], words: list[str]) -> None:
    with start(4) as sess:
        failures = failures_of(sess, func)
    site = f"in {func.__name__}"
    expect(failures, [0, 1, 2, 3], "CollectiveError", "deadlock", "test_failures.py:", site, *words)


def test_deadlock_that_only_some_take_part_in(start: Any) -> None:
    with start(4) as sess:
        failures = failures_of(sess, groups_in_other_order)
    assert sorted(failures) == [1, 2]
    expect(failures, [1, 2], "CollectiveError", "deadlock", "barrier", "recv")


def slow_but_right() -> float:
    """Waits that look odd for some ticks and are not a deadlock."""
    if rank() == 0:
        time.sleep(0.3)
        ccl.send(torch.ones(1), 1)
    elif rank() == 1:
        ccl.recv(torch.zeros(1), 0)
    ccl.barrier(group=[0, 1] if rank() < 2 else [2, 3])
    return float(ccl.all_reduce(torch.ones(())))


def test_slow_is_no_deadlock(start: Any) -> None:
    with start(4) as sess:
        assert sess.call_packed(slow_but_right).debug_get_from_all() == [4.0] * 4


def with_timeout() -> None:
    if rank() == 1:
        time.sleep(0.6)
    ccl.all_gather(torch.ones(4), timeout=0.1 if rank() == 0 else None)


def test_timeout_names_who_is_missing(start: Any) -> None:
    with start(3) as sess:
        failures = failures_of(sess, with_timeout)
    words = ["gave up after 0.1 s", "missing: worker", "worker 1: has not come", "time.sleep(0.6)"]
    expect({0: failures.pop(0)}, [0], "WaitTimeoutError", *words)
    expect(failures, [1, 2], "CollectiveAborted", "worker 0 gave up after 0.1 s", victim=True)


def recovers() -> float:
    """A program that catches the error goes on with the next collective."""
    try:
        ccl.all_reduce(torch.ones(2 + rank()))
    except CollectiveError:
        pass
    return float(ccl.all_reduce(torch.ones(())))


def test_the_error_can_be_caught(start: Any) -> None:
    with start(4) as sess:
        assert sess.call_packed(recovers).debug_get_from_all() == [4.0] * 4


def reduces() -> None:
    ccl.all_reduce(torch.ones(3))


@pytest.mark.one_process
def test_an_error_in_the_work_ends_it_on_all(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("no room")

    monkeypatch.setattr("discolab.ccl.backends.jobs.combine", out_of_memory)
    with start(3) as sess:
        failures = failures_of(sess, reduces)
    assert sorted(failures) == [0, 1, 2]
    causes = [f for f in failures.values() if not f.victim]
    assert [f.type_name for f in causes] == ["MemoryError"]
    words = f"MemoryError on worker {causes[0].rank}, which did it for all: no room"
    assert all(words in f.message for f in failures.values() if f.victim)


def waits_for_a_slow_one(seconds: float | None) -> str:
    ccl.set_timeout(seconds)
    worker = current_worker()
    try:
        if worker.rank == 1:
            worker.wait_for(lambda: False, "nothing", 0.5)
    except WaitTimeoutError:
        pass
    try:
        ccl.barrier()
    except (WaitTimeoutError, CollectiveError) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        ccl.set_timeout(None)
    return "met"


def test_a_workers_own_deadline(start: Any) -> None:
    with start(2) as sess:
        assert sess.call_packed(waits_for_a_slow_one, 30).debug_get_from_all() == ["met"] * 2
        first, second = sess.call_packed(waits_for_a_slow_one, 0.1).debug_get_from_all()
        assert first.startswith("WaitTimeoutError: gave up after 0.1 s waiting for barrier #1")
        assert second.startswith("CollectiveAborted: barrier #1")
        with pytest.raises(WorkerError, match="timeout must be seconds above 0"):
            sess.call_packed(ccl.set_timeout, -1).debug_get_from_all()
        assert sess.call_packed(recovers).debug_get_from_all() == [2.0] * 2
