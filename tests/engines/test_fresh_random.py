"""Random states begin as those of new processes do: no two are alike, whatever the engine."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from discolab import Session
from discolab.isolation.fresh_random import fresh_random_state

NEW_PROCESS = """
import random, numpy, torch
print(torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand())
"""


def first_draws() -> tuple[int, float, float, float]:
    return torch.initial_seed(), torch.rand(1).item(), random.random(), float(np.random.rand())


def fresh_draws() -> tuple[int, float, float, float]:
    fresh_random_state()
    return first_draws()


def seeded_draws() -> tuple[float, float, float]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_new_processes_have_nothing_in_common() -> None:
    """The rule that workers follow, as torch and this machine have it."""
    command = [sys.executable, "-c", NEW_PROCESS]
    outputs = [subprocess.check_output(command, text=True).split() for _ in range(2)]
    assert all(mine != other for mine, other in zip(*outputs, strict=True))


@pytest.mark.conformance
def test_no_two_workers_draw_the_same_before_they_are_seeded(sess: Session) -> None:
    drawn = sess.call_packed(first_draws).debug_get_from_all()
    for numbers in zip(*drawn, first_draws(), strict=True):
        assert len(set(numbers)) == 5


@pytest.mark.conformance
def test_a_seed_gives_all_workers_the_same_numbers_until_they_begin_anew(sess: Session) -> None:
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    want = seeded_draws()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    assert sess.call_packed(seeded_draws).debug_get_from_all() == [want] * 4
    assert len(set(sess.call_packed(first_draws).debug_get_from_all())) == 1  # they go on
    for numbers in zip(*sess.call_packed(fresh_draws).debug_get_from_all(), strict=True):
        assert len(set(numbers)) == 4
