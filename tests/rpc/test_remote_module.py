"""RemoteModule: made there, called from here, passed on."""

from typing import Any

import pytest
import torch
from torch import nn

from discolab import ArgumentError, SessionError
from discolab import rpc as module
from tests.rpc import graphs
from tests.rpc.conftest import Caller
from tests.rpc.graphs import Stage, close

pytestmark = pytest.mark.timeout(120)


def batch() -> torch.Tensor:
    return torch.arange(10, dtype=torch.float64).reshape(2, 5)


def works(rpc: Any, me: int) -> None:
    for to in (2, 0, me, "worker3", "controller"):
        stage = rpc.RemoteModule(to, Stage, (7,), {"width": 5})
        info = rpc.get_worker_info(to)
        assert info.name in repr(stage)
        wanted = Stage(7)(batch(), shift=2.0).detach()
        close(stage.forward(batch(), shift=2.0).detach(), wanted)
        close(stage(batch(), 2.0).detach(), wanted)
        close(stage.forward_async(batch(), shift=2.0).wait(30).detach(), wanted)
        ref = stage.module_rref()
        assert ref.owner() == info
        parameters = stage.remote_parameters()
        assert [p.owner() for p in parameters] == [info] * 3
        close(
            [p.to_here().detach() for p in parameters], [p.detach() for p in Stage(7).parameters()]
        )
        assert len(stage.remote_parameters(recurse=False)) == 1
        without = rpc.RemoteModule(to, Stage, [7], {"bias": False})
        assert len(without.remote_parameters()) == 2


def test_is_called_from_here(caller: Caller) -> None:
    caller(works, caller.rank)


def calls(stage: Any, x: torch.Tensor) -> torch.Tensor:
    return stage.forward(x) * 2


def keeps(rpc: Any) -> None:
    stage = rpc.RemoteModule(2, Stage, (7,))
    wanted = 2 * Stage(7)(batch()).detach()
    for to in (3, 2, -1):
        close(rpc.rpc_sync(to, calls, (stage, batch())).detach(), wanted)
    other = rpc.rpc_sync(3, make_on, (2,))
    close(other(batch()).detach() * 2, wanted)
    assert other.module_rref().owner_name() == "worker2"


def make_on(rank: int) -> Any:
    return module.RemoteModule(rank, Stage, (7,))


def test_is_passed_on(caller: Caller) -> None:
    caller(keeps)


def of_a_cell(rpc: Any) -> None:
    class Local(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    made = rpc.RemoteModule(2, Local, (3.0,))
    x = torch.tensor(2.0, requires_grad=True)
    with rpc.autograd.context() as ctx:
        rpc.autograd.backward(ctx, [made(x)])
        assert rpc.autograd.get_gradients(ctx)[x].item() == 3
        found = rpc.rpc_sync(2, graphs.gradients_of, (ctx, made.module_rref()))
        assert [grad.item() for grad in found] == [2]
    close(rpc.RemoteModule(3, lambda: nn.Identity())(batch()), batch())


def test_of_a_class_defined_on_the_spot(caller: Caller) -> None:
    caller(of_a_cell)


def wrong(rpc: Any) -> None:
    with pytest.raises(KeyError, match="no stage 3"):
        rpc.RemoteModule(2, graphs.bad_stage, (3,))
    with pytest.raises(TypeError, match="argument"):
        rpc.RemoteModule(2, Stage)
    with pytest.raises(ArgumentError, match="module_cls"):
        rpc.RemoteModule(2, "Stage")
    with pytest.raises(ArgumentError, match="no worker 9"):
        rpc.RemoteModule(9, Stage, (1,))
    with pytest.raises(ArgumentError, match=r"no torch.nn.Module but a dict"):
        rpc.RemoteModule(2, dict)
    stage = rpc.RemoteModule(2, Stage, (1,))
    with pytest.raises(RuntimeError, match="shapes"):
        stage(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shapes"):
        stage.forward_async(torch.ones(2, 4, dtype=torch.float64)).wait(30)
    with pytest.raises(SessionError, match="to_here"):
        rpc.rpc_sync(3, local_value, (stage,))


def local_value(stage: Any) -> Any:
    return stage.module_rref().local_value()


def test_wrong_arguments(caller: Caller) -> None:
    caller(wrong)
