"""torch.distributed on workers: what becomes of the tensors that a program gives, as with Gloo."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from discolab import WorkerError, ccl

from .conftest import Start

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.any_engine,
]
LARGE = 30_000  # elements: more than go through the coordinator of processes


def writes(size: int) -> dict[str, list[int]]:
    """By how much each operation raises the version counter of what it writes."""
    rank = dist.get_rank()

    def made(count: int = 1) -> torch.Tensor:
        return torch.full((count * size,), rank + 1.0)

    found = {}

    def note(name: str, outs: list[torch.Tensor], operate: Callable[[], Any]) -> None:
        operate()
        found[name] = [out._version for out in outs]

    one, pair = [made()], [made(), made()]
    note("all_reduce", one, lambda: dist.all_reduce(one[0]))
    note("reduce", one, lambda: dist.reduce(one[0], 1))
    note("broadcast", one, lambda: dist.broadcast(one[0], 1))
    note("scatter", one, lambda: dist.scatter(one[0], pair if rank == 0 else None))
    double = [made(2)]
    note("all_to_all_single", double, lambda: dist.all_to_all_single(double[0], made(2)))
    note("recv", one, lambda: dist.recv(one[0], 0) if rank else dist.send(one[0], 1))
    note("ccl", one, lambda: ccl.all_reduce_(one[0]))
    note("all_gather", pair, lambda: dist.all_gather(pair, made()))
    wholes = [made(), made(2)]
    note("reduce_scatter_tensor", wholes[:1], lambda: dist.reduce_scatter_tensor(*wholes))
    return found


def not_resizable(size: int) -> list[str]:
    """Operations after which torch refuses to resize the storage of what went in or came out."""
    rank = dist.get_rank()
    found = []

    def note(name: str, operate: Callable[..., Any], *counts: int) -> None:
        tensors = [torch.full((count * size,), rank + 1.0) for count in counts]
        operate(*tensors)
        if not all(tensor.untyped_storage().resizable() for tensor in tensors):
            found.append(name)

    note("all_reduce", dist.all_reduce, 1)
    note("reduce", lambda one: dist.reduce(one, 1), 1)
    note("broadcast", lambda one: dist.broadcast(one, 1), 1)
    note("scatter", lambda one, *parts: dist.scatter(one, None if rank else [*parts]), 1, 1, 1)
    note("gather", lambda one, *outs: dist.gather(one, None if rank else [*outs]), 1, 1, 1)
    note("all_to_all_single", dist.all_to_all_single, 2, 2)
    note("send", lambda one: dist.recv(one, 0) if rank else dist.send(one, 1), 1)
    note("all_gather", lambda one, *outs: dist.all_gather([*outs], one), 1, 1, 1)
    note("all_gather_into_tensor", dist.all_gather_into_tensor, 2, 1)
    note("reduce_scatter_tensor", dist.reduce_scatter_tensor, 1, 2)
    return found


@pytest.mark.parametrize("size", [3, LARGE])
def test_autograd_learns_of_the_writes_of_which_gloo_tells_it(start: Start, size: int) -> None:
    silent = ("all_reduce", "reduce", "broadcast", "scatter", "all_to_all_single", "recv", "ccl")
    expected = {name: [0] for name in silent}
    expected |= {"all_gather": [1, 1], "reduce_scatter_tensor": [1]}
    with start(2) as sess:
        assert sess.call_packed(writes, size).debug_get_from_all() == [expected] * 2


@pytest.mark.parametrize("size", [3, LARGE])
def test_storages_can_be_resized_afterwards_as_fsdp_does(start: Start, size: int) -> None:
    with start(2) as sess:
        assert sess.call_packed(not_resizable, size).debug_get_from_all() == [[], []]


def reference_first() -> tuple[Any, ...]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    weight = torch.ones(4, 4, requires_grad=True)
    expected = weight.square().sum()
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    dist.broadcast(weight, 0)  # a leaf
    expected.backward()
    first, second = (weight * (dist.get_rank() + 1)).chunk(2)
    dist.broadcast(first, 1)
    assert weight.grad is not None
    return weight.grad.sum().item(), first[0, 0].item(), second[0, 0].item(), type(part).__name__


def test_a_reference_can_be_differentiated_after_its_tensor_was_distributed(start: Start) -> None:
    with start(2) as sess:
        found = sess.call_packed(reference_first).debug_get_from_all()
    assert found == [(32.0, 2.0, rank + 1.0, "DTensor") for rank in range(2)]


def other_shapes(shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """Everything that Gloo does where members give the same elements in different shapes."""
    rank = dist.get_rank()
    mine = shapes[rank]

    def made() -> torch.Tensor:
        return (torch.arange(torch.Size(mine).numel()) * (rank + 1.0)).reshape(mine)

    found = []
    for operate in (
        lambda t: dist.recv(t, 0) if rank else dist.send(t, 1),
        lambda t: dist.broadcast(t, 1),
        lambda t: dist.all_reduce(t),
        lambda t: dist.reduce(t, 1, dist.ReduceOp.MAX),
        lambda t: dist.scatter(t, [made() + 1, made()] if rank == 0 else None),
    ):
        tensor = made()
        operate(tensor)
        found.append(tensor.reshape(-1))
    outs = [made(), made()]
    dist.all_gather(outs, made())
    dist.gather(made(), [outs[0], made()] if rank == 0 else None)
    assert all(out.shape == mine for out in outs)
    return [*found, *(out.reshape(-1) for out in outs)]


@pytest.mark.parametrize("shapes", [((), (1,)), ((2, 3), (6,)), ((2, LARGE), (LARGE, 2))])
def test_as_many_elements_are_enough(start: Start, shapes: tuple[tuple[int, ...], ...]) -> None:
    count = torch.Size(shapes[0]).numel()
    flat = ((count,), (count,))
    with start(2) as sess:
        found, expected = (
            sess.call_packed(other_shapes, each).debug_get_from_all() for each in (shapes, flat)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_other_counts_and_dtypes_are_refused_and_ccl_wants_one_shape(start: Start) -> None:
    def disagree(given: list[torch.Tensor], operate: Callable[[torch.Tensor], Any]) -> None:
        operate(given[dist.get_rank()])

    cases: list[tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], str]] = [
        ([torch.ones(4), torch.ones(2, 3)], dist.all_reduce, "disagree on the shape"),
        ([torch.ones(2), torch.ones(2).int()], dist.all_reduce, "disagree on the dtype"),
        ([torch.ones(2), torch.ones(2, 1)], ccl.all_reduce, "disagree on the shape"),
    ]
    with start(2) as sess:
        for given, operate, text in cases:
            with pytest.raises(WorkerError, match=text):
                sess.call_packed(disagree, given, operate).debug_get_from_all()


class Stages(nn.Module):
    """Two layers with a cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        return self.second(self.first(x).relu())


