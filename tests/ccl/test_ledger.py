"""The ledger: what is kept of each call, in which order, and what state it ends in.

First as pure state with workers that never run, then written by real sessions.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl.board.ledger import LENGTH, Ledger, ledger_of
from discolab.ccl.board.rounds import in_order
from discolab.ccl.call import DONE, FAILED, WAITING, Call, Signature
from discolab.ccl.groups import Group
from discolab.engines import ThreadedSession
from discolab.runtime import Worker, WorkerError, current_worker
from discolab.runtime.channel import ThreadChannel

PAIR = Group((0, 1))


def idle_worker(rank: int) -> Worker:
    """A worker without a thread."""
    cpu = torch.device("cpu")
    return Worker(rank, 2, 1, cpu, ThreadChannel(), shared={}, worker_zero_data={})


def call(worker: Worker, number: int, group: Group = PAIR, op: str = "barrier") -> Call:
    made = Call(op, worker, group, Signature(op), ("cell", 1))
    made.number = number
    return made


# -- pure ------------------------------------------------------------------------------------


def test_keeps_the_last_calls_of_each_worker_in_order() -> None:
    ledger = Ledger()
    zero, one = idle_worker(0), idle_worker(1)
    calls = [call(zero, number) for number in range(LENGTH + 3)]
    for entry in calls:
        ledger.enter(entry)
        ledger.validate()
    other = call(one, 0)
    ledger.enter(other)
    assert ledger.story(0) == calls[3:]
    assert ledger.story(1) == [other]
    assert ledger.story(7) == []
    ledger.validate()


def test_clear_forgets_what_is_over_and_keeps_what_waits() -> None:
    ledger = Ledger()
    worker = idle_worker(0)
    calls = [call(worker, number) for number in range(3)]
    for entry in calls:
        ledger.enter(entry)
    calls[0].close(DONE)
    calls[2].close(FAILED)
    ledger.clear()
    assert ledger.story(0) == [calls[1]]
    calls[1].close(DONE)
    ledger.enter(call(worker, 3))
    assert [entry.number for entry in ledger.story(0)] == [1, 3]
    ledger.clear()
    assert [entry.number for entry in ledger.story(0)] == [3]
    ledger.validate()


def test_a_call_ends_once() -> None:
    entry = call(idle_worker(0), 0)
    assert (entry.state, entry.ended) == (WAITING, 0.0)
    entry.close(FAILED)
    ended = entry.ended
    assert ended >= entry.began > 0
    entry.close(DONE)
    assert (entry.state, entry.ended) == (FAILED, ended)


def twice_the_same_number(ledger: Ledger, worker: Worker) -> None:
    ledger.enter(call(worker, 0))
    ledger.enter(call(worker, 0))


def number_left_out(ledger: Ledger, worker: Worker) -> None:
    ledger.enter(call(worker, 0))
    ledger.enter(call(worker, 2))


def back_to_an_earlier_command(ledger: Ledger, worker: Worker) -> None:
    worker.executed = 5
    ledger.enter(call(worker, 0))
    worker.executed = 4
    ledger.enter(call(worker, 0))


def over_but_still_waiting(ledger: Ledger, worker: Worker) -> None:
    entry = call(worker, 0)
    entry.ended = entry.began
    ledger.enter(entry)


def another_workers_call(ledger: Ledger, worker: Worker) -> None:
    entry = call(worker, 0)
    ledger.enter(entry)
    entry.rank = 1


@pytest.mark.parametrize(
    "damage",
    [
        twice_the_same_number,
        number_left_out,
        back_to_an_earlier_command,
        over_but_still_waiting,
        another_workers_call,
    ],
)
def test_validate_finds(damage: Callable[[Ledger, Worker], None]) -> None:
    ledger = Ledger()
    damage(ledger, idle_worker(0))
    with pytest.raises(AssertionError):
        ledger.validate()


def test_validate_counts_each_group_and_tag_apart() -> None:
    ledger = Ledger()
    worker = idle_worker(0)
    for group in (PAIR, Group((0,)), Group((0, 1), "other")):
        ledger.enter(call(worker, 0, group))
    ledger.enter(call(worker, 1))
    worker.executed += 1
    ledger.enter(call(worker, 0))
    ledger.enter(call(worker, -1, op="send"))  # messages are not counted
    ledger.validate()


def test_one_order_for_all_where_they_agree() -> None:
    assert in_order({0: ["a", "c", "d"], 1: ["b", "c"], 2: ["b", "d"]}) == ["a", "b", "c", "d"]
    assert in_order({3: ["z", "a"], 1: ["z", "b", "a"]}) == ["z", "b", "a"]
    assert in_order({}) == []
    crossed = in_order({0: ["a", "b", "c"], 1: ["b", "a", "c"]})
    assert sorted(crossed) == ["a", "b", "c"]
    assert crossed[-1] == "c"


# -- written by sessions ----------------------------------------------------------------------


def rank() -> int:
    return current_worker().rank


def stories(sess: ThreadedSession) -> list[list[tuple[str, str]]]:
    """Operation and state of each call of each worker; the ledger must be sound."""
    workers = sess.workers_here()
    ledger_of(workers[0]).validate()
    return [
        [(entry.name, entry.state) for entry in ledger_of(workers[r]).story(r)] for r in workers
    ]


def fails(sess: ThreadedSession, func: Callable[[], Any]) -> None:
    with pytest.raises(WorkerError):
        sess.call_packed(func).debug_get_from_all()
    sess.sync_all()


def test_no_collective_no_entry(start: Any) -> None:
    with start(2) as sess:
        assert stories(sess) == [[], []]


def three_things() -> None:
    x = torch.ones(4)
    ccl.all_reduce(x)
    if rank() == 0:
        ccl.send(x, 1)
    else:
        ccl.recv(x, 0)
    ccl.barrier(async_op=True).wait()


def test_done(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(three_things)
        sess.sync_all()
        assert stories(sess) == [
            [("all_reduce", DONE), ("send", DONE), ("barrier", DONE)],
            [("all_reduce", DONE), ("recv", DONE), ("barrier", DONE)],
        ]
        entry = ledger_of(sess.workers_here()[0]).story(0)[0]
        assert entry.site is not None
        code, line = entry.site
        assert getattr(code, "co_name", "") == "three_things"
        assert line == three_things.__code__.co_firstlineno + 2
        assert str(entry) == "all_reduce(sum) of float32[4] in workers 0-1"


def other_shape() -> None:
    ccl.barrier()
    ccl.all_gather(torch.ones(2 + rank()))


def one_returns() -> None:
    if rank() == 0:
        ccl.barrier()


def no_sender() -> None:
    if rank() == 0:
        ccl.recv(torch.ones(2), 1)


def out_of_patience() -> None:
    if rank() == 0:
        ccl.barrier(timeout=0.1)
    else:
        time.sleep(0.3)


def test_failed(start: Any) -> None:
    with start(2) as sess:
        fails(sess, other_shape)
        assert stories(sess) == [[("barrier", DONE), ("all_gather", FAILED)]] * 2
        fails(sess, one_returns)
        fails(sess, no_sender)
        fails(sess, out_of_patience)
        first, second = stories(sess)
        assert first[2:] == [("barrier", FAILED), ("recv", FAILED), ("barrier", FAILED)]
        assert len(second) == 2


def refused() -> None:
    ccl.all_reduce(torch.ones(2), "mean of")


def test_a_call_with_bad_arguments_is_not_entered(start: Any) -> None:
    with start(2) as sess:
        fails(sess, refused)
        assert stories(sess) == [[], []]


def one_waits() -> None:
    if rank() == 0:
        ccl.barrier()
    time.sleep(30)


def test_interrupted(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(one_waits)
        while sess.status()[0].state != "waiting":
            time.sleep(0.005)
        assert stories(sess) == [[("barrier", WAITING)], []]
        assert sess.interrupt() == []
        assert stories(sess) == [[("barrier", FAILED)], []]


def forgotten_handle() -> None:
    ccl.all_reduce(torch.ones(4), async_op=True)


def handle_for_nobody() -> None:
    if rank() == 0:
        ccl.barrier(async_op=True)


def test_asynchronous_and_never_waited_for(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(forgotten_handle)
        sess.sync_all()
        assert stories(sess) == [[("all_reduce", DONE)]] * 2
        sess.call_packed(handle_for_nobody)
        sess.sync_all()
        sess.call_packed(forgotten_handle)
        sess.sync_all()
        # nobody can come to it any more, and somebody has looked since
        assert stories(sess)[0] == [("all_reduce", DONE), ("barrier", FAILED), ("all_reduce", DONE)]


def many() -> None:
    for _ in range(300):
        ccl.barrier()


def test_bounded(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(many)
        sess.sync_all()
        assert [len(story) for story in stories(sess)] == [LENGTH, LENGTH]
        numbers = [entry.number for entry in ledger_of(sess.workers_here()[1]).story(1)]
        assert numbers == list(range(300 - LENGTH, 300))
