"""Collectives that were started and can't end: who is told what, when, and what is left then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl.board.ledger import ledger_of
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
    return float(ccl.all_reduce(torch.ones(()), group="world"))


def told(sess: ThreadedSession, func: Callable[..., Any], *args: Any) -> dict[int, Failure]:
    """Run what fails; by rank, and the session must be usable after it."""
    ref = sess.call_packed(func, *args)
    with pytest.raises(WorkerError) as caught:
        ref.debug_get_from_all()
    sess.sync_all()
    assert sess.call_packed(fine).debug_get_from_all() == [sess.num_workers] * sess.num_workers
    sess.call_packed(lambda: ledger_of(current_worker()).validate()).debug_get_from_all()
    return {failure.rank: failure for failure in caught.value.failures}


# -- one that never comes ---------------------------------------------------------------------


def one_stays_away(how: str) -> Any:
    if rank() == 1 and how == "raises":
        raise ValueError("boom")
    if rank() == 1:
        return None
    work = ccl.all_reduce(torch.ones(2), async_op=True)
    return work if how in ("later", "raises") else work.wait()


def told_twice(work: ccl.Work) -> None:
    if rank() == 1:
        return
    with pytest.raises(CollectiveError) as first:
        work.wait()
    assert work.done()
    with pytest.raises(CollectiveError) as second:
        work.wait()
    assert str(first.value) == str(second.value)
    raise first.value


@pytest.mark.parametrize("how", ["at once", "later"])
def test_all_but_one(start: Any, how: str) -> None:
    with start(3) as sess:
        if how == "at once":
            failures = told(sess, one_stays_away, how)
        else:
            work = sess.call_packed(one_stays_away, how)
            sess.sync_all()
            failures = told(sess, told_twice, work)
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        assert (failure.type_name, failure.victim) == ("CollectiveError", False)
        assert "worker 1: finished the call without it" in failure.message
        assert "workers 0, 2: called all_reduce(sum) of float32[2]" in failure.message


def waits_for(work: ccl.Work | None) -> Any:
    return work.wait() if work is not None else None


@pytest.mark.one_process
def test_the_cause_is_known_in_a_later_call(start: Any) -> None:
    """The member failed in the call of the collective, not in that of the wait."""
    with start(3) as sess:
        kept: dict[int, ccl.Work] = {}

        def keep() -> None:
            if rank() == 1:
                raise ValueError("boom")
            kept[rank()] = ccl.all_reduce(torch.ones(2), async_op=True)

        told_first = told(sess, keep)
        assert [f.type_name for f in told_first.values()] == ["ValueError"]
        failures = told(sess, lambda: waits_for(kept.get(rank())))
        kept.clear()
    assert sorted(failures) == [0, 2]
    for failure in failures.values():
        assert failure.victim
        assert "worker 1: failed: ValueError: boom" in failure.message


def starts_and_forgets() -> None:
    if rank() != 1:
        ccl.all_reduce(torch.ones(2), async_op=True)


def test_what_nobody_waits_for_leaves_nothing(start: Any) -> None:
    """The tensors of a collective that can't complete are let go; `start` looks for them."""
    with start(3) as sess:
        for _ in range(5):
            sess.call_packed(starts_and_forgets)
        sess.sync_all()
        assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3


def say_gave_up(gave_up: Path) -> None:
    """Let worker 0 go on, by other means than a message: it would be a deadlock until then."""
    (gave_up / str(rank())).touch()


def until_gave_up(gave_up: Path, count: int) -> None:
    def all_have() -> bool:
        return len(list(gave_up.iterdir())) == count

    current_worker().wait_for(all_have, "the others to give up", 10)


def times_out(gave_up: Path) -> list[str]:
    """Worker 0 comes when the others have given up."""
    if rank() == 0:
        until_gave_up(gave_up, 2)
        work = ccl.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(CollectiveError, match=r"gave up after 0\.05 s"):
            work.wait()
        return []
    work = ccl.all_reduce(torch.ones(1), async_op=True)
    texts = []
    for _ in range(2):
        with pytest.raises((WaitTimeoutError, CollectiveError)) as caught:
            work.wait(timeout=0.05)
        texts.append(str(caught.value))
    say_gave_up(gave_up)
    return texts


def test_a_wait_with_a_timeout(start: Any, tmp_path: Path) -> None:
    with start(3) as sess:
        _, *others = sess.call_packed(lambda: times_out(tmp_path)).debug_get_from_all()
        assert all("gave up after 0.05 s" in text for texts in others for text in texts)
        assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3


def gives_up_on_the_last(gave_up: Path) -> list[float]:
    """Worker 1 gives up on its third reception; the first two get what is sent first."""
    if rank() == 0:
        until_gave_up(gave_up, 1)
        for number in range(4):
            ccl.send(torch.tensor([float(number)]), 1)
        return []
    works = [ccl.irecv(torch.zeros(1), 0) for _ in range(4)]
    for _ in range(2):
        with pytest.raises(WaitTimeoutError, match=r"gave up after 0\.05 s"):
            works[2].wait(timeout=0.05)
    say_gave_up(gave_up)
    got = [float(works[place].wait()) for place in (3, 0, 1)]
    return [*got, float(ccl.recv(torch.zeros(1), 0))]


