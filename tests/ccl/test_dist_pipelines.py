"""Pipeline schedules and checkpoints on worker threads equal one device."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .conftest import Start

N = 4

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def everywhere(start: Start, func: Callable[..., Any], *args: Any, turns: int = 3) -> list[Any]:
    """Run on four workers, several times in the session; what the last run gave."""
    with start(N) as sess:
        for _ in range(turns):
            values = sess.call_packed(func, *args).debug_get_from_all()
    return values


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)])


def reference(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The model after one pass in four parts on one device, and its output."""
    model = copy.deepcopy(model)
    output = model(x)
    losses = [F.mse_loss(a, b) for a, b in zip(output.chunk(4), y.chunk(4), strict=True)]
    (torch.stack(losses).sum() / 4).backward()
    return model, output.detach()


def assert_same_gradients(got: nn.Module, expected: nn.Module) -> None:
    for mine, other in zip(got.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
def test_schedules_with_one_stage_a_worker(start: Start, name: str) -> None:
    def run() -> None:
        from torch.distributed import pipelining

        rank = dist.get_rank()
        model = layers(N)
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        expected, output = reference(model, x, y)
        stage = pipelining.PipelineStage(model[rank], rank, N, torch.device("cpu"))
        schedule = getattr(pipelining, name)(stage, n_microbatches=4, loss_fn=F.mse_loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == N - 1:
            got = schedule.step(target=y, losses=losses)
            torch.testing.assert_close(got, output, atol=1e-5, rtol=1e-4)
            assert len(losses) == 4
        else:
            schedule.step()
        assert_same_gradients(model[rank], expected[rank])

    everywhere(start, run)


@pytest.mark.any_engine
def test_a_schedule_with_several_stages_a_worker(start: Start) -> None:
    def run() -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

        rank = dist.get_rank()
        model = layers(2 * N)
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        expected, _ = reference(model, x, y)
        mine = [rank, rank + N]
        stages = [PipelineStage(model[i], i, 2 * N, torch.device("cpu")) for i in mine]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=F.mse_loss)
        if rank == 0:
            schedule.step(x)
        elif rank == N - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        for i in mine:
            assert_same_gradients(model[i], expected[i])

    everywhere(start, run)


def test_a_pipeline_of_sharded_stages(start: Start) -> None:
    def run() -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        model = layers(2)
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        expected, _ = reference(model, x, y)
        place, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        mine = model[place]
        fully_shard(mine, mesh=mesh["dp"])
        stage = PipelineStage(mine, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
        half = slice(8 * part, 8 * part + 8)
        if place == 0:
            schedule.step(x[half])
        else:
            schedule.step(target=y[half], losses=[])
        for got, other in zip(mine.parameters(), expected[place].parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), other.grad, atol=1e-5, rtol=1e-4)

    everywhere(start, run)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.any_engine
def test_a_checkpoint_is_loaded_in_another_layout(start: Start, tmp_path: Path) -> None:
    def save_and_load(turn: list[int]) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

        folder = tmp_path / str(len(turn))
        line = dist.init_device_mesh("cpu", (N,))
        x = torch.arange(52.0).reshape(13, 4)
        saved = {
            "rows": distribute_tensor(x, line, [Shard(0)]),
            "plain": torch.arange(3.0),
            "number": 3,
            "own": {f"rank {dist.get_rank()}": torch.tensor([dist.get_rank()])},
        }
        dcp.save(saved, checkpoint_id=folder)
        grid = dist.init_device_mesh("cpu", (2, 2))
        for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(1)]):
            state: dict[str, Any] = {
                "rows": zeros(13, 4, device_mesh=grid, placements=placements),
                "plain": torch.zeros(3),
                "number": 0,
                "own": {f"rank {dist.get_rank()}": torch.tensor([-1])},
            }
            dcp.load(state, checkpoint_id=folder)
            assert torch.equal(state["rows"].full_tensor(), x)
            assert torch.equal(state["plain"], torch.arange(3.0))
            assert state["number"] == 3
            assert state["own"] == {f"rank {dist.get_rank()}": torch.tensor([dist.get_rank()])}

    with start(N) as sess:
        for turn in range(3):
            sess.call_packed(lambda turn=turn: save_and_load([0] * turn)).debug_get_from_all()
    whole = {"rows": torch.zeros(13, 4)}  # in the notebook, without any process group
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="single process"):
        dcp.load(whole, checkpoint_id=tmp_path / "0")
    assert torch.equal(whole["rows"], torch.arange(52.0).reshape(13, 4))


@pytest.mark.any_engine
def test_each_worker_keeps_its_plan(start: Start, tmp_path: Path) -> None:
    def save_twice_and_load() -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.tensor import Shard, distribute_tensor, zeros

        mesh, x = dist.init_device_mesh("cpu", (N,)), torch.arange(26.0).reshape(13, 2)
        for turn in range(3):
            dcp.save(
                {"rows": distribute_tensor(x + turn, mesh, [Shard(0)]), "plain": x * turn},
                checkpoint_id=tmp_path / str(turn),
                planner=DefaultSavePlanner(enable_plan_caching=True),
            )
        for turn in range(3):
            rows = zeros(13, 2, device_mesh=mesh, placements=[Shard(1)])
            state: dict[str, Any] = {"rows": rows, "plain": torch.zeros(13, 2)}
            dcp.load(state, checkpoint_id=tmp_path / str(turn))
            assert torch.equal(state["rows"].full_tensor(), x + turn)
            assert torch.equal(state["plain"], x * turn)

    everywhere(start, save_twice_and_load, turns=1)


def test_a_sharded_model_and_its_optimizer_are_saved(start: Start, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 8, generator=generator)
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def run() -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard

        def sharded(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = layers(2)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

        model, optimizer = sharded(dist.init_device_mesh("cpu", (N,)))
        train(model, optimizer, range(2))
        values, states = get_state_dict(model, optimizer)
        dcp.save({"model": values, "optimizer": states}, checkpoint_id=tmp_path)

        grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        resumed, other = sharded(grid)
        values, states = get_state_dict(resumed, other)
        state = {"model": values, "optimizer": states}
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            resumed, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        train(resumed, other, range(2, 4))

        expected = layers(2)
        train(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2), range(4))
        for got, whole in zip(resumed.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), whole, atol=1e-5, rtol=1e-4)

    everywhere(start, run, turns=1)
