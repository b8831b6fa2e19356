"""First uses of torch's classes, on all workers at the same moment: each is prepared once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn.intrinsic import quantized as quantized_layers
from torch.jit import _recursive
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode

from discolab import Session, ccl, current_worker

from . import scripted_class

pytestmark = [
    pytest.mark.one_process,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


class Late:
    """A function of a class that each worker finds a moment later than the one before."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, *_: object) -> Callable[..., Any]:
        time.sleep(0.05 * current_worker().rank)
        return self._function


def test_hooks_of_an_optimizer_are_called_once(
    sess: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap = optimizers.Optimizer.profile_hook_step
    monkeypatch.setattr(optimizers.Optimizer, "profile_hook_step", Late(wrap))

    class NeverUsed(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    def steps() -> int:
        layer, called = nn.Linear(2, 2), []
        ccl.barrier()
        optimizer = NeverUsed(layer.parameters(), {})
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        for _ in range(3):
            optimizer.step()
        return len(called)

    assert sess.call_packed(steps).debug_get_from_all() == [3] * 4


def test_an_operator_is_one_object(sess: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all workers ask for it first, and have torch dispatch it to Python, at once."""
    for kind in (torch._ops.OpOverloadPacket, torch._ops.OpOverload):
        monkeypatch.setattr(kind, "__init__", slowly(kind.__init__))
    vars(torch.ops.aten).pop("special_erfcx", None)

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []

    def use() -> None:
        ones = torch.ones(2)
        ccl.barrier()
        with Noted():
            torch.special.erfcx(ones)
        seen.append(torch.ops.aten.special_erfcx.default)

    sess.call_packed(use).debug_get_from_all()
    assert len(seen) == 8
    assert {id(one) for one in seen} == {id(torch.ops.aten.special_erfcx.default)}


def slowly(function: Callable[..., None]) -> Callable[..., None]:
    def wait(made: Any, of: Any, *args: Any) -> None:
        if "erfcx" in str(of):
            time.sleep(0.01 * (1 + current_worker().rank))
        function(made, of, *args)

    return wait


def test_quantized_linear_layers_know_what_they_are_made_from(sess: Session) -> None:
    # they would make lists of these at their first use, in two steps
    kinds = (
        quantized_layers.LinearReLU,
        quantized_layers.LinearLeakyReLU,
        quantized_layers.LinearTanh,
    )
    found = sess.call_packed(lambda: [type(kind._FLOAT_MODULE) for kind in kinds])
    assert found.debug_get_from_all() == [[list] * 3] * 4
    sess.shutdown()
    assert not any(isinstance(kind._FLOAT_MODULE, list) for kind in kinds)


class Scaled(nn.Module):
    """A module that torch.jit has never seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_workers_compile_with_jit(sess: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]
    create = _recursive.create_script_module

    def count(*args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        try:
            return create(*args, **kwargs)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(_recursive, "create_script_module", count)

    def compiled() -> float:
        ccl.barrier()
        return float(torch.jit.script(Scaled())(torch.ones(2)).sum())

    assert sess.call_packed(compiled).debug_get_from_all() == [4.0] * 4
    assert most == [1]


def test_jit_finds_the_names_around_a_class(sess: Session) -> None:
    assert sess.call_packed(scripted_class.compiled).debug_get_from_all() == [7] * 4
