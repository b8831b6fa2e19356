"""A collective without a gradient says so where it is given a tensor that requires one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import discolab
from discolab import Session, ccl
from discolab.ccl import GradientWarning
from discolab.ccl import autograd as dist_fn
from discolab.ccl.checks import noticing_lost_gradients


def two() -> Session:
    return discolab.make_session(2, "threads", devices="cpu", timeout=30)


def told(program: Callable[[], Any], times: int = 1) -> list[str]:
    """What the workers were warned of; without the interpreter lock threads must start within."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with two() as session:
            for _ in range(times):
                session.fetch(session.call_packed(program))
    return [str(w.message) for w in caught if w.category is GradientWarning]


@pytest.mark.one_process
def test_a_gradient_that_ends_is_told_once_for_each_place() -> None:
    def program() -> None:
        x = torch.ones(4, requires_grad=True) * 2
        assert not ccl.all_reduce(x).requires_grad

    def another() -> str:
        with noticing_lost_gradients() as places:
            ccl.all_gather(torch.ones(4, requires_grad=True))
        return places[0][0]

    found = told(program, 3)
    assert len(set(found)) == 1
    assert "ccl.all_reduce has no gradient" in found[0]
    assert "reduce_from_region" in found[0]
    assert len(found) <= 2  # two workers may come at once
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with two() as session:
            assert session.fetch(session.call_packed(another)) == ["all_gather"] * 2


@pytest.mark.one_process
def test_nothing_is_told_where_no_gradient_is_lost() -> None:
    def program() -> None:
        x = torch.ones(4, requires_grad=True)
        y = x * 2
        dist_fn.all_reduce(y).sum().backward()
        dist_fn.gather_from_sequence_region(x).sum().backward()
        ccl.all_reduce(y.detach())
        ccl.broadcast_(x)  # parameters are made alike so
        ccl.all_reduce_(y)
        with torch.no_grad():
            ccl.all_reduce(x)

    assert told(program) == []
