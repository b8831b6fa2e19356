"""Autocast on several workers: its cache of cast weights is each worker's own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from discolab import Session, ThreadedSession, current_worker


def bfloat16(**kwargs: Any) -> torch.autocast:
    """On the CPU, where the tests run."""
    return torch.autocast("cpu", dtype=torch.bfloat16, **kwargs)


def a_weight() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and what is multiplied with it, the same on each call."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 16, generator=generator).requires_grad_()
    return weight, torch.randn(8, 16, generator=generator)


def used_twice(between: Callable[[], Any] = lambda: None, **kwargs: Any) -> torch.Tensor:
    """The gradient of a weight that is used twice within one autocast."""
    weight, batch = a_weight()
    with bfloat16(**kwargs):
        hidden = torch.tanh(batch @ weight)
        between()
        out = hidden @ weight
    out.float().square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def while_others_come_and_go() -> bool:
    """Whether the gradient on worker 0 is what it is alone; the others leave an autocast."""
    if current_worker().rank > 0:
        dist.barrier()
        with bfloat16():
            torch.ones(2, 2) @ torch.ones(2, 2)
        dist.barrier()
        return True
    meanwhile = used_twice(lambda: (dist.barrier(), dist.barrier()))
    return torch.equal(meanwhile, used_twice())


def test_a_weight_used_twice_is_cast_once(sess: Session) -> None:
    alone = used_twice()
    assert not torch.equal(alone, used_twice(cache_enabled=False))  # so the test would notice
    assert sess.call_packed(while_others_come_and_go).debug_get_from_all() == [True] * 4
    for grad in sess.call_packed(used_twice).debug_get_from_all():
        assert torch.equal(grad, alone)


def recurrent() -> list[torch.Tensor]:
    """Gradients of what casts its weights in C++, and of what adds Python's numbers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of as many as there are, the order of sums would be another
    lstm, proj = torch.nn.LSTM(8, 8, 2), torch.nn.Linear(8, 8)
    norm = torch.nn.LayerNorm(8)
    with bfloat16():
        loss = 0 + sum(norm(proj(lstm(torch.ones(3, 2, 8) * n)[0]) * 2 + 1).sum() for n in range(3))
        loss = loss + torch.nn.functional.conv1d(torch.ones(1, 8, 8), proj.weight[:, :, None]).sum()
    loss.backward()  # type: ignore[union-attr]
    return [p.grad for m in (lstm, proj, norm) for p in m.parameters() if p.grad is not None]


def test_gradients_are_those_of_a_process(sess: Session) -> None:
    threads = torch.get_num_threads()
    alone = recurrent()
    torch.set_num_threads(threads)
    for grads in sess.call_packed(recurrent).debug_get_from_all():
        assert len(grads) == len(alone) == 12
        assert all(map(torch.equal, grads, alone))


def train_beside() -> bool:
    """Worker 0 stays within autocast; worker 1 begins its next step with the changed weight."""
    weight, batch = a_weight()
    if current_worker().rank == 0:
        with bfloat16():
            first = batch @ weight
            dist.barrier()
            dist.barrier()
            return torch.equal(first, batch @ weight)
    dist.barrier()
    with bfloat16():
        batch @ weight
    with torch.no_grad():
        weight.mul_(2)
    with bfloat16():
        right = torch.equal(batch @ weight, batch.bfloat16() @ weight.detach().bfloat16())
    dist.barrier()
    return right


def test_the_next_step_finds_no_old_weight(make: Callable[..., Session]) -> None:
    assert make(2).call_packed(train_beside).debug_get_from_all() == [True] * 2


def caching() -> list[bool]:
    """What a program sees of the cache."""
    weight, batch = a_weight()
    seen = [torch.is_autocast_cache_enabled()]
    with bfloat16(cache_enabled=False):
        seen.append(torch.is_autocast_cache_enabled())
        with bfloat16(cache_enabled=True):
            seen.append(torch.is_autocast_cache_enabled())
        seen.append(torch.is_autocast_cache_enabled())
    with bfloat16():
        with torch.no_grad():
            seen.append((batch @ weight).requires_grad)
        with torch.inference_mode():
            seen.append((batch @ weight).requires_grad)
        seen.append((batch @ weight).requires_grad)
        mine = weight.to(torch.bfloat16)
        seen.append(mine is weight.to(torch.bfloat16))
        with torch.autocast("cpu", enabled=False):
            seen.append(weight.to(torch.bfloat16) is weight.to(torch.bfloat16))
            seen.append((batch @ weight).dtype is torch.float32)
    torch.set_autocast_cache_enabled(False)
    seen.append(torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(True)
    return [*seen, torch.is_autocast_cache_enabled(), torch._C._is_any_autocast_enabled()]


def test_a_program_sees_what_it_sees_in_a_process(sess: Session) -> None:
    alone = caching()
    assert sess.call_packed(caching).debug_get_from_all() == [alone] * 4
    uncached, there = used_twice(cache_enabled=False), {"cache_enabled": False}
    for grad in sess.call_packed(lambda: used_twice(**there)).debug_get_from_all():
        assert torch.equal(grad, uncached)


def test_a_leaf_that_workers_share_is_cast_for_each() -> None:
    weight, batch = a_weight()
    both = threading.Barrier(2)

    def kinds() -> torch.dtype:
        dtype = (torch.bfloat16, torch.float16)[current_worker().rank]
        with torch.autocast("cpu", dtype=dtype):
            both.wait(10)
            first = batch @ weight
            both.wait(10)
            return (first @ weight).dtype

    with ThreadedSession(2, devices="cpu") as sess:
        found = sess.call_packed(kinds).debug_get_from_all()
    assert found == [torch.bfloat16, torch.float16]


def test_the_notebook_and_its_workers_do_not_empty_each_others() -> None:
    alone = used_twice()
    before = torch.clear_autocast_cache
    with ThreadedSession(1, devices="cpu") as sess:

        def visit() -> None:
            with bfloat16():
                pass

        here = used_twice(lambda: sess.call_packed(visit).debug_get_from_all())
        gone, back = threading.Event(), threading.Event()
        there = sess.call_packed(lambda: used_twice(lambda: (gone.set(), back.wait(10))))
        assert gone.wait(10)
        with bfloat16():
            pass
        back.set()
        assert torch.equal(there.debug_get_from_all()[0], alone)
    assert torch.equal(here, alone)
    assert torch.clear_autocast_cache is before
    assert torch.is_autocast_cache_enabled()
    assert torch.equal(used_twice(), alone)


def fork_within() -> bool:
    """A process that is forked within autocast casts anew after it has left it."""
    weight, batch = a_weight()
    read, write = os.pipe()
    with bfloat16():
        batch @ weight
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        right = False
        try:
            with torch.no_grad():
                weight.mul_(2)
            with bfloat16():
                right = torch.equal(batch @ weight, batch.bfloat16() @ weight.detach().bfloat16())
            right = right and torch.is_autocast_cache_enabled()
        finally:
            os.write(write, bytes([right]))
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read() == b"\1"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_process_that_a_worker_forks_has_torchs_own() -> None:
    with ThreadedSession(1, devices="cpu") as sess:
        assert sess.call_packed(fork_within).debug_get_from_all() == [True]
