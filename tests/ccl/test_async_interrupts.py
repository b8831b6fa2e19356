"""Interrupts of what was started and is waited for, in every way to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl.backends import jobs
from discolab.engines import ThreadedSession
from discolab.runtime import CollectiveError, WorkerError, current_worker

# the exception of an interrupt may land in a callback of the garbage collector or of a weak
# reference, where Python drops it; then it is sent again
pytestmark = [pytest.mark.usefixtures("drops_exceptions"), pytest.mark.any_engine]


def rank() -> int:
    return current_worker().rank


def fine() -> float:
    """A collective that works: the session is usable after what came before."""
    return float(ccl.all_reduce(torch.ones(()), group="world"))


def stuck_in(what: str) -> None:
    """Worker 0 is busy for ever, the others wait for it in some way."""
    if rank() == 0:
        while True:
            time.sleep(0.01)
    x = torch.ones(3)
    ways: dict[str, Callable[[], Any]] = {
        "wait": lambda: ccl.all_reduce(x, async_op=True).wait(),
        "sync": lambda: ccl.all_gather(x),
        "list": lambda: ccl.all_to_all([x, x, x]),
        "coalesced": lambda: ccl.reduce_scatter_coalesced([x, x]),
        "barrier": ccl.barrier,
        "recv": lambda: ccl.recv(x, 0),
        "irecv": lambda: [ccl.irecv(x, 0), ccl.irecv(x, 0)][1].wait(),
        "any": lambda: ccl.recv(x),
        "timeout": lambda: ccl.recv(x, 0, timeout=100),
    }
    if what == "polling":
        work = ccl.all_reduce(x, async_op=True)
        while not work.done():
            pass
        ways[what] = work.wait  # it has failed, because another worker was stopped first
    ways[what]()


WAYS = ["wait", "sync", "list", "coalesced", "barrier", "recv", "irecv", "any", "timeout"]


def until_stuck(sess: ThreadedSession, polling: bool) -> None:
    deadline = time.monotonic() + 5
    wanted = "running" if polling else "waiting"
    while not all(status.state == wanted for status in sess.status()[1:]):
        assert time.monotonic() < deadline, sess.status()
        time.sleep(0.001)


@pytest.mark.parametrize("what", [*WAYS, "polling"])
def test_interrupt(start: Any, what: str) -> None:
    with start(3) as sess:
        for _ in range(3):
            ref = sess.call_packed(stuck_in, what)
            until_stuck(sess, what == "polling")
            late: list[list[int]] = []
            thread = threading.Thread(target=lambda late=late: late.append(sess.interrupt()))
            began = time.monotonic()
            thread.start()
            with pytest.raises(WorkerError) as caught:
                ref.debug_get_from_all()
            thread.join(10)
            assert time.monotonic() - began < 8
            assert late == [[]]
            assert all(failure.interrupted for failure in caught.value.failures)
            assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3


def spins(block: int) -> None:
    """Started and waited for without end, so that the interrupt lands anywhere."""
    me, n = rank(), current_worker().num_workers
    x = torch.ones(block)
    while True:
        one = ccl.irecv(torch.zeros(2), (me - 1) % n)
        two = ccl.all_reduce(x, async_op=True)
        ccl.isend(torch.ones(2), (me + 1) % n)
        three = ccl.all_gather_coalesced([x, x[:1]], async_op=True)
        three.wait()
        two.done()
        one.wait()
        two.wait()


@pytest.mark.parametrize("block", [jobs.BLOCK, 64], ids=["whole", "blocks"])
def test_interrupt_lands_anywhere(start: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    with start(3) as sess:
        for turn in range(40):
            ref = sess.call_packed(spins, 100)
            time.sleep(0.002 + 0.0007 * (turn % 7))
            assert sess.interrupt() == []
            assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3
            del ref


@pytest.mark.one_process
def test_what_an_interrupt_has_ended_is_not_waited_for(start: Any) -> None:
    with start(3) as sess:
        kept: dict[int, list[ccl.Work]] = {}

        def starts() -> None:
            if rank():
                kept[rank()] = [
                    ccl.all_reduce(torch.ones(1), async_op=True),
                    ccl.irecv(torch.ones(1), 0),
                ]
            while True:
                time.sleep(0.01)

        def waits() -> int:
            if rank() == 0:
                return 0
            meeting, reception = kept[rank()]
            with pytest.raises(CollectiveError, match=r"WorkerInterrupted|ended by an interrupt"):
                meeting.wait()
            with pytest.raises(CollectiveError, match="has failed or was stopped"):
                reception.wait()
            return 2

        ref = sess.call_packed(starts)
        while len(kept) < 2 or not all(len(works) == 2 for works in kept.values()):
            time.sleep(0.001)
        assert sess.interrupt() == []
        del ref
        assert sess.call_packed(waits).debug_get_from_all() == [0, 2, 2]
        assert sess.call_packed(fine).debug_get_from_all() == [3.0] * 3
        kept.clear()
