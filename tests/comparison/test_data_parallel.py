"""`discolab.compare` on programs of which each worker has a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import discolab
from discolab import Session, ccl, compare
from discolab.comparison import ProgramComparison
from tests.comparison.transformer import place

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    with discolab.make_session(4, "threads", devices="cpu", timeout=30) as session:
        yield session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(torch.tanh(self.a(x)))) * 1.0


def loaded(state: State) -> Net:
    model = Net()
    model.load_state_dict(state)
    return model


def ddp(state: State) -> nn.Module:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    return nn.parallel.DistributedDataParallel(loaded(state))


def fsdp(state: State) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    mesh, model = init_device_mesh("cpu", (place()[1],)), loaded(state)
    for part in (model.a, model.c):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def averaged(state: State, but: str = "", factor: float = 0.0) -> nn.Module:
    """By hand; the gradient of one parameter with another factor, or (0) not at all."""
    model, n = loaded(state), place()[1]

    def average(by: float) -> Callable[[torch.Tensor], None]:
        def synchronise(parameter: torch.Tensor) -> None:
            ccl.all_reduce_(parameter.grad)
            parameter.grad /= n / by

        return synchronise

    for name, parameter in model.named_parameters():
        if name != but:
            parameter.register_post_accumulate_grad_hook(average(1.0))
        elif factor:
            parameter.register_post_accumulate_grad_hook(average(factor))
    return model


def mean(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def total(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum()


def run(
    session: Session, make: Any, *how: Any, loss: Any = None, **options: Any
) -> ProgramComparison:
    torch.manual_seed(1)
    reference = Net()
    model = session.call_packed(make, reference.state_dict(), *how)
    return compare(reference, model, X, layouts={"input": Shard(0)}, loss=loss, **options)


@pytest.mark.parametrize("loss", [None, mean, total], ids=["random", "mean", "sum"])
@pytest.mark.parametrize("make", [ddp, fsdp, averaged])
def test_a_right_data_parallel_program_agrees(four: Session, make: Any, loss: Any) -> None:
    found = run(four, make, loss=loss)
    assert found.agrees, found
    assert found.unmatched == found.only_in_reference == found.only_in_sharded == ()
    assert len([p for p in found.gradients if p.kind == "parameter"]) == 6
    words = "× the reference's" if loss is mean else "are averaged over workers 0-3"
    assert len(found.notes) == 1
    assert words in found.notes[0]


def test_modules_in_a_wrapper_may_be_named(four: Session) -> None:
    names = {name: f"module.{name}" for name in "abc"}
    found = run(four, ddp, names=names)
    assert found.agrees, found
    assert found.only_in_sharded == ()


@pytest.mark.parametrize("loss", [None, mean], ids=["random", "mean"])
@pytest.mark.parametrize("name", ["a.weight", "c.bias"])
def test_a_gradient_that_is_not_synchronised_is_named(four: Session, name: str, loss: Any) -> None:
    found = run(four, averaged, name, loss=loss)
    assert found.first is not None
    assert found.first.point.name == f"{name}.grad"
    assert "the all-reduce of this gradient is missing" in str(found.first)


@pytest.mark.parametrize("loss", [None, mean], ids=["random", "mean"])
@pytest.mark.parametrize(("factor", "words"), [(4.0, "is 4 times"), (3.0, "is 3 times")])
def test_a_gradient_with_another_factor_is_named(
    four: Session, factor: float, words: str, loss: Any
) -> None:
    found = run(four, averaged, "b.weight", factor, loss=loss)
    assert found.first is not None
    assert found.first.point.name == "b.weight.grad"
    assert words in str(found.first)
    wrong = [p.name for p in found.gradients if not p.agrees]
    assert wrong == ["b.weight.grad"]


@pytest.mark.parametrize("loss", [None, mean], ids=["random", "mean"])
def test_replicas_that_nothing_synchronises_are_blamed(four: Session, loss: Any) -> None:
    found = run(four, loaded, loss=loss)
    assert found.first is not None
    assert found.first.point.name.startswith("c.")
    assert "the all-reduce of this gradient is missing" in str(found.first)


def test_a_lone_average_among_sums_is_named(four: Session) -> None:
    def summed(state: State) -> nn.Module:
        model = loaded(state)
        for name, parameter in model.named_parameters():

            def add(parameter: torch.Tensor, by: int = 4 if name == "a.bias" else 1) -> None:
                ccl.all_reduce_(parameter.grad)
                parameter.grad /= by

            parameter.register_post_accumulate_grad_hook(add)
        return model

    found = run(four, summed)
    assert found.first is not None
    assert found.first.point.name == "a.bias.grad"
    assert "is the reference / 4" in str(found.first)


def test_a_wrong_backward_is_found_in_a_mean_too(four: Session) -> None:
    def wrong(state: State) -> nn.Module:
        model = averaged(state)
        model.b.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
        return model

    found = run(four, wrong, loss=mean)
    assert found.first is not None
    assert found.first.point.name == "b.input.grad"
    assert "is 2 times the reference" in str(found.first)


def test_each_worker_may_take_its_part_itself(four: Session) -> None:
    reference = Net()
    four["model"] = four.call_packed(averaged, reference.state_dict())

    def program(x: torch.Tensor) -> Any:
        rank, n = place()
        return discolab.current_worker().namespace["model"](x.chunk(n)[rank])

    found = compare(reference, program, X, module=four["model"])
    wrong = [p.name for p in found.gradients if p.kind == "parameter" and not p.agrees]
    assert wrong == []
    assert "averaged over workers 0-3" in found.notes[0]


def test_the_average_is_over_the_axis_along_which_the_batch_is_cut(four: Session) -> None:
    four.mesh(dp=2, tp=2)
    try:
        reference = Net()

        def replica(state: State) -> nn.Module:
            model = loaded(state)

            def average(parameter: torch.Tensor) -> None:
                ccl.all_reduce_(parameter.grad)
                parameter.grad /= place()[1]  # both workers along tp have the same

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(average)
            return model

        model = four.call_packed(replica, reference.state_dict())
        found = compare(reference, model, X, layouts={"input": [Shard(0), Replicate()]})
    finally:
        four._mesh = None
    assert found.agrees, found
    assert "averaged over groups of 2 workers" in found.notes[0]


def trained(model: nn.Module, steps: int, x: torch.Tensor) -> State:
    """Steps of AdamW on the whole batch; the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_in_shards(model: nn.Module, steps: int, x: torch.Tensor, sums: bool = True) -> State:
    """The same of ZeRO: each worker steps on its shard of flat parameters."""
    rank, n = place()
    parameters = list(model.parameters())
    rest = -sum(p.numel() for p in parameters) % n

    def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.pad(torch.cat([t.reshape(-1) for t in tensors]), (0, rest))

    shard = nn.Parameter(flat([p.detach() for p in parameters]).chunk(n)[rank].clone())
    optimizer = torch.optim.AdamW([shard], lr=0.05)
    for _ in range(steps):
        model.zero_grad()
        model(x.chunk(n)[rank]).square().mean().backward()
        mine = flat([p.grad for p in parameters if p.grad is not None])
        shard.grad = ccl.reduce_scatter(mine, "avg") if sums else mine.chunk(n)[rank].clone()
        optimizer.step()
        whole = ccl.all_gather(shard.detach()).reshape(-1)
        parts = whole.split([*(p.numel() for p in parameters), rest])
        with torch.no_grad():
            for parameter, part in zip(parameters, parts[:-1], strict=True):
                parameter.copy_(part.view_as(parameter))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def compare_trained(four: Session, steps: int, sums: bool = True) -> ProgramComparison:
    torch.manual_seed(0)
    model = Net()

    def make(state: State) -> Callable[..., State]:
        return partial(trained_in_shards, loaded(state), steps, sums=sums)

    sharded = four.call_packed(make, model.state_dict())
    return compare(partial(trained, model, steps), sharded, X)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_a_step_leaves_behind_are_no_difference(four: Session, steps: int) -> None:
    found = compare_trained(four, steps)
    assert found.agrees, str(found)
    assert "that the program leaves behind is each worker's own" in str(found)


def test_gradients_that_a_step_takes_unsummed_are_one(four: Session) -> None:
    assert not compare_trained(four, 2, sums=False).agrees