def test_who_gives_up_leaves_the_line(start: Any, tmp_path: Path) -> None:
    with start(2) as sess:
        got = sess.call_packed(lambda: gives_up_on_the_last(tmp_path)).debug_get_from_remote(1)
    assert got == [2.0, 0.0, 1.0, 3.0]


def deadlock_after_one_has_gone() -> None:
    """Worker 2 has done its part of the first collective and ended; 0 and 1 block each other."""
    if rank() == 0:
        ccl.all_reduce(torch.ones(1))
    elif rank() == 1:
        ccl.recv(torch.ones(1), 0)
    else:
        ccl.all_reduce(torch.ones(1), async_op=True)


def test_a_deadlock_beside_one_who_has_done_its_part(start: Any) -> None:
    with start(3) as sess:
        failures = told(sess, deadlock_after_one_has_gone)
        assert sorted(failures) == [0, 1]
        for failure in failures.values():
            assert "deadlock" in failure.message
            assert "worker 1: waiting in recv of float32[1] from worker 0" in failure.message


def waits_twice() -> None:
    """Worker 0 has started the first and waits for the second: what it waits for is told."""
    first, second = ccl.Group((0, 1, 2), "first"), ccl.Group((0, 1), "second")
    if rank() == 0:
        ccl.barrier(group=first, async_op=True)
        ccl.barrier(group=second)
    elif rank() == 1:
        ccl.barrier(group=first)
    else:
        ccl.recv(torch.zeros(1), 0)


def test_a_deadlock_tells_what_each_waits_for(start: Any) -> None:
    with start(3) as sess:
        failures = told(sess, waits_twice)
    assert sorted(failures) == [0, 1, 2]
    for failure in failures.values():
        assert "worker 0: waiting in barrier #1 in workers 0-1" in failure.message
        assert "worker 1: waiting in barrier #1 in workers 0-2" in failure.message


# -- messages that never come -----------------------------------------------------------------


def stuck_from_anybody(how: str) -> None:
    """Worker 0 sends nothing, 1 waits for 2, and 2 for any of them."""
    if rank() == 0 and how == "raises":
        raise ValueError("boom")
    if rank() == 1 and how == "recv":
        ccl.recv(torch.zeros(1), 2)
    elif rank() == 1:
        ccl.barrier(group=[1, 2])
    elif rank() == 2:
        ccl.recv(torch.zeros(1))


@pytest.mark.parametrize("how", ["recv", "barrier", "raises"])
def test_nobody_is_left_who_could_send(start: Any, how: str) -> None:
    with start(3) as sess:
        failures = told(sess, stuck_from_anybody, how)
    causes = [failure.rank for failure in failures.values() if not failure.victim]
    assert causes == ([0] if how == "raises" else [2])
    text = failures[2].message
    assert "recv of float32[1] from any worker can't complete" in text
    zero = "failed: ValueError: boom" if how == "raises" else "finished the call without sending"
    assert f"worker 0: {zero}" in text
    assert "worker 1: waiting in " in text


def sends_and_fails() -> None:
    if rank() == 0:
        ccl.send(torch.ones(1), 1)
        raise ValueError("boom")


def polls_after_a_failure() -> bool:
    """The only message is void: `done` says so at once, though worker 0 sends another later."""
    if rank() == 0:
        ccl.recv(torch.zeros(1), 1)
        ccl.send(torch.full((1,), 7.0), 1)
        return True
    work = ccl.irecv(torch.zeros(1), 0)
    before = work.done()
    ccl.send(torch.ones(1), 0)
    return not before and float(work.wait()) == 7.0


def test_done_does_not_wait_for_a_void_message(start: Any) -> None:
    with start(2) as sess:
        for _ in range(5):
            ref = sess.call_packed(sends_and_fails)
            with pytest.raises(WorkerError, match="boom"):
                sess.sync_all()
            del ref
            got = sess.call_packed(polls_after_a_failure).debug_get_from_all()
            assert got == [True, True]


def starts_and_fails() -> None:
    if rank() == 1:
        ccl.irecv(torch.zeros(1), 0)
        raise ValueError("boom")


def boom() -> None:
    raise ValueError("boom")


def gets(value: float) -> float | None:
    if rank() == 0:
        ccl.send(torch.tensor([value]), 1)
        return None
    return float(ccl.recv(torch.zeros(1), 0))


@pytest.mark.parametrize("more", [0, 20])
def test_a_failed_call_takes_no_later_message(start: Any, more: int) -> None:
    """Not even when so many calls have failed since that nobody remembers it."""
    with start(2) as sess:
        for func in [starts_and_fails] + [boom] * more:
            ref = sess.call_packed(func)
            with pytest.raises(WorkerError):
                sess.sync_all()
            del ref
        assert sess.call_packed(gets, 5.0).debug_get_from_remote(1) == 5.0
