"""Models of torch.distributed on a GPU that all workers share learn what one process learns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from discolab import Session, ccl, current_worker, make_session
from tests.gpus import GPU, needs_gpu

pytestmark = needs_gpu

RANKS, STEPS, ROWS, WIDTH = 4, 4, 64, 256
Program = Callable[[], "list[float]"]


@pytest.fixture(scope="module", params=["threads", "processes"])
def sess(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Four workers on one GPU."""
    with make_session(RANKS, request.param, devices=str(GPU), timeout=60) as session:
        yield session


def model(device: torch.device) -> nn.Sequential:
    """The same on all ranks."""
    made = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made) / WIDTH**0.5)
    return layers.to(device)


def batch(step: int, device: torch.device) -> torch.Tensor:
    """Of all ranks."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)


def learn(
    net: nn.Module, rows: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> list[float]:
    """Some steps without a look at the device; the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = net(rows(batch(step, GPU))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@functools.cache
def alone() -> list[float]:
    """What one process learns."""
    return learn(model(GPU))


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(RANKS)[dist.get_rank()]


def averaged(losses: list[float]) -> list[float]:
    found = torch.tensor(losses, device=GPU)
    dist.all_reduce(found, dist.ReduceOp.AVG)
    return found.tolist()


def ddp() -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    return averaged(learn(DistributedDataParallel(model(GPU), device_ids=[GPU]), own_rows))


def fsdp2() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(GPU), init_device_mesh(GPU.type, (RANKS,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return averaged(learn(net, own_rows))


def fsdp2_in_two_dimensions() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(GPU), init_device_mesh(GPU.type, (2, 2), mesh_dim_names=("rep", "shard"))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return averaged(learn(net, own_rows))


def tensor_parallel() -> list[float]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(GPU.type, (RANKS,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return learn(parallelize_module(model(GPU), mesh, plan))


def by_hand() -> list[float]:
    """Gradients averaged by ccl."""

    net = model(GPU)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = net(own_rows(batch(step, GPU))).square().mean()
        loss.backward()
        for parameter in net.parameters():
            ccl.all_reduce_(parameter.grad, "avg")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return averaged([float(loss) for loss in losses])


@pytest.mark.parametrize("program", [ddp, fsdp2, fsdp2_in_two_dimensions, tensor_parallel, by_hand])
def test_it_learns_what_one_process_learns(sess: Session, program: Program) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for losses in sess.call_packed(program).debug_get_from_all():
        assert losses == pytest.approx(alone(), rel=1e-4)


def test_a_distributed_tensor_is_cut_multiplied_and_joined(sess: Session) -> None:
    def program() -> float:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh(GPU.type, (RANKS,))
        whole = batch(0, GPU)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        assert rows.to_local().device == GPU
        assert torch.equal(rows.to_local(), own_rows(whole))
        columns = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
        product = rows @ columns.redistribute(mesh, [Replicate()])
        return float((product.full_tensor() - whole @ whole.t()).abs().max())

    assert max(sess.call_packed(program).debug_get_from_all()) < 1e-3


def test_the_backend_knows_its_devices(sess: Session) -> None:
    def program() -> tuple[int, str]:
        gathered: list[object] = [None] * RANKS
        dist.all_gather_object(gathered, current_worker().rank)
        assert gathered == list(range(RANKS))
        dist.barrier()
        return dist.get_world_size(), str(current_worker().device)

    assert sess.call_packed(program).debug_get_from_all() == [(RANKS, str(GPU))] * RANKS


def test_gradients_go_through_collectives(sess: Session) -> None:
    def program() -> list[float]:
        rank = current_worker().rank
        x = torch.full((1 << 16,), float(rank), device=GPU, requires_grad=True)
        ccl.autograd.all_reduce(x * 2).square().sum().backward()
        return [float(x.grad.min()), float(x.grad.max())]

    # the sum is 12 everywhere; each rank's loss depends on each rank's x
    assert sess.call_packed(program).debug_get_from_all() == [[192.0, 192.0]] * RANKS


def test_checkpoints_of_torch_hold_what_is_on_the_gpu(sess: Session, tmp_path: object) -> None:
    folder = str(tmp_path)

    def program() -> bool:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh(GPU.type, (RANKS,))
        whole = batch(1, GPU)
        dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
        other = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])
        dcp.load({"w": other}, checkpoint_id=folder)
        return torch.equal(other.full_tensor(), whole)

    assert sess.call_packed(program).debug_get_from_all() == [True] * RANKS
