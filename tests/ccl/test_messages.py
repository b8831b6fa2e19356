"""send and recv: order, copies, other calls, and what is told when they do not fit."""

import re
import threading
import time
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.runtime import ArgumentError, CollectiveError, WaitTimeoutError, current_worker
from discolab.runtime.errors import SessionError

pytestmark = pytest.mark.any_engine


def rank() -> int:
    return current_worker().rank


def in_order() -> list[float]:
    me = rank()
    if me == 0:
        buffer = torch.zeros(3, 4).t()
        for i in range(5):
            buffer.fill_(i)  # send has made a copy already
            ccl.send(buffer, 1)
        return []
    return [float(ccl.recv(torch.zeros(4, 3), 0).mean()) for _ in range(5)]


def test_first_in_first_out(start: Any) -> None:
    with start(2) as sess:
        assert sess.call_packed(in_order).debug_get_from_remote(1) == [0.0, 1.0, 2.0, 3.0, 4.0]


def every_dtype() -> None:
    for dtype in (torch.bool, torch.uint64, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        for shape in ((), (0,), (2, 3)):
            if rank() == 0:
                ccl.send(torch.ones(shape).to(dtype), 1)
            else:
                out = torch.zeros(shape).to(dtype)
                assert ccl.recv(out, 0) is out
                assert bool((out.to(torch.complex64) == 1).all())


def test_dtypes_and_shapes(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(every_dtype).debug_get_from_all()


def send_one(value: float) -> None:
    if rank() == 0:
        ccl.send(torch.tensor([value]), 1)


def recv_one(timeout: float | None = None) -> float | None:
    return float(ccl.recv(torch.zeros(1), 0, timeout=timeout)) if rank() else None


def test_across_calls(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(send_one, 3.0)
        sess.call_packed(send_one, 4.0)
        sess.sync_all()
        assert sess.call_packed(ccl.statistics).debug_get_from_remote(1).messages == 2
        assert sess.call_packed(recv_one).debug_get_from_remote(1) == 3.0
        assert sess.call_packed(recv_one).debug_get_from_remote(1) == 4.0
        later = sess.call_packed(recv_one, 5.0)
        time.sleep(0.2)  # longer than it takes to see that worker 0 is idle
        sess.call_packed(send_one, 5.0)
        assert later.debug_get_from_remote(1) == 5.0


def no_fit() -> list[str]:
    if rank() == 0:
        ccl.send(torch.ones(3), 1)
        ccl.send(torch.ones(4, dtype=torch.int32), 1)
        ccl.send(torch.ones(4), 1)
        return []
    told = []
    for _ in range(2):
        with pytest.raises(CollectiveError) as caught:
            ccl.recv(torch.ones(4), 0)
        told.append(str(caught.value))
    ccl.recv(torch.ones(4), 0)
    return told


def test_other_shape_or_dtype(start: Any) -> None:
    with start(2) as sess:
        first, second = sess.call_packed(no_fit).debug_get_from_remote(1)
    for word in ("recv of float32[4] on worker 1", "worker 0 sent float32[3]", "in no_fit"):
        assert word in first
    assert "worker 0 sent int32[4]" in second


def nobody_sends() -> str:
    if rank() == 0:
        return ""
    with pytest.raises(CollectiveError, match="finished the call without sending") as caught:
        ccl.recv(torch.ones(4), 0)
    assert not caught.value.victim
    with pytest.raises(WaitTimeoutError, match=r"gave up after 0\.1 s"):
        ccl.recv(torch.ones(4), 0, timeout=0.1)
    return str(caught.value)


def test_a_sender_that_is_done(start: Any) -> None:
    with start(2) as sess:
        text = sess.call_packed(nobody_sends).debug_get_from_remote(1)
    assert "recv of float32[4] from worker 0 can't complete" in text


def other_tag(crossed: bool) -> str:
    if rank() == 0:
        ccl.send(torch.ones(4), 1, tag=7)
        if not crossed:
            return ""
    with pytest.raises(CollectiveError) as caught:
        ccl.recv(torch.ones(4), 1 - rank(), tag=8)
    if rank() == 1:
        ccl.recv(torch.ones(4), 0, tag=7)
    return str(caught.value)


@pytest.mark.parametrize("crossed", [False, True])
def test_a_message_with_another_tag_is_told(start: Any, crossed: bool) -> None:
    """Alone, and in a deadlock: to say that nothing was sent would be false."""
    with start(2) as sess:
        text = sess.call_packed(other_tag, crossed).debug_get_from_remote(1)
    assert re.search(
        r"\n  worker 0 has sent worker 1 float32\[4\] with tag 7 at .*other_tag", text
    ), text


def sender_fails() -> bool:
    if rank() == 0:
        raise ValueError("boom")
    with pytest.raises(CollectiveError, match="ValueError: boom") as caught:
        ccl.recv(torch.ones(4), 0)
    return caught.value.victim


def test_a_sender_that_failed(start: Any) -> None:
    with start(2) as sess:
        assert sess.call_packed(sender_fails).debug_get_from_remote(1) is True
        with pytest.raises(Exception, match="boom"):
            sess.sync_all()


def pipeline() -> list[float]:
    """Groups as the stages of a pipeline."""
    x = torch.full((2,), float(rank()))
    if ccl.group() != ccl.new_group([0, 1]):
        ccl.recv_from_prev_group(x)
        x += 10
    if rank() < 4:
        ccl.send_to_next_group(x)
    return x.tolist()


def test_pipeline_of_groups(start: Any) -> None:
    with start(6, 3) as sess:
        got = sess.call_packed(pipeline).debug_get_from_all()
    assert [row[0] for row in got] == [0, 1, 10, 11, 20, 21]


def refused() -> None:
    x = torch.ones(4)
    for call, words in (
        (lambda: ccl.send(x, 0), "this worker itself"),
        (lambda: ccl.recv(x, 0), "this worker itself"),
        (lambda: ccl.send(x, 2), "out of range"),
        (lambda: ccl.send([1], 1), "must be a tensor"),
        (lambda: ccl.send(x, "1"), "must be a rank"),
        (lambda: ccl.recv(x.expand(3, 4), 1), "share memory"),
        (lambda: ccl.recv(x, 1, timeout=-1), "timeout"),
        (lambda: ccl.recv_from_prev_group(x), "first group"),
        (lambda: ccl.all_reduce(x, "mean"), "unknown op"),
        (lambda: ccl.all_reduce(x, out=torch.ones(3)), r"float32\[4\]"),
        (lambda: ccl.all_reduce(x, out=x.double()), "float64"),
        (lambda: ccl.all_reduce(x.to_sparse()), "dense"),
        (lambda: ccl.all_reduce(x.to("meta")), "meta"),
        (lambda: ccl.all_reduce(x.bool(), "avg"), "avg"),
        (lambda: ccl.all_reduce(x.cfloat(), "max"), "no order"),
        (lambda: ccl.all_reduce(x, group=0), "list of ranks"),
        (lambda: ccl.all_reduce(x, group="all"), "world"),
        (lambda: ccl.all_reduce(x, group=[0, 0]), "twice"),
        (lambda: ccl.all_reduce(x, group=[1]), "not in the group"),
        (lambda: ccl.all_reduce(x, group=[0, 5]), "out of range"),
        (lambda: ccl.new_group([]), "at least one"),
        (lambda: ccl.broadcast(x, 1), "index into the group"),
        (lambda: ccl.scatter(torch.ones(())), "equal parts"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def refused_on_worker_0() -> None:
    if rank() == 0:
        refused()


def test_arguments(start: Any) -> None:
    with start(2, 2) as sess:
        sess.call_packed(refused_on_worker_0).debug_get_from_all()


def on_other_thread() -> str:
    caught: list[str] = []

    def body() -> None:
        try:
            ccl.barrier()
        except SessionError as exc:
            caught.append(str(exc))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(5)
    return caught[0]


def test_only_on_the_workers_own_thread(start: Any) -> None:
    with start(1) as sess:
        assert "own thread" in sess.call_packed(on_other_thread).debug_get_from_remote(0)
    with pytest.raises(SessionError, match="no worker"):
        ccl.barrier()
