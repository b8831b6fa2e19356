"""Pipeline schedules: stages made by hand and by tracing."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipe_split, pipeline

from .catalogue import N, data, program

CPU = torch.device("cpu")


class Layer(nn.Module):
    """One stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Stack(nn.Module):
    """All stages."""

    def __init__(self, count: int = N) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Cut(nn.Module):
    """Says itself where it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Layer() for _ in range(N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        pipe_split()
        x = self.b(x)
        pipe_split()
        x = self.c(x)
        pipe_split()
        return self.d(x)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, target)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return data(rows, 5) / 8, data(rows, 5, shift=2) / 8


def reference(model: nn.Module, microbatches: int) -> tuple[list[torch.Tensor], nn.Module]:
    """Losses and, in `grad`, gradients of the model on one rank."""
    model = copy.deepcopy(model)
    x, target = batch()
    parts = zip(x.chunk(microbatches), target.chunk(microbatches), strict=True)
    losses = [loss_of(model(a), b) for a, b in parts]
    (sum(losses) / microbatches).backward()  # type: ignore[union-attr]
    return [loss.detach() for loss in losses], model


def stepped(schedule: Any, first: bool, last: bool, losses: list[torch.Tensor]) -> Any:
    x, target = batch()
    given: dict[str, Any] = {"target": target, "losses": losses} if last else {}
    return schedule.step(*([x] if first else []), **given)


@program(rounding=True, schedule=["ScheduleGPipe", "Schedule1F1B"], microbatches=[4, 8])
def one_stage_a_rank(schedule: str, microbatches: int) -> Any:
    model, me = Stack(), dist.get_rank()
    expected, whole = reference(model, microbatches)
    stage = PipelineStage(model.layers[me], me, N, CPU)
    runner = getattr(pipelining, schedule)(stage, microbatches, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    y = stepped(runner, me == 0, me == N - 1, losses)
    grads = [p.grad for p in model.layers[me].parameters()]
    torch.testing.assert_close(grads, [p.grad for p in whole.layers[me].parameters()])
    if losses:
        torch.testing.assert_close(losses, expected)
    return y, losses, grads


@program(rounding=True, schedule=["ScheduleInterleaved1F1B", "ScheduleLoopedBFS",
                                  "ScheduleInterleavedZeroBubble"])  # fmt: skip
def several_stages_a_rank(schedule: str) -> Any:
    model, me, own = Stack(2 * N), dist.get_rank(), (dist.get_rank(), dist.get_rank() + N)
    expected, whole = reference(model, 8)
    stages = [PipelineStage(model.layers[i], i, 2 * N, CPU) for i in own]
    runner = getattr(pipelining, schedule)(stages, 8, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    stepped(runner, me == 0, me == N - 1, losses)
    grads = [p.grad for i in own for p in model.layers[i].parameters()]
    wanted = [p.grad for i in own for p in whole.layers[i].parameters()]
    torch.testing.assert_close(grads, wanted)
    if losses:
        torch.testing.assert_close(losses, expected)
    return losses, grads


@program(rounding=True, schedule=["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def v_shaped(schedule: str) -> Any:
    model, me, own = Stack(2 * N), dist.get_rank(), (dist.get_rank(), 2 * N - 1 - dist.get_rank())
    expected, whole = reference(model, 8)
    stages = [PipelineStage(model.layers[i], i, 2 * N, CPU) for i in own]
    runner = getattr(pipelining, schedule)(stages, 8, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    stepped(runner, me == 0, me == 0, losses)
    grads = [p.grad for i in own for p in model.layers[i].parameters()]
    wanted = [p.grad for i in own for p in whole.layers[i].parameters()]
    torch.testing.assert_close(grads, wanted)
    if losses:
        torch.testing.assert_close(losses, expected)
    return losses, grads


@program(rounding=True, schedule=["ScheduleGPipe", "Schedule1F1B"], how=["pipe_split", "spec"])
def traced(schedule: str, how: str) -> Any:
    """torch's frontend warms stages up with tensors of no dimension."""
    me = dist.get_rank()
    if how == "pipe_split":
        model: nn.Module = Cut()
        pipe = pipeline(model, mb_args=(batch()[0][:2],))
    else:
        model = Stack()
        cuts = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, N)}
        pipe = pipeline(model, mb_args=(batch()[0][:2],), split_spec=cuts)
    expected, _ = reference(model, 4)
    stage = pipe.build_stage(me, CPU)
    runner = getattr(pipelining, schedule)(stage, 4, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    y = stepped(runner, me == 0, me == N - 1, losses)
    if losses:
        torch.testing.assert_close(losses, expected)
    names = sorted(name for name, _ in stage.submod.named_parameters())
    return y, losses, names, [p.grad for _, p in sorted(stage.submod.named_parameters())]


@program(rounding=True, steps=[3])
def several_steps(steps: int) -> Any:
    model, me = Stack(), dist.get_rank()
    stage = PipelineStage(model.layers[me], me, N, CPU)
    runner = pipelining.Schedule1F1B(stage, 4, loss_fn=loss_of)
    opt = torch.optim.SGD(model.layers[me].parameters(), lr=0.25)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        opt.zero_grad()
        stepped(runner, me == 0, me == N - 1, found)
        opt.step()
    return found, list(model.layers[me].parameters())


@program(rounding=True)
def forward_alone() -> Any:
    model, me = Stack(), dist.get_rank()
    stage = PipelineStage(model.layers[me], me, N, CPU)
    runner = pipelining.ScheduleGPipe(stage, 4)
    x, _ = batch()
    y = runner.eval(x) if me == 0 else runner.eval()
    if me == N - 1:
        torch.testing.assert_close(y, model(x))
    return y


@program(rounding=True)
def with_data_parallel() -> Any:
    """Two pipelines of two stages, whose stages are sharded over the two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, place = Stack(2), mesh.get_local_rank("pp")
    layer = fully_shard(model.layers[place], mesh=mesh["dp"])
    stage = PipelineStage(layer, place, 2, CPU, group=mesh.get_group("pp"))
    runner = pipelining.Schedule1F1B(stage, 4, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    stepped(runner, place == 0, place == 1, losses)
    return losses, [p.grad for p in layer.parameters()]
