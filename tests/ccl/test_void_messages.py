"""What a failed call has sent and nobody received is void; all other messages stay."""

import time
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.engines import ThreadedSession
from discolab.runtime import CollectiveError, WorkerError, current_worker

pytestmark = pytest.mark.any_engine


def rank() -> int:
    return current_worker().rank


def fails(sess: ThreadedSession, func: Any, *args: Any) -> dict[int, str]:
    """Run what fails; what is told, by rank."""
    ref = sess.call_packed(func, *args)
    with pytest.raises(WorkerError) as caught:
        ref.debug_get_from_all()
    return {failure.rank: failure.message for failure in caught.value.failures}


def messages(sess: ThreadedSession) -> int:
    count: int = sess.call_packed(ccl.statistics).debug_get_from_remote(0).messages
    return count


def step(value: float, fail: int = -1, nap: int = -1) -> float | None:
    """Worker 0 sends twice, 1 receives; `fail` raises when half is done, `nap` is late."""
    got = None
    for turn in range(2):
        if rank() == nap:
            time.sleep(0.02)
        if rank() == 0:
            ccl.send(torch.tensor([value + turn / 2]), 1)
        elif turn == 0 or fail != 1:
            got = float(ccl.recv(torch.zeros(1), 0))
        if rank() == fail and turn == 0:
            raise ValueError("boom")
    return got


@pytest.mark.parametrize("nap", [0, 1])
def test_a_receiver_that_failed_leaves_nothing(start: Any, nap: int) -> None:
    with start(2) as sess:
        for turn in range(5):
            refs = [sess.call_packed(step, turn, 1, nap)]
            refs += [sess.call_packed(step, turn + i) for i in (1, 2)]
            assert [ref.debug_get_from_remote(1) for ref in refs[1:]] == [turn + 1.5, turn + 2.5]
            with pytest.raises(WorkerError, match="boom"):
                sess.sync_all()
        assert messages(sess) == 0


@pytest.mark.parametrize("nap", [0, 1])
def test_a_sender_that_failed_leaves_nothing(start: Any, nap: int) -> None:
    with start(2) as sess:
        for turn in range(5):
            refs = [sess.call_packed(step, turn, 0, nap)]
            refs += [sess.call_packed(step, turn + i) for i in (1, 2)]
            assert [ref.debug_get_from_remote(1) for ref in refs[1:]] == [turn + 1.5, turn + 2.5]
            with pytest.raises(WorkerError, match="worker 0 failed: ValueError: boom") as caught:
                refs[0].debug_get_from_remote(1)
            assert caught.value.failures[0].victim
            with pytest.raises(WorkerError, match="boom"):
                sess.sync_all()


def sends_and_fails() -> bool:
    if rank() == 0:
        ccl.send(torch.ones(1), 1)
        raise ValueError("boom")
    time.sleep(0.1)
    with pytest.raises(CollectiveError, match="worker 0 failed: ValueError: boom") as caught:
        ccl.recv(torch.zeros(1), 0, timeout=10)
    return caught.value.victim


def test_a_late_recv_learns_that_the_sender_failed(start: Any) -> None:
    with start(2) as sess:
        ref = sess.call_packed(sends_and_fails)
        assert ref.debug_get_from_remote(1) is True
        with pytest.raises(WorkerError, match="boom"):
            sess.sync_all()


def sends(value: float, fail: int = -1) -> None:
    if rank() == 0:
        ccl.send(torch.tensor([value]), 1)
    if rank() == fail:
        raise ValueError("boom")


def receives(timeout: float | None = None) -> float | None:
    return float(ccl.recv(torch.zeros(1), 0, timeout=timeout)) if rank() else None


@pytest.mark.parametrize("timeout", [None, 0.1])
@pytest.mark.parametrize("fail", [0, 1])
def test_a_recv_without_a_message_tells_what_was_dropped(
    start: Any, fail: int, timeout: float | None
) -> None:
    with start(2) as sess:
        fails(sess, sends, 1.0, fail)
        told = fails(sess, receives, timeout)[1]
        assert "a message that worker 0 sent at " in told
        assert f"was dropped, because that call failed on worker {fail}" in told
        sess.call_packed(sends, 2.0)
        assert sess.call_packed(receives).debug_get_from_remote(1) == 2.0
        assert "dropped" not in fails(sess, receives)[1]


def boom(where: int = -1) -> None:
    if where in (-1, rank()):
        raise ValueError("boom")


def test_a_failure_between_leaves_messages_of_other_calls(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(sends, 1.0)
        fails(sess, boom)
        sess.call_packed(sends, 2.0)
        fails(sess, sends, 3.0, 1)
        sess.call_packed(sends, 4.0)
        got = [sess.call_packed(receives).debug_get_from_remote(1) for _ in range(3)]
        assert got == [1.0, 2.0, 4.0]


def test_a_message_from_before_what_is_remembered(start: Any) -> None:
    """Too many failures to know whether the message is void: told, not guessed."""
    with start(2) as sess:
        sess.call_packed(sends, 1.0)
        for _ in range(20):
            fails(sess, boom, 1)
        told = fails(sess, receives)[1]
        assert "sent too long ago" in told
        assert "(the message is used up)" in told
        sess.call_packed(sends, 2.0)
        assert sess.call_packed(receives).debug_get_from_remote(1) == 2.0


def test_a_send_that_the_session_calls_itself(start: Any) -> None:
    """It fails where there is no such peer; what the others sent is for the next call."""
    with start(3) as sess:
        assert "this worker itself" in fails(sess, ccl.send, torch.ones(2), 2)[2]

        def collect() -> float:
            if rank() != 2:
                return 0.0
            return sum(float(ccl.recv(torch.zeros(2), src).sum()) for src in (0, 1))

        assert sess.call_packed(collect).debug_get_from_all() == [0.0, 0.0, 4.0]
