"""Autograd functions on leaves that several threads use at the same time."""

from __future__ import annotations

import torch

from discolab.isolation import shared_leaves
from tests.alone import output_of

SHARED_LEAF = """
import sys, threading, time
import torch
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


class Twice(torch.autograd.Function):
    """Two tensors, of which one is doubled; the other is nobody's business."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, times: int, other: torch.Tensor) -> torch.Tensor:
        return x * times

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad * 2, None, None


def test_threads_that_share_a_leaf_do_not_wait_for_each_other() -> None:
    assert output_of(SHARED_LEAF) == "all ended\n"


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
