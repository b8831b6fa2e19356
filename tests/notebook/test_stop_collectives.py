"""The stop button in the middle of a collective, of each backend that runs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.selection import slow

PROMPT = 2.0  # seconds from stop to a usable prompt

NEVER_COMES = {
    "all_reduce": "ccl.all_reduce(x)",
    "reduce": "ccl.reduce(x)",
    "all_gather": "ccl.all_gather(x)",
    "gather": "ccl.gather(x)",
    "reduce_scatter": "ccl.reduce_scatter(x)",
    "broadcast": "ccl.broadcast(x, src=1)",
    "scatter": "ccl.scatter(x, src=1, out=torch.empty(2))",
    "all_to_all": "ccl.all_to_all(x)",
    "barrier": "ccl.barrier()",
    "recv": "ccl.recv(x, 0)",
    "coalesced": "ccl.all_reduce_coalesced([x, x + 1])",
    "async": "ccl.all_reduce(x, async_op=True).wait()",
    "backward": "ccl.autograd.all_reduce(x.requires_grad_()).sum().backward()",
    "dist.all_reduce": "dist.all_reduce(x)",
    "dist.recv": "dist.recv(x, 0)",
    "dist.new_group": "dist.barrier(dist.new_group([0, 1, 2, 3]))",
    "dist.object": "dist.all_gather_object([None] * 4, 'x')",
}
BUSY = {
    "large": "y = torch.ones(1 << 24)\nwhile True: ccl.all_reduce_(y)",
    "dist large": "y = torch.ones(1 << 24)\nwhile True: dist.all_reduce(y)",
    "small": "while True: ccl.all_gather(x)",
}


@pytest.fixture(params=["local", "gloo"])
def backend(nb: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    nb.ok(f"sess.init_ccl({request.param!r})")
    yield request.param
    nb.ok("sess.init_ccl('local')")


def test_who_was_not_asked_is_told_so(nb: Any) -> None:
    told = nb.fails("%%disco -t 0,1\nccl.barrier()").traceback
    assert "workers 2-3: is not among the workers that were asked to run this (-t)" in told


OFTEN = ("all_reduce", "recv", "async", "dist.all_reduce", "dist.object", "large")


@pytest.mark.parametrize("case", [c if c in OFTEN else slow(c) for c in [*NEVER_COMES, *BUSY]])
def test_stop_ends_it_and_the_session_goes_on(nb: Any, backend: str, case: str) -> None:
    body = BUSY.get(case)
    if body is None:
        body = f"if rank:\n    {NEVER_COMES[case]}\nelse:\n    __import__('time').sleep(600)"
    stopped = nb.fails(f"%%disco\nkept, x = rank, torch.ones(8)\n{body}", interrupt_after=0.5)
    assert stopped.error["ename"] in ("KeyboardInterrupt", "CellInterrupted"), stopped.error
    assert stopped.seconds < PROMPT
    summed = nb.ok(
        "%%disco\nx = torch.full((8,), float(kept))\ndist.all_reduce(x)\nint(ccl.all_reduce(x)[0])"
    )
    assert summed.text == "DRef: 24 on all 4 workers"
