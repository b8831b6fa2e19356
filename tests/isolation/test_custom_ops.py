"""Operators that cells define with torch.library, on all workers and again."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from discolab import Session, WorkerError
from discolab.notebook import cell

CELL = """
import torch
factor = rank + 1

@torch.library.custom_op("discolab_tests::scale", mutates_args=())
def scale(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times * factor

@scale.register_fake
def _(x, times):
    return torch.empty_like(x)

def keep(ctx, inputs, output):
    ctx.times = inputs[1]

scale.register_autograd(lambda ctx, grad: (grad * ctx.times * factor, None), setup_context=keep)

found = []
for _ in range(5):
    leaf = torch.ones(2, requires_grad=True)
    out = torch.ops.discolab_tests.scale(leaf, 3) + scale(leaf, 3)
    out.sum().backward()
    found.append((out.tolist(), leaf.grad.tolist()))
compiled = torch.compile(lambda x: scale(x, 2) + 1, backend="eager", fullgraph=True)
[found[0], all(one == found[0] for one in found), compiled(torch.ones(1)).tolist()]
"""

LIBRARY = """
import torch
lib = torch.library.Library("discolab_tests", "FRAGMENT")
lib.define("shift(Tensor x) -> Tensor")
lib.impl("shift", lambda x, by=rank: x + by, "CPU")
torch.ops.discolab_tests.shift(torch.zeros(1)).tolist()
"""


def run(sess: Session, source: str) -> list[Any]:
    return sess.call_packed(cell.run_cell, source, "<a cell>", None).debug_get_from_all()


@pytest.mark.one_process
def test_each_worker_defines_an_operator(sess: Session) -> None:
    for _ in range(3):
        for rank, found in enumerate(run(sess, CELL)):
            by = float(rank + 1)
            assert found == [([6 * by] * 2, [6 * by] * 2), True, [2 * by + 1]]
        assert run(sess, LIBRARY) == [[float(rank)] for rank in range(4)]
    with pytest.raises(NotImplementedError, match="the notebook has no function"):
        torch.ops.discolab_tests.scale(torch.ones(1), 1)
    sess.shutdown()
    assert not hasattr(torch.ops.discolab_tests, "scale")
    assert not hasattr(torch.ops.discolab_tests, "shift")


ONE_OF_TWO = """
import torch
wide = {wide}
lib = torch.library.Library("discolab_tests", "FRAGMENT")
lib.define("move(Tensor x" + ", int by=0" * wide + ") -> Tensor")
lib.impl("move", lambda x, by=rank: x + by, "CPU")
torch.ops.discolab_tests.move(torch.zeros(1)).tolist()
"""


@pytest.mark.one_process
def test_an_operator_has_one_schema(pair: Session) -> None:
    for wide in (0, 1, 0):  # a cell that was changed and runs again
        assert len(run(pair, ONE_OF_TWO.format(wide=wide))) == 2
    for wide in ("rank", "1 - rank"):
        with pytest.raises(WorkerError, match=r"a process has one operator of a name.*processes"):
            run(pair, ONE_OF_TWO.format(wide=wide))
        with contextlib.suppress(WorkerError):
            pair.sync_all()
    run(pair, "del lib")
    assert run(pair, ONE_OF_TWO.format(wide=0)) == [[0.0], [1.0]]


OVERRIDE = """
import torch, warnings
from discolab import ccl
warnings.simplefilter("ignore")
x = torch.full((2,), 0.5, requires_grad=True)
lib = torch.library.Library("aten", "IMPL")
if rank < 2:
    lib.impl("sinc", lambda x: torch.full_like(x, rank), "CPU")
    times = lambda keys, x: torch.full_like(x, rank + 5) * x
    lib.impl("erfinv", times, "AutogradCPU", with_keyset=True)
    lib.impl("exp2", lambda x: x * 0 + rank, "BackendSelect")
ccl.barrier()
found = [torch.sinc(x).tolist(), torch.erfinv(x).tolist(), torch.exp2(x).tolist()]
ccl.barrier()
lib._destroy()
ccl.barrier()
[found, torch.autograd.grad(torch.sinc(x).sum() + torch.exp2(x).sum(), x)[0].tolist()]
"""


@pytest.mark.one_process
def test_each_worker_gives_an_operator_of_torch_a_kernel(sess: Session) -> None:
    x = torch.full((2,), 0.5, requires_grad=True)
    plain = [torch.sinc(x).tolist(), torch.erfinv(x).tolist(), torch.exp2(x).tolist()]
    gradient = torch.autograd.grad(torch.sinc(x).sum() + torch.exp2(x).sum(), x)[0].tolist()
    for _ in range(2):
        for rank, (found, then) in enumerate(run(sess, OVERRIDE)):
            own = [[float(rank)] * 2, [(rank + 5) / 2] * 2, [float(rank)] * 2]
            assert found == (own if rank < 2 else plain)
            assert then == gradient
    sess.shutdown()
    assert [torch.sinc(x).tolist(), torch.erfinv(x).tolist(), torch.exp2(x).tolist()] == plain


@pytest.mark.one_process
def test_a_kernel_for_several_devices_is_refused(pair: Session) -> None:
    with pytest.raises(WorkerError, match="--engine processes"):
        run(pair, 'torch.library.Library("aten", "IMPL").impl("silu", lambda x: x, "Autograd")')
