"""Pipelines both ways: stages by hand, and a module that `pipeline` cuts."""

import record
import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)


class Model(torch.nn.Module):
    """Eight layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Part(torch.nn.Module):
    """Some of its layers."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = Model().layers[first:last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def run(schedule: object, modules: list[torch.nn.Module], rank: int) -> tuple[list, list]:
    """Losses where they are known, and the norms of the gradients."""
    x, y = torch.linspace(-1, 1, 48).view(8, 6), torch.ones(8, 6)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == 3:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    norms = [p.grad.double().norm() for module in modules for p in module.parameters()]
    return losses, norms


def main() -> None:
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    loss = torch.nn.functional.mse_loss
    found = {}
    for kind in (ScheduleGPipe, Schedule1F1B):
        part = Part(2 * rank, 2 * rank + 2)
        stage = PipelineStage(part, rank, 4, device)
        found[f"by hand, {kind.__name__}"] = run(kind(stage, 4, loss_fn=loss), [part], rank)
        split = {f"layers.{i}": SplitPoint.BEGINNING for i in (2, 4, 6)}
        whole = pipeline(Model(), mb_args=(torch.zeros(2, 6),), split_spec=split)
        made = whole.build_stage(rank, device=device)
        module = whole.get_stage_module(rank)
        found[f"cut, {kind.__name__}"] = run(kind(made, 4, loss_fn=loss), [module], rank)
    parts = [Part(rank, rank + 1), Part(rank + 4, rank + 5)]
    stages = [PipelineStage(part, rank + 4 * i, 8, device) for i, part in enumerate(parts)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss)
    found["interleaved"] = run(schedule, parts, rank)
    record.write(**found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
