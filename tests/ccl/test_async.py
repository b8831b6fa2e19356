"""Collectives that are started now and waited for later: in any order, in another call, never."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl.backends import jobs
from discolab.runtime import Failure, SessionError, WorkerError, current_worker

pytestmark = pytest.mark.any_engine


def rank() -> int:
    return current_worker().rank


def fine() -> float:
    """A collective that works: the session is usable after what came before."""
    return float(ccl.all_reduce(torch.ones(()), group="world"))


# -- order ------------------------------------------------------------------------------------


def start_all() -> tuple[list[ccl.Work], list[torch.Tensor | None]]:
    """One of each collective, and what they must give; rank r holds r in each element."""
    me, n = rank(), current_worker().num_workers
    x, total = torch.full((n,), float(me)), n * (n - 1) / 2
    everybody = torch.arange(n).float()
    out = torch.zeros(n)
    works = [
        ccl.all_reduce(x.clone(), async_op=True),
        ccl.all_gather(x[:1], async_op=True),
        ccl.reduce_scatter(x, "max", async_op=True),
        ccl.broadcast(x, 1, async_op=True, out=out),
        ccl.scatter(everybody, 0, out=torch.zeros(1), async_op=True),
        ccl.gather(x[:1], 1, async_op=True),
        ccl.reduce(x, 0, "sum", async_op=True),
        ccl.all_to_all(x, async_op=True),
        ccl.barrier(async_op=True),
        ccl.all_reduce_(x, "prod", async_op=True),
    ]
    want = [
        torch.full((n,), total),
        everybody,
        torch.tensor([n - 1.0]),
        torch.ones(n),
        torch.tensor([float(me)]),
        everybody if me == 1 else None,
        torch.full((n,), total) if me == 0 else None,
        everybody,
        None,
        torch.zeros(n),
    ]
    return works, want


def check_waited(works: list[Any], want: list[Any], order: list[int]) -> None:
    for place in order:
        assert isinstance(works[place], ccl.Work)
        got = works[place].wait()
        assert works[place].done()
        assert works[place].wait() is got
        assert (got is None) == (want[place] is None), place
        assert got is None or torch.equal(got, want[place]), place


def waited(how: str) -> None:
    works, want = start_all()
    places = list(range(len(works)))
    orders = {
        "forwards": places,
        "backwards": places[::-1],
        "each otherwise": places[rank() :] + places[: rank()],
        "some": places[rank() :: 3],
    }
    check_waited(works, want, orders[how])


@pytest.mark.parametrize("block", [jobs.BLOCK, 8], ids=["whole", "blocks"])
@pytest.mark.parametrize("how", ["forwards", "backwards", "each otherwise", "some"])
def test_waited_in_any_order(
    start: Any, how: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    with start(4) as sess:
        for _ in range(5):
            sess.call_packed(waited, how).debug_get_from_all()


def started_and_kept() -> Any:
    return start_all()


def finished_later(kept: tuple[list[Any], list[Any]]) -> None:
    works, want = kept
    check_waited(works, want, list(range(len(works)))[:: 1 - 2 * (rank() % 2)])


def test_waited_in_a_later_call(start: Any) -> None:
    with start(3) as sess:
        kept = sess.call_packed(lambda: tuple(started_and_kept()))
        for _ in range(3):  # what is over stays so
            assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3
            sess.call_packed(lambda pair: finished_later(pair), kept).debug_get_from_all()


def never_waited() -> bool:
    out = torch.zeros(3)
    work = ccl.all_reduce(torch.ones(3), out=out, async_op=True)
    ccl.barrier()  # all have started it, so it is done
    return work.done() and out.tolist() == [current_worker().num_workers] * 3


def test_never_waited(start: Any) -> None:
    with start(4) as sess:
        assert sess.call_packed(never_waited).debug_get_from_all() == [True] * 4


def polls() -> bool:
    """Worker 0 starts its part only when the others have seen that it is not over."""
    x, others = torch.ones(2), range(1, current_worker().num_workers)
    if rank() == 0:
        for other in others:
            ccl.recv(torch.zeros(1), other)
        return float(ccl.all_reduce(x)[0]) == 3.0
    work = ccl.all_reduce(x, async_op=True)
    before = work.done()
    assert "not over" in repr(work)
    ccl.send(torch.zeros(1), 0)
    while not work.done():
        time.sleep(0)
    return not before and float(work.wait()[0]) == 3.0


def test_done_never_waits(start: Any) -> None:
    with start(3) as sess:
        for _ in range(10):
            assert sess.call_packed(polls).debug_get_from_all() == [True] * 3


def on_another_thread() -> str:
    works = [ccl.barrier(group=[0, 1], async_op=True)] if rank() == 0 else []
    works.append(ccl.irecv(torch.zeros(1), 1 - rank()))
    caught: list[str] = []

    def wait(work: ccl.Work) -> None:
        try:
            work.wait()
        except SessionError as exc:
            caught.append(str(exc))

    for work in works:
        thread = threading.Thread(target=wait, args=(work,))
        thread.start()
        thread.join(5)
    if rank() == 1:
        ccl.recv(torch.zeros(1), 0, tag=1)  # or the barrier is over before anybody waits for it
        ccl.barrier(group=[0, 1])
    else:
        ccl.send(torch.ones(1), 1, tag=1)
    ccl.send(torch.ones(1), 1 - rank())
    for work in works:
        work.wait()
    return f"{len(caught)} of {len(works)}, {caught[-1]}"


def test_waited_on_the_workers_own_thread_only(start: Any) -> None:
    with start(2) as sess:
        first, second = sess.call_packed(on_another_thread).debug_get_from_all()
    assert first.startswith("2 of 2")
    assert second.startswith("1 of 1")
    assert "own thread" in first


# -- two groups at once -----------------------------------------------------------------------


def crossed(tags: tuple[str, str]) -> list[float]:
    """Two collectives of the same workers, started in another order on odd ranks."""
    groups = [ccl.Group(tuple(range(current_worker().num_workers)), tag) for tag in tags]
    ways = [
        lambda: ccl.all_reduce(torch.ones(2), group=groups[0], async_op=True),
        lambda: ccl.all_reduce(torch.ones(3), "max", group=groups[1], async_op=True),
    ]
    order = (0, 1) if rank() % 2 else (1, 0)
    works = {place: ways[place]() for place in order}
    return [float(works[place].wait().sum()) for place in (0, 1)]


def test_tags_keep_collectives_apart(start: Any) -> None:
    with start(4) as sess:
        for tags in (("a", "b"), ("", "b")):
            assert sess.call_packed(crossed, tags).debug_get_from_all() == [[8.0, 3.0]] * 4
        for failure in sess.peek(sess.call_packed(crossed, ("a", "a"))).values():
            assert isinstance(failure, Failure)
            assert failure.type_name == "CollectiveError"
            assert "members disagree on the reduction and the shape" in failure.message
            called = re.findall(
                r"workers? (\d)(?:, (\d))?: called (all_reduce\(\w+\))", failure.message
            )
            sides = {kind: {int(n) % 2 for n in ranks if n} for *ranks, kind in called}
            assert sides in (  # of those that had come to it by then
                {"all_reduce(sum)": {0}, "all_reduce(max)": {1}},
                {"all_reduce(sum)": {1}, "all_reduce(max)": {0}},
            )
        with pytest.raises(WorkerError):
            sess.sync_all()


def mixed_with_sync() -> list[float]:
    """Pairs and world, waited for across one another."""
    pair = [rank() & ~1, rank() | 1]
    one = ccl.all_reduce(torch.ones(1), group=pair, async_op=True)
    two = float(ccl.all_reduce(torch.ones(1), group="world"))
    three = ccl.all_gather(torch.tensor([rank()]), group=pair, async_op=True)
    four = ccl.barrier(group="world", async_op=True)
    five = float(ccl.broadcast(torch.tensor(float(rank())), 1, group=pair))
    four.wait()
    return [float(one.wait()), two, float(three.wait().sum() - 2 * pair[0]), five - pair[0]]


def test_sync_and_async_on_two_groups(start: Any) -> None:
    with start(4) as sess:
        for _ in range(20):
            got = sess.call_packed(mixed_with_sync).debug_get_from_all()
            assert got == [[2.0, 4.0, 1.0, 1.0]] * 4


# -- messages ---------------------------------------------------------------------------------


def received_before_sent(count: int) -> list[float]:
    """Receptions are started before anything is sent, and waited for backwards."""
    if rank() == 0:
        ccl.recv(torch.zeros(1), 1)
        for number in range(count):
            ccl.isend(torch.full((2,), float(number)), 1).wait()
        return []
    outs = [torch.full((2,), -1.0) for _ in range(count)]
    works = [ccl.irecv(out, 0) for out in outs]
    assert not any(work.done() for work in works)
    ccl.send(torch.zeros(1), 0)
    for place in reversed(range(count)):
        assert works[place].wait() is outs[place]
    return [float(out[0]) for out in outs]


def test_many_receptions_from_one_peer(start: Any) -> None:
    with start(2) as sess:
        for _ in range(10):
            got = sess.call_packed(received_before_sent, 6).debug_get_from_remote(1)
            assert got == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def by_tag() -> list[float]:
    if rank() > 1:
        return []
    if rank() == 0:
        for tag in (3, 1, 2, 1):
            ccl.send(torch.tensor([float(tag)]), 1, tag=tag)
        return []
    works = [ccl.irecv(torch.zeros(1), 0, tag=tag) for tag in (1, 2, 3)]
    return [float(work.wait()) for work in works] + [float(ccl.recv(torch.zeros(1), 0, tag=1))]


def from_anybody(laters: bool) -> list[int]:
    """Worker 0 gets one number of each other; of worker 3 by name."""
    me, n = rank(), current_worker().num_workers
    if me:
        ccl.send(torch.tensor([me]), 0)
        return []
    by_name = ccl.irecv(torch.zeros(1, dtype=torch.int64), 3)
    if not laters:
        by_name.wait()
    outs = [torch.zeros(1, dtype=torch.int64) for _ in range(n - 2 if not laters else 0)]
    works = [ccl.irecv(out) for out in outs]
    for work in reversed(works):
        work.wait()
    if laters:
        by_name.wait()
        outs = [ccl.recv(torch.zeros(1, dtype=torch.int64)) for _ in range(n - 2)]
    return sorted(int(out) for out in outs)


def test_tags_and_any_source(start: Any) -> None:
    with start(4) as sess:
        assert sess.call_packed(by_tag).debug_get_from_remote(1) == [1.0, 2.0, 3.0, 1.0]
        for laters in (False, True):
            got = sess.call_packed(from_anybody, laters).debug_get_from_remote(0)
            assert got == [1, 2]