def traced_pipeline(schedule: str) -> tuple[Any, Any]:
    """Losses and the gradient of this rank's weight: of a traced pipeline, and of the model."""
    from torch.distributed import pipelining

    torch.manual_seed(0)
    model, x, target = Stages(), torch.randn(4, 4), torch.randn(4, 4)
    parts = zip(x.chunk(2), target.chunk(2), strict=True)
    losses = [nn.functional.mse_loss(model(a), b) for a, b in parts]
    (sum(losses) / 2).backward()
    own = (model.first, model.second)[dist.get_rank()]
    assert own.weight.grad is not None
    expected = own.weight.grad.clone()
    model.zero_grad()
    split = {"second": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(model, mb_args=(x[:2],), split_spec=split)
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    runner = getattr(pipelining, schedule)(stage, 2, loss_fn=nn.functional.mse_loss)
    seen: list[torch.Tensor] = []
    if dist.get_rank() == 0:
        runner.step(x)
    else:
        runner.step(target=target, losses=seen)
    (grad,) = (p.grad for n, p in stage.submod.named_parameters() if n.endswith("weight"))
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(seen, [loss.detach() for loss in losses] if seen else [])
    return len(seen), dist.get_rank()


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_traced_pipeline_runs(start: Start, schedule: str) -> None:
    with start(2) as sess:
        found = sess.call_packed(traced_pipeline, schedule).debug_get_from_all()
    assert found == [(0, 0), (2, 1)]


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.filterwarnings("ignore:Gathering a tensor with zero elements:UserWarning")
def test_sharded_tensors_are_gathered(start: Start) -> None:
    def gather() -> tuple[str, list[float]]:
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(3)])
        sharded = sharded_tensor.empty(spec, (2,))  # the last worker has no part of it
        for shard in sharded.local_shards():
            shard.tensor.fill_(7.0)
        whole = torch.zeros(2) if dist.get_rank() == 0 else None
        sharded.gather(0, whole)
        return str(sharded.to(torch.float64).device), [] if whole is None else whole.tolist()

    with start(3) as sess:
        found = sess.call_packed(gather).debug_get_from_all()
        assert found == [("cpu", [7.0, 7.0]), ("cpu", []), ("cpu", [])]
