"""A program's own autograd functions on leaves that workers have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function

from discolab import ThreadedSession
from tests.alone import output_of

SHARED_LEAF = """
import time
import torch
from discolab import ThreadedSession, current_worker

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad

leaf = torch.ones(4, requires_grad=True)

def step():
    end = time.monotonic() + 3
    while time.monotonic() < end:
        Same.apply(leaf) if current_worker().worker_id == 0 else leaf * 2

with ThreadedSession(3, devices="cpu") as sess:
    sess.call_without_result(step)
    sess.sync_all()
print("all ended")
"""


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


def test_workers_that_share_a_leaf_do_not_wait_for_each_other() -> None:
    assert output_of(SHARED_LEAF) == "all ended\n"


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
