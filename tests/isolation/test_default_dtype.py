"""Each worker has a default dtype of its own, and torch's functions go by it."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from discolab import Session, ThreadedSession, current_worker
from tests.isolation import dtype_cases

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@pytest.fixture(autouse=True)
def all_is_put_back() -> Iterator[None]:
    yield
    assert torch.ones(1).dtype is torch.get_default_dtype() is torch.float32
    # where the housekeeper has put it back, a mode stays on this thread, which decides nothing
    assert [mode.dtype for mode in _get_current_function_mode_stack() if mode.dtype] == []


def test_each_worker_has_its_own(make: Callable[..., Session]) -> None:
    def kinds() -> list[torch.dtype]:
        counts = torch.arange(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        return [
            torch.get_default_dtype(),
            torch.ones(1).dtype,
            torch.tensor([1, 2.5]).dtype,
            torch.Tensor([0.5]).dtype,
            (counts / 2).dtype,
            model(torch.ones(2, 3)).dtype,
            *{parameter.dtype for parameter in model.parameters()},
        ]

    def change() -> tuple[torch.dtype, list[torch.dtype], list[torch.dtype]]:
        own = DTYPES[current_worker().rank]
        torch.set_default_dtype(own)
        torch.distributed.barrier()
        inside = kinds()
        torch.distributed.barrier()
        torch.set_default_dtype(torch.float32)
        return own, inside, kinds()

    sess = make(4)
    for own, inside, after in sess.call_packed(change).debug_get_from_all():
        assert set(inside) == {own}
        assert set(after) == {torch.float32}
    assert torch.ones(1).dtype is torch.float32


def test_what_has_no_floating_dtype_keeps_its_own(make: Callable[..., Session]) -> None:
    def compute() -> list[torch.Tensor]:
        torch.set_default_dtype(torch.float64)
        counts = torch.tensor([3, 1, 2])
        found = [
            torch.where(counts > 1, counts, 0.1),
            torch.where(condition=counts > 1, input=counts, other=0.1),
            counts.where(counts > 1, 0.1),
            torch.cov(counts, fweights=counts),
        ]
        torch.set_default_dtype(torch.float32)
        return found

    for found in make(2).call_packed(compute).debug_get_from_all():
        assert [tensor.dtype for tensor in found] == [torch.float64] * 4
        assert [tensor.tolist() for tensor in found] == [
            *[[3.0, 0.1, 2.0]] * 3,
            pytest.approx(2 / 3),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_functions_give_what_they_give_in_a_process(dtype: torch.dtype) -> None:
    def sweep() -> dict[str, Any]:
        torch.set_default_dtype(dtype)
        return dtype_cases.outcomes()

    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "tests.isolation.dtype_cases", name]
    with (
        ThreadedSession(1, devices="cpu") as sess,
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
    ):
        found = sess.call_packed(sweep).debug_get_from_remote(0)
        assert process.stdout is not None
        expected = json.loads(process.stdout.read())
    refused = {call for call, outcome in found.items() if outcome == "refused"}
    assert len(expected) > 2000
    assert len(refused) < 20, "arithmetic of numbers alone"
    for call in sorted(expected.keys() - refused):
        if expected[call] is not None:
            assert found.get(call) == expected[call], call


def test_it_holds_together_with_other_modes_whatever_ends_first() -> None:
    def mixed() -> list[Any]:
        found: list[Any] = []
        with torch.device("meta"):
            torch.set_default_dtype(torch.float64)
            found.append(torch.ones(1))
        found.append(torch.ones(1))
        with torch.device("meta"):
            torch.set_default_dtype(torch.float32)
            found.append(torch.ones(1))
        found.append(torch.ones(1))
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        found.append(torch.ones(1))
        torch.set_default_device(None)
        found.append(torch.ones(1))
        return [(str(t.device), t.dtype) for t in found]

    with ThreadedSession(1, devices="cpu") as sess:
        assert sess.call_packed(mixed).debug_get_from_remote(0) == [
            ("meta", torch.float64),
            ("cpu", torch.float64),
            ("meta", torch.float32),
            ("cpu", torch.float32),
            ("meta", torch.float64),
            ("cpu", torch.float64),
        ]


def test_threads_that_a_worker_starts_have_it_too(pair: Session) -> None:
    def on_a_thread() -> tuple[torch.dtype, torch.dtype]:
        torch.set_default_dtype(DTYPES[current_worker().rank + 1])
        with ThreadPoolExecutor(1) as pool:
            inner = pool.submit(lambda: torch.ones(1).dtype).result()
        torch.set_default_dtype(torch.float32)
        return inner, torch.ones(1).dtype

    assert pair.call_packed(on_a_thread).debug_get_from_all() == [
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
    ]


@pytest.mark.conformance
def test_workers_start_with_that_of_the_notebook_and_keep_it(make: Callable[..., Session]) -> None:
    kind = lambda: (torch.ones(1).dtype, torch.get_default_dtype())  # noqa: E731
    torch.set_default_dtype(torch.float64)
    try:
        sess = make(2, timeout=21)  # not one that Ray's tests keep
        assert sess.call_packed(kind).debug_get_from_all() == [(torch.float64,) * 2] * 2
        torch.set_default_dtype(torch.float32)
        assert torch.ones(1).dtype is torch.float32
        assert sess.call_packed(kind).debug_get_from_all() == [(torch.float64,) * 2] * 2
        sess.shutdown()
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_the_notebook_sets_meanwhile_stays() -> None:
    try:
        with ThreadedSession(1, devices="cpu") as sess:
            torch.set_default_dtype(torch.float64)
            assert torch.ones(1).dtype is torch.float64
            found = sess.call_packed(lambda: torch.ones(1).dtype).debug_get_from_remote(0)
            assert found is torch.float32
        assert torch.ones(1).dtype is torch.get_default_dtype() is torch.float64
        other: list[torch.dtype] = []
        thread = threading.Thread(target=lambda: other.append(torch.ones(1).dtype))
        thread.start()
        thread.join()
        assert other == [torch.float64]
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_it_can_not_reach_is_refused() -> None:
    def divide() -> Any:
        torch.set_default_dtype(torch.float64)
        return torch.div(1, 3)

    with (
        ThreadedSession(1, devices="cpu") as sess,
        pytest.raises(Exception, match=r"float64.*div.*engine='processes'"),
    ):
        sess.call_packed(divide).debug_get_from_remote(0)


def test_backward_runs_with_it(pair: Session) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            seen.append(torch.ones(1).dtype)
            return 2 * grad

    seen: list[torch.dtype] = []

    def within() -> tuple[list[torch.dtype], list[float]]:
        dtype = (torch.float64, torch.float32)[current_worker().rank]
        torch.set_default_dtype(dtype)
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: seen.append(torch.ones(1).dtype))
        Doubled.apply(x).sum().backward()
        torch.autograd.grad(Doubled.apply(x).sum(), x)
        y = torch.full((3,), 0.3, requires_grad=True)
        made = torch.utils.checkpoint.checkpoint(
            lambda y: (y * torch.full((3,), 1 / 3)).sin(), y, use_reentrant=True
        )
        made.sum().backward()
        assert y.grad is not None
        kinds = [kind for kind in seen if kind is dtype]
        return kinds, (y.grad - torch.cos(y / 3) / 3).abs().tolist()

    found = pair.call_packed(within).debug_get_from_all()
    for (kinds, errors), (dtype, most) in zip(
        found, ((torch.float64, 1e-15), (torch.float32, 1e-7)), strict=True
    ):
        assert kinds == [dtype] * 4
        assert max(errors) < most
