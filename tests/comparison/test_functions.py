"""Functions that hold a module, and programs that run backward themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import discolab
from discolab import Session, compare, current_worker

pytestmark = pytest.mark.one_process

Program = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    with discolab.make_session(2, "threads", devices="cpu", timeout=30) as session:
        yield session


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def apply(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x) * 2


def held(how: str) -> Program:
    net = model()
    if how == "partial":
        return partial(apply, net)
    if how == "global":
        names: dict[str, Any] = {"net": net}
        exec("def run(x):\n    return net(x) * 2", names)
        return names["run"]  # type: ignore[no-any-return]
    return lambda x: net(x) * 2


def off(how: str) -> Program:
    """The same on the workers; worker 1 has another bias."""
    program = held(how)
    where = program.args[0] if isinstance(program, partial) else _net(program)
    if current_worker().worker_id == 1:
        where[0].bias.data += 1
    return program


def _net(program: Any) -> Any:
    if program.__closure__:
        return program.__closure__[0].cell_contents
    return program.__globals__["net"]


@pytest.mark.parametrize("how", ["partial", "closure", "global"])
def test_the_module_that_a_function_holds_is_looked_into(two: Session, how: str) -> None:
    found = compare(held(how), two.call_packed(off, how), torch.ones(3, 4))
    assert found.first is not None
    assert found.first.point.name == "0.bias"
    assert found.first.ranks == (1,)
    assert {p.name for p in found.points} >= {"0.input", "0", "1", "2"}


def two_models() -> Program:
    first, second = model(), model()
    return lambda x: second(first(x)[:, :1].expand(-1, 4))


def test_of_several_modules_none_is_chosen(two: Session) -> None:
    found = compare(two_models(), two.call_packed(two_models), torch.ones(3, 4))
    assert found.agrees, found
    assert not found.parameters


def test_a_module_within_another_is_no_second(two: Session) -> None:
    def make() -> Program:
        net = model()
        head = net[2]
        return lambda x: net(x) * head.bias

    found = compare(make(), two.call_packed(make), torch.ones(3, 4))
    assert found.agrees, found
    assert len(found.parameters) == 4


def step(net: nn.Module, factor: float, x: torch.Tensor) -> torch.Tensor:
    y = net(x)
    (y.square().sum() * factor).backward()
    return y.detach()


def trained(factor: float) -> Program:
    rate = factor if current_worker().worker_id == 1 else 1.0
    return partial(step, model(), rate)


def test_gradients_of_the_programs_own_backward_are_compared(two: Session) -> None:
    net = model()
    before = torch.full_like(net[0].bias, 7.0)
    net[0].bias.grad = before.clone()
    found = compare(partial(step, net, 1.0), two.call_packed(trained, 1.0), torch.ones(3, 4))
    assert not found.agrees  # the gradients are added to what is there
    net[0].bias.grad = None
    found = compare(partial(step, net, 1.0), two.call_packed(trained, 1.0), torch.ones(3, 4))
    assert found.agrees, found
    assert {"0.weight.grad", "2.bias.grad"} <= {p.name for p in found.gradients}
    found = compare(partial(step, net, 1.0), two.call_packed(trained, 3.0), torch.ones(3, 4))
    assert found.first is not None
    assert found.first.point.gradient
    assert found.first.ranks == (1,)
    assert any("is 3 times the reference" in cause for cause in found.first.causes), found


def test_gradients_are_put_back_after_the_programs_own_backward(two: Session) -> None:
    net = model()
    net[0].bias.grad = torch.full_like(net[0].bias, 7.0)
    compare(partial(step, net, 1.0), two.call_packed(trained, 1.0), torch.ones(3, 4))
    assert net[0].bias.grad.tolist() == [7.0] * 4
    assert net[2].bias.grad is None
