"""What needs a GPU; see docs/gpu.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from discolab import Session, ThreadedSession, ccl, current_worker, make_session, view
from tests.gpus import GPU, busy, late, needs_gpu

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def four() -> Iterator[ThreadedSession]:
    """Four threads that share the GPUs of this machine."""
    with ThreadedSession(4, timeout=60) as session:
        yield session


def sum_of_ranks() -> torch.Tensor:
    worker = current_worker()
    assert torch.accelerator.current_device_index() == worker.device.index
    x = torch.full((1 << 20,), float(worker.rank), device=worker.device)
    for _ in range(20):
        y = ccl.all_reduce(x)
    return y


def test_workers_take_the_gpus_in_turn_and_reduce_across_them(four: ThreadedSession) -> None:
    gpus = torch.accelerator.device_count()
    assert [device.index for device in four.devices] == [r % gpus for r in range(4)]
    for value in four.call_packed(sum_of_ranks).debug_get_from_all():
        assert bool((value == 6).all())


def test_host_arrays_go_to_and_from_worker_0(four: ThreadedSession) -> None:
    ref = four.broadcast(torch.arange(5.0))
    back = torch.empty(5)
    four.copy_from_worker_0(back, ref)
    four.sync_worker_0()
    assert back.tolist() == [0, 1, 2, 3, 4]


def test_backward_and_its_hooks_stay_on_the_workers_thread(four: ThreadedSession) -> None:
    def backward() -> bool:
        import threading

        seen = []
        x = torch.ones(8, device=current_worker().device, requires_grad=True)
        x.register_hook(lambda _: seen.append(threading.get_ident()))
        (x * 2).relu().sum().backward()
        return seen == [threading.get_ident()] and bool((x.grad == 2).all())

    assert four.call_packed(backward).debug_get_from_all() == [True] * 4


# -- what one thread has begun, another one reads ------------------------------------------------


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def late_ones() -> torch.Tensor:
    return late(1.0)


def fetched(sess: Session) -> list[float]:
    return [total(one) for one in sess.call_packed(late_ones).debug_get_from_all()]


def fetched_in_a_list(sess: Session) -> list[float]:
    both = sess.call_packed(lambda: [late(1.0), late(1.0)]).debug_get_from_remote(1)
    return [total(one) for one in both]


def copied_from_worker_0(sess: Session) -> list[float]:
    host = torch.zeros(1 << 20)
    sess.copy_from_worker_0(host, sess.call_packed(late_ones))
    sess.sync_worker_0()
    return [total(host)]


def given_as_an_argument(sess: Session) -> list[float]:
    return sess.call_packed(total, late(1.0)).debug_get_from_all()


def an_operand(sess: Session) -> list[float]:
    zeros = sess.call_packed(lambda: torch.zeros(1 << 20, device=GPU))
    return [total(one) for one in (zeros + late(1.0)).debug_get_from_all()]


def assigned(sess: Session) -> list[float]:
    ref = sess.call_packed(lambda: torch.zeros(1 << 20, device=GPU))
    ref.debug_copy_from(2, late(1.0))
    return [sess.call_packed(total, ref).debug_get_from_remote(2)]


def seen(sess: Session) -> list[Any]:
    text = str(view(sess.call_packed(late_ones), stats=True))
    said = re.search(r"bytes  mean +std .*\n .* 4 MiB +1 +0 +1 +1 +0$", text)
    return [float(1 << 20)] if said and "equal on all workers" in text else [text]


def sent_and_received(sess: Session) -> list[float]:
    def ring() -> float:
        rank = current_worker().rank
        out = torch.zeros(1 << 20, device=GPU)
        ccl.send(late(1.0), (rank + 1) % 4)
        ccl.recv(out, (rank - 1) % 4)
        return total(out)

    return sess.call_packed(ring).debug_get_from_all()


WAYS = [fetched, fetched_in_a_list, copied_from_worker_0, given_as_an_argument, an_operand,
        assigned, seen, sent_and_received]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_who_is_handed_a_tensor_sees_what_was_begun_before(
    four: ThreadedSession, way: Callable[[Session], list[float]]
) -> None:
    for _ in range(3):  # the first time kernels are loaded, which waits for the GPU
        assert set(way(four)) == {float(1 << 20)}


def test_memory_of_a_value_that_was_fetched_is_not_used_again_too_early(
    four: ThreadedSession,
) -> None:
    def sevens() -> None:
        torch.empty(1 << 20, device=GPU).fill_(7)

    for _ in range(3):
        value = four.call_packed(lambda: torch.ones(1 << 20, device=GPU)).debug_get_from_remote(1)
        busy()
        found = value.sum()
        del value
        four.call_packed(sevens).debug_get_from_all()
        assert float(found) == 1 << 20


def test_memory_of_an_argument_is_not_used_again_too_early(four: ThreadedSession) -> None:
    def read(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1

    for _ in range(3):
        four.call_packed(busy)
        ref = four.call_packed(read, torch.ones(1 << 20, device=GPU))
        four.sync_worker_0()
        torch.empty(1 << 20, device=GPU).fill_(7)
        assert [total(one) for one in ref.debug_get_from_all()] == [float(1 << 20)] * 4


# -- processes -----------------------------------------------------------------------------------


def test_processes_share_one_gpu() -> None:
    with make_session(4, "processes", devices=str(GPU), timeout=60) as sess:
        values = sess.call_packed(sum_of_ranks).debug_get_from_all()
        assert [bool((value.cpu() == 6).all()) for value in values] == [True] * 4
        assert set(given_as_an_argument(sess)) == {float(1 << 20)}
        assert [total(one.cpu()) for one in sess.call_packed(late_ones).debug_get_from_all()] == [
            float(1 << 20)
        ] * 4
