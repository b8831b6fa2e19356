"""Asking `done()` again and again ends too; a wait with a timeout of its own is no deadlock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.runtime import CollectiveError, WaitTimeoutError, WorkerError, current_worker

pytestmark = pytest.mark.any_engine


def rank() -> int:
    return current_worker().rank


def poll(work: ccl.Work) -> None:
    current_worker().wait_for(work.done, "done()", 5)


def all_but_one(how: str) -> str:
    if rank() == 2:
        if how == "raises":
            raise ValueError("boom")
        return "left"
    work = ccl.irecv(torch.ones(2), 2) if how == "recv" else None
    work = work or ccl.all_reduce(torch.ones(2), async_op=True)
    poll(work)
    with pytest.raises(CollectiveError) as caught:
        work.wait()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_polling_ends_when_a_member_never_comes(start: Any, how: str, backend: str) -> None:
    with start(3) as sess:
        sess.init_ccl(backend)
        told = sess.peek(sess.call_packed(all_but_one, how), tell=True)
    want = "failed: ValueError: boom" if how == "raises" else "finished the call without it"
    for index in (0, 1):
        assert f"worker 2: {want}" in str(told[index])


def late() -> str:
    if rank() == 0:
        with pytest.raises(WaitTimeoutError):
            current_worker().wait_for(lambda: False, "nothing", 0.6)
        return "late"
    work = ccl.all_reduce(torch.ones(2), async_op=True, timeout=0.1)
    poll(work)
    with pytest.raises(CollectiveError, match=r"gave up after 0\.1 s"):
        work.wait()
    return "told"


def test_polling_ends_at_the_deadline(start: Any) -> None:
    with start(2) as sess:
        assert sess.call_packed(late).debug_get_from_all() == ["late", "told"]


def falls_back() -> str:
    """Worker 0 waits for 1, which waits for 0 in a barrier; but 0 will give up and come."""
    got = ""
    if rank() == 0:
        with pytest.raises(WaitTimeoutError):
            ccl.recv(torch.empty(1), 1, timeout=0.3)
        got = "fell back, "
    ccl.barrier()
    return got + "met"


def test_a_timeout_of_its_own_is_no_deadlock(start: Any) -> None:
    with start(2) as sess:
        assert sess.call_packed(falls_back).debug_get_from_all() == ["fell back, met", "met"]


def unsorted() -> None:
    ccl.all_reduce(torch.ones(1), group=[1, 0])


def test_a_group_in_another_order_is_refused(start: Any) -> None:
    with start(2) as sess, pytest.raises(WorkerError, match=r"ascending order.*group=\[0, 1\]"):
        sess.call_packed(unsorted).debug_get_from_all()


def one_element_pieces() -> list[Any]:
    column = torch.arange(8.0).view(4, 2)[:, 1] + rank()
    return [
        ccl.all_to_all(column).tolist(),
        ccl.all_gather(torch.arange(8.0)[::8] + rank()).tolist(),
        ccl.scatter(column, 1, out=torch.empty(1)).tolist(),
    ]


def test_gloo_takes_single_elements_with_any_stride(start: Any) -> None:
    with start(4) as sess:
        want = sess.call_packed(one_element_pieces).debug_get_from_all()
        sess.init_ccl("gloo")
        assert sess.call_packed(one_element_pieces).debug_get_from_all() == want
