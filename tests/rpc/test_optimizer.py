"""DistributedOptimizer: trains as one optimizer on one device does; errors of owners."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from discolab import ArgumentError, Session, SessionError, WorkerError
from discolab import rpc as module
from tests.rpc import graphs
from tests.rpc.conftest import Caller
from tests.rpc.graphs import close, make_parameter

pytestmark = pytest.mark.timeout(120)

STEPS = 5


def data(step: int) -> tuple[Tensor, Tensor]:
    made = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return made[0], made[1]


def alone(kind: Any, options: dict[str, Any]) -> tuple[list[float], list[list[Tensor]]]:
    stages = [graphs.Stage(n) for n in range(4)]
    optimizer = kind([p for stage in stages for p in stage.parameters()], **options)
    losses = []
    for step in range(STEPS):
        h, wanted = data(step)
        for stage in stages:
            h = stage(h)
        loss = (h - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [[p.detach() for p in stage.parameters()] for stage in stages]


def together(rpc: Any, kind: Any, options: dict[str, Any]) -> tuple[list[float], list[Any]]:
    stages = [rpc.RemoteModule(rank, graphs.Stage, (rank,)) for rank in range(4)]
    parameters = [ref for stage in stages for ref in stage.remote_parameters()]
    optimizer = rpc.DistributedOptimizer(kind, parameters, **options)
    assert "worker 0, worker 1, worker 2, worker 3" in repr(optimizer)
    losses = []
    for step in range(STEPS):
        h, wanted = data(step)
        with rpc.autograd.context() as ctx:
            for stage in stages:
                h = stage(h)
            loss = (h - wanted).square().mean()
            rpc.autograd.backward(ctx, [loss])
            optimizer.step(ctx)
        losses.append(loss.item())
    found = []
    for rank, stage in enumerate(stages):
        ref = stage.module_rref()
        found.append(rpc.rpc_sync(rank, graphs.values_of, (ref,)))
        assert rpc.rpc_sync(rank, no_dot_grad, (ref,))
    return losses, found


def no_dot_grad(stage: Any) -> bool:
    return all(parameter.grad is None for parameter in stage.local_value().parameters())


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.05})],
)
def test_trains_as_one_device_does(caller: Caller, kind: Any, options: dict[str, Any]) -> None:
    losses, parameters = caller(together, kind, options)
    wanted_losses, wanted = alone(kind, options)
    assert losses == pytest.approx(wanted_losses, rel=1e-10)
    close(parameters, wanted)


def own_parameters(rpc: Any, mine: int) -> None:
    x = make_parameter(1)
    before = x.detach().clone()
    far = rpc.remote(2, make_parameter, (2,))
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(x), far], 0.5)
    x.grad = torch.full_like(x, 7)
    with rpc.autograd.context() as ctx:
        y = rpc.rpc_sync(2, graphs.multiply, (far, x))
        rpc.autograd.backward(ctx, [y.sum()])
        optimizer.step(ctx)
        there = make_parameter(2).detach()
        close(x.detach(), before - 0.5 * there)
        close(rpc.rpc_sync(2, value_of, (far,)), there - 0.5 * before)
        assert x.grad.tolist() == [7, 7, 7]
        optimizer.step()  # the current context
        close(x.detach(), before - there)
    for over in (ctx, 3, 7, 900_000 * 2**20 + 3):
        with pytest.raises(SessionError, match="over"):
            optimizer.step(over)
    with pytest.raises(SessionError, match="no context"):
        optimizer.step()


def value_of(parameter: Any) -> Tensor:
    return parameter.local_value().detach()


def test_parameters_of_the_caller(caller: Caller) -> None:
    caller(own_parameters, caller.rank)


def unused(rpc: Any) -> None:
    far = rpc.remote(2, make_parameter, (2,))
    idle = rpc.remote(3, make_parameter, (3,))
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, [far, idle], lr=1.0)
    with rpc.autograd.context() as ctx:
        y = rpc.rpc_sync(2, graphs.multiply, (far, torch.ones(3, dtype=torch.float64)))
        rpc.autograd.backward(ctx, [y.sum()])
        optimizer.step(ctx)
    close(rpc.rpc_sync(2, value_of, (far,)), make_parameter(2).detach() - 1)
    close(rpc.rpc_sync(3, value_of, (idle,)), make_parameter(3).detach())


def test_what_has_no_gradient_stays(caller: Caller) -> None:
    caller(unused)


def test_steps_of_two_threads(sess: Session) -> None:
    rpc = sess.rpc
    far = rpc.remote(2, make_parameter, (2,))
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, [far], lr=1.0)
    ones = torch.ones(3, dtype=torch.float64)
    errors: list[BaseException] = []

    def work(factor: float) -> None:
        try:
            for _ in range(10):
                with rpc.autograd.context() as ctx:
                    y = rpc.rpc_sync(2, graphs.multiply, (far, ones * factor))
                    rpc.autograd.backward(ctx, [y.sum()])
                    optimizer.step(ctx)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (1.0, 100.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    close(rpc.rpc_sync(2, value_of, (far,)), make_parameter(2).detach() - 1010)


class Slow(torch.optim.SGD):
    """Between what is put in `grad` and what is done with it passes some time."""

    def step(self, closure: Any = None) -> Any:
        """As that of SGD."""
        time.sleep(0.02)
        return super().step(closure)


def train(far: Any, factor: float) -> None:
    optimizer = module.DistributedOptimizer(Slow, [far], lr=1.0)
    for _ in range(3):
        with module.autograd.context() as ctx:
            x = torch.full((3,), factor, dtype=torch.float64)
            y = module.rpc_sync(2, graphs.multiply, (far, x))
            module.autograd.backward(ctx, [y.sum()])
            optimizer.step(ctx)


def test_trainers_with_an_optimizer_each_for_the_same_parameters(sess: Session) -> None:
    rpc = sess.rpc
    far = rpc.remote(2, make_parameter, (2,))
    rpc.wait_all([rpc.rpc_async(rank, train, (far, 10.0**rank)) for rank in (0, 1)])
    close(rpc.rpc_sync(2, value_of, (far,)), make_parameter(2).detach() - 33)
    assert rpc.rpc_sync(2, has_no_grad, (far,))


def has_no_grad(parameter: Any) -> bool:
    return parameter.local_value().grad is None


def make_partly_frozen() -> list[Any]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    net[0].requires_grad_(requires_grad=False)
    return [module.RRef(parameter) for parameter in net.parameters()]


def through(references: list[Any], x: Tensor) -> Tensor:
    a, b, c, d = (ref.local_value() for ref in references)
    return torch.sum((x @ a.T + b) @ c.T + d)


def frozen(rpc: Any) -> None:
    references = rpc.rpc_sync(2, make_partly_frozen)
    before = [ref.to_here().clone() for ref in references]
    optimizer = rpc.DistributedOptimizer(torch.optim.AdamW, references, lr=0.1)
    for _ in range(2):
        with rpc.autograd.context() as ctx:
            loss = rpc.rpc_sync(2, through, (references, torch.ones(2)))
            rpc.autograd.backward(ctx, [loss])
            optimizer.step(ctx)
    moved = [
        not torch.equal(ref.to_here(), old) for ref, old in zip(references, before, strict=True)
    ]
    assert moved == [False, False, True, True]
    all_frozen = rpc.DistributedOptimizer(torch.optim.SGD, references[:2], lr=0.1)
    with rpc.autograd.context() as ctx:
        all_frozen.step(ctx)


def test_frozen_parameters_stay_as_they_are(caller: Caller) -> None:
    caller(frozen)


# -- trouble -----------------------------------------------------------------------------------


class Fussy(torch.optim.SGD):
    """Its step fails."""

    def step(self, closure: Any = None) -> Any:
        """It does."""
        raise OSError("no step today")


def wrong(rpc: Any) -> None:
    good = rpc.remote(2, make_parameter, (2,))
    made = rpc.DistributedOptimizer
    for parameters, text in (
        ([], "empty"),
        (good, "list of RRefs"),
        (7, "list of RRefs"),
        ([good, make_parameter(1)], r"params_rrefs\[1\] is a Tensor"),
    ):
        with pytest.raises(ArgumentError, match=text):
            made(torch.optim.SGD, parameters, lr=0.1)
    with pytest.raises(ArgumentError, match="optimizer_class"):
        made("SGD", [good])
    for function, text in (
        (five, "no tensor but a int"),
        (no_leaf, "no leaf"),
    ):
        with pytest.raises(ArgumentError, match=f"parameter 1 of those of worker 2 .*{text}"):
            made(torch.optim.SGD, [good, rpc.remote(2, function)], lr=0.1)
    with pytest.raises(ValueError, match="learning rate"):
        made(torch.optim.SGD, [good], lr=-1)


def five() -> int:
    return 5


def no_leaf() -> Tensor:
    return make_parameter(1) * 2


def test_wrong_arguments(caller: Caller) -> None:
    caller(wrong)


def fails(rpc: Any) -> None:
    parameters = [rpc.remote(rank, make_parameter, (rank,)) for rank in (2, 3)]
    with rpc.autograd.context() as ctx:
        one = rpc.DistributedOptimizer(Fussy, parameters[:1], lr=0.1)
        with pytest.raises(OSError, match="no step today"):
            one.step(ctx)
        both = rpc.DistributedOptimizer(Fussy, parameters, lr=0.1)
        with pytest.raises(WorkerError, match="no step today") as info:
            both.step(ctx)
        assert info.value.ranks == [2, 3]
        good = rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        good.step(ctx)


def test_steps_that_fail(caller: Caller) -> None:
    caller(fails)


def test_an_owner_that_has_died(fresh: Any, engine: str) -> None:
    if engine == "threads":
        pytest.skip("its workers do not die alone")
    sess = fresh(4)
    sess.import_python_module(__name__)
    sess.sync_all(timeout=60)
    rpc = sess.rpc
    parameters = [rpc.remote(rank, make_parameter, (rank,)) for rank in (1, 2)]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with pytest.raises(module.WorkerLostError):
        rpc.rpc_sync(2, graphs.dies)
    with rpc.autograd.context() as ctx, pytest.raises(module.WorkerLostError, match="2"):
        optimizer.step(ctx)
