"""A call that fails by a fault of its own takes none of its neighbours with it."""

import time
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.runtime import Failure, WorkerError, current_worker


class Planted(Exception):
    pass


def leaves_early() -> None:
    """Worker 1 forgets a barrier, and is in the next call before worker 2 has come to it."""
    me = current_worker().rank
    if me == 1:
        time.sleep(0.03)
    if me == 2:
        time.sleep(0.045)
        ccl.barrier(group=[1, 2])


def forgets_to_send() -> None:
    if current_worker().rank == 2:
        ccl.recv(torch.zeros(1), 1)


def waits_for_one_who_failed() -> None:
    if current_worker().rank == 1:
        raise Planted
    if current_worker().rank == 2:
        time.sleep(0.045)
        ccl.recv(torch.zeros(1), 1, timeout=5)


def clean() -> float:
    return float(ccl.all_reduce(torch.ones(())))


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("func", "ranks", "words"),
    [
        (leaves_early, [2], "worker 1: finished the call without it"),
        (forgets_to_send, [2], "workers 0-1: has left this call, and in a later one is waiting"),
        (waits_for_one_who_failed, [1, 2], "worker 1 failed: Planted"),
    ],
)
def test_the_next_call_does_not_fail_with_this_one(
    start: Any, func: Any, ranks: list[int], words: str
) -> None:
    with start(3) as sess:
        for _ in range(8):
            faulty, fine = sess.call_packed(func), sess.call_packed(clean)
            assert fine.debug_get_from_all() == [3.0] * 3
            failures = {r: f for r, f in sess.peek(faulty).items() if isinstance(f, Failure)}
            assert sorted(failures) == ranks
            assert words in failures[2].message
            with pytest.raises(WorkerError):
                sess.sync_all()
