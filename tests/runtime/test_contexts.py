"""What torch has in force on the controller holds for operations on DRefs, or is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from discolab import Session, WorkerError
from discolab.runtime.errors import ArgumentError


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def leaf() -> torch.Tensor:
    return torch.eye(3, requires_grad=True)


def state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device().type,
    )


def facts(value: torch.Tensor) -> tuple[bool, bool, str, str]:
    return value.requires_grad, value.is_inference(), str(value.dtype), value.device.type


def results(session: Session, x: Any) -> list[Any]:
    """What comes of each kind of operation on DRefs."""
    func = session.call_packed(lambda: torch.sin)
    func.__class__ = type(session.get_global_func("runtime.disco.worker_id"))
    refs = [x @ x, torch.matmul(x, x), func(x), session.call_packed(Net(), x)]
    found = [session.call_packed(state)]
    with torch.no_grad():
        found += [session.call_packed(facts, ref) for ref in refs]
    return [ref.debug_get_from_all() for ref in found]


@pytest.mark.conformance
def test_grad_and_inference_mode_hold_on_the_workers(pair: Session) -> None:
    x = pair.call_packed(leaf)
    plain = results(pair, x)
    assert [made[0][0] for made in plain[1:]] == [True] * 4
    with torch.no_grad():
        found = results(pair, x)
        assert [made[1][0] for made in found[1:]] == [False] * 4
        assert [values[0] for values in found[0]] == [False] * 2
        with torch.enable_grad():
            assert results(pair, x) == plain
    with torch.inference_mode():
        found = results(pair, x)
        assert [made[1][:2] for made in found[1:]] == [(False, True)] * 4
        with torch.enable_grad():
            assert pair.call_packed(state).debug_get_from_remote(1)[:2] == (True, True)
    assert results(pair, x) == plain


@pytest.mark.conformance
def test_autocast_and_the_default_device_hold_on_the_workers(pair: Session) -> None:
    x = pair.call_packed(leaf)
    plain = results(pair, x)
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        found = results(pair, x)
        assert found[0] == [(True, False, True, torch.float16, False, "cpu")] * 2
        dtypes = [made[0][2] for made in found[1:]]
        assert dtypes == ["torch.float16", "torch.float16", "torch.float32", "torch.float16"]
        with torch.autocast("cpu", enabled=False):
            assert results(pair, x)[1:] == plain[1:]
    with torch.device("meta"):
        assert pair.call_packed(torch.zeros, 3).debug_get_from_remote(1).device.type == "meta"
        made = torch.nn.functional.huber_loss(x, x)  # a function of torch; torch puts modes aside
        assert made.debug_get_from_remote(1).device.type == "cpu"
        assert results(pair, x)[0][1][5] == "meta"
    torch.set_default_device("meta")
    try:
        assert pair.call_packed(state).debug_get_from_remote(1)[5] == "meta"
    finally:
        torch.set_default_device(None)
    assert results(pair, x) == plain


def modes() -> list[Any]:
    return [
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        [kernel.name for kernel in attention._cur_sdpa_kernel_backends(with_priority=True)],
    ]


def test_anomaly_mode_and_kernels_of_attention_hold_on_the_workers(pair: Session) -> None:
    usual = modes()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        within = pair.call_packed(modes)
    kernels = [attention.SDPBackend.MATH, attention.SDPBackend.FLASH_ATTENTION]
    with attention.sdpa_kernel(kernels, set_priority=True):
        chosen = pair.call_packed(modes)
        q = pair.call_packed(torch.ones, 1, 1, 2, 4)
        product = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    after = pair.call_packed(modes)
    assert within.debug_get_from_all() == [[True, False, usual[2]]] * 2
    assert chosen.debug_get_from_all() == [[False, True, [kernel.name for kernel in kernels]]] * 2
    assert after.debug_get_from_all() == [usual] * 2
    assert [value.sum() for value in product.debug_get_from_all()] == [8, 8]
    assert modes() == usual


def test_an_error_within_a_context_names_the_function(pair: Session) -> None:
    x = pair.call_packed(leaf)
    with torch.no_grad():
        bad = torch.matmul(x, torch.ones(7))
    with pytest.raises(WorkerError, match="call of 'matmul'"):
        bad.debug_get_from_remote(1)
    assert pair.call_packed(state).debug_get_from_remote(1)[0] is True


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def same(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (Functions, "the mode Functions"),
        (Dispatches, "the mode Dispatches"),
        (FakeTensorMode, "FakeTensorMode"),
        (lambda: torch.autograd.graph.saved_tensors_hooks(same, same), "saved_tensors_hooks"),
    ],
)
def test_what_cannot_be_carried_is_refused(pair: Session, context: Any, words: str) -> None:
    x = pair.call_packed(leaf)
    with context(), pytest.raises(ArgumentError, match=words):
        x @ x
    with pytest.raises(ArgumentError, match="vmap"):
        torch.vmap(lambda t: (x @ x, t)[1])(torch.ones(2))
    assert (x @ x).debug_get_from_remote(1).sum() == 3


def test_a_seed_of_the_notebook_is_told_to_be_not_the_workers(pair: Session) -> None:
    before = torch.get_rng_state()
    x = pair.call_packed(leaf)
    torch.rand_like(x)
    torch.manual_seed(12345)
    with pytest.warns(UserWarning, match=r"sess.manual_seed\(seed\)"):
        torch.rand_like(x)
    pair.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, other = torch.rand_like(x).debug_get_from_all()
    torch.manual_seed(7)
    want = torch.rand(3, 3)
    torch.set_rng_state(before)
    assert torch.equal(first, want)
    assert torch.equal(other, want)
