"""Autograd functions on leaves that several threads use at the same time, workers or others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function

from discolab import ThreadedSession
from discolab.isolation import shared_leaves
from tests.alone import output_of
from tests.selection import slow

SAME = """
import threading, time
import torch
from discolab import ThreadedSession, current_worker
from discolab.isolation import shared_leaves

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad

leaf = torch.ones(4, requires_grad=True)
end = time.monotonic() + 3
"""

THREADS = """
def operate():
    while time.monotonic() < end:
        leaf * 2

def apply():
    while time.monotonic() < end:
        shared_leaves.apply(Same, leaf)
        with torch.no_grad():
            shared_leaves.apply(Same, leaf)

threads = [threading.Thread(target=work, daemon=True) for work in (operate, operate, apply)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all ended")
"""

WORKERS = """
def step():
    while time.monotonic() < end:
        Same.apply(leaf) if current_worker().worker_id == 0 else leaf * 2

with ThreadedSession(3, devices="cpu") as sess:
    sess.call_without_result(step)
    sess.sync_all()
print("all ended")
"""


@pytest.mark.parametrize("program", [slow(THREADS), WORKERS], ids=["threads", "workers"])
def test_those_that_share_a_leaf_do_not_wait_for_each_other(program: str) -> None:
    assert output_of(SAME + program) == "all ended\n"


# -- functions of discolab's own: `shared_leaves.apply` --------------------------------------------


class Twice(torch.autograd.Function):
    """Two tensors, of which one is doubled; the other is nobody's business."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, times: int, other: torch.Tensor) -> torch.Tensor:
        return x * times

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad * 2, None, None


def test_gradients_are_those_of_the_function() -> None:
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(2)
    shared_leaves.apply(Twice, leaf, 2, other).sum().backward()
    shared_leaves.apply(Twice, leaf * 1, 2, other).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0] * 3


def test_without_gradients_there_is_no_graph() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert shared_leaves.apply(Twice, leaf, 2, leaf).grad_fn is None


# -- a program's own functions, while a session of threads lives ---------------------------------


class Double(Function):
    """Twice as much, by a context that is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return x * times

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.times, None


def test_torch_gets_its_own_back() -> None:
    before = vars(Function)["apply"]
    with ThreadedSession(1, devices="cpu"):
        assert vars(Function)["apply"] is not before
    assert vars(Function)["apply"] is before


def test_what_somebody_else_put_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = classmethod(lambda cls, *args: "mine")
    with ThreadedSession(1, devices="cpu"):
        monkeypatch.setattr(Function, "apply", mine)
    assert vars(Function)["apply"] is mine


def test_functions_do_as_before() -> None:
    def step() -> list[float]:
        leaf = torch.ones(2, requires_grad=True)
        Double.apply(leaf).sum().backward()
        assert leaf.grad is not None
        per_sample = torch.func.vmap(torch.func.grad(lambda x: leaf.detach().sum() * x * x))
        return [*leaf.grad.tolist(), *per_sample(torch.ones(1)).tolist()]

    with ThreadedSession(2, devices="cpu") as sess:
        found = sess.call_packed(step)
        assert found.debug_get_from_remote(1) == [2.0, 2.0, 4.0]
