"""Interrupts that land anywhere in a collective, and many collectives at once."""

import threading
import time
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.engines import ThreadedSession
from discolab.runtime import WorkerError, current_worker

# the exception of an interrupt may land in a callback of the garbage collector or of a weak
# reference, where Python drops it; then it is sent again
pytestmark = [pytest.mark.usefixtures("drops_exceptions"), pytest.mark.any_engine]


def rank() -> int:
    return current_worker().rank


def fine() -> float:
    """A collective that works: the session is usable after what came before."""
    return ccl.all_reduce(torch.ones(3), group="world").sum().item()


def waits_for_ever() -> None:
    if rank() == 0:
        while True:
            time.sleep(1)
    ccl.all_reduce(torch.ones(4))


def spins() -> None:
    """Collectives without end, so that the interrupt lands anywhere in them."""
    while True:
        ccl.send(torch.ones(2), (rank() + 1) % current_worker().num_workers)
        ccl.recv(torch.zeros(2), (rank() - 1) % current_worker().num_workers)
        ccl.all_reduce(torch.ones(16))
        ccl.broadcast(torch.ones(4), 1)


def test_interrupt_while_waiting(start: Any) -> None:
    with start(4) as sess:
        for _ in range(5):
            ref = sess.call_packed(waits_for_ever)
            time.sleep(0.05)
            assert any("all_reduce #1" in str(status) for status in sess.status())
            began = time.monotonic()
            assert sess.interrupt() == []
            assert time.monotonic() - began < 8
            with pytest.raises(WorkerError):
                ref.debug_get_from_all()
            assert sess.call_packed(fine).debug_get_from_all() == [12.0] * 4


def test_interrupt_lands_anywhere(start: Any) -> None:
    with start(3) as sess:
        for turn in range(50):
            ref = sess.call_packed(spins)
            time.sleep(0.002 + 0.0007 * (turn % 7))
            assert sess.interrupt() == []
            assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3
            del ref


def sends_only() -> None:
    if rank() == 0:
        ccl.send(torch.full((1,), 7.0), 1)
    else:
        time.sleep(100)


def receives() -> float:
    if rank() == 0:
        ccl.send(torch.full((1,), 8.0), 1)
        return 0.0
    return float(ccl.recv(torch.zeros(1), 0))


def test_an_interrupt_drops_what_was_sent(start: Any) -> None:
    with start(2) as sess:
        sess.call_packed(sends_only)
        time.sleep(0.05)
        assert sess.interrupt() == []
        assert sess.call_packed(receives).debug_get_from_all() == [0.0, 8.0]


def test_shutdown_with_workers_in_a_collective() -> None:
    sess = ThreadedSession(4, devices="cpu", timeout=10)
    sess.call_packed(waits_for_ever)
    time.sleep(0.02)
    began = time.monotonic()
    sess.shutdown(cancel=True)
    assert time.monotonic() - began < 8


def storm(turns: int) -> float:
    me, n = rank(), current_worker().num_workers
    total = 0.0
    for turn in range(turns):
        total += float(ccl.all_reduce(torch.full((3,), float(turn)))[0])
        ccl.send(torch.full((2,), float(turn)), (me + 1) % n)
        total += float(ccl.recv(torch.zeros(2), (me - 1) % n)[1])
        total += float(ccl.all_gather(torch.tensor([float(me)]), group="world").sum())
        ccl.barrier()
    return total


def expected_storm(turns: int, size: int, n: int) -> float:
    return sum(turn * size + turn + n * (n - 1) / 2 for turn in range(turns))


@pytest.mark.slow
def test_storm(start: Any) -> None:
    with start(4, 2) as sess:
        for _ in range(50):
            refs = [sess.call_packed(storm, 5) for _ in range(2)]
            for ref in refs:
                assert ref.debug_get_from_all() == [expected_storm(5, 2, 4)] * 4


def test_two_sessions_at_once(start: Any) -> None:
    wrong: list[Any] = []

    def drive(sess: ThreadedSession) -> None:
        n = sess.num_workers
        for _ in range(10):
            got = sess.call_packed(storm, 5).debug_get_from_all()
            if got != [expected_storm(5, n, n)] * n:
                wrong.append(got)

    with start(2) as one, start(3) as two:
        threads = [threading.Thread(target=drive, args=(sess,)) for sess in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
