"""FSDP2, tensor and sequence parallel layers, both at once, and DCP's save and resume."""

import sys
from pathlib import Path

import record
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(torch.nn.Module):
    """A norm and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def train(model: torch.nn.Module, steps: int, seed: int, folder: Path | None = None) -> list[float]:
    """Losses; the state is saved to a folder after the steps, or loaded from it before."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if folder is not None and folder.exists():
        states = get_state_dict(model, optimizer)
        state = {"model": states[0], "optimizer": states[1]}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8, 8, generator=generator)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if folder is not None and not folder.exists():
        states = get_state_dict(model, optimizer)
        dist.barrier()
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    return losses


def tensor_parallel(mesh: object) -> torch.nn.Module:
    model = make()
    for block in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,))
    model = make()
    for block in model:
        fully_shard(block, mesh=line)
    fully_shard(model, mesh=line)
    first = train(model, 3, rank, folder / "checkpoint")

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    resumed_model = make()
    for block in resumed_model:
        fully_shard(block, mesh=square)
    fully_shard(resumed_model, mesh=square)
    resumed = train(resumed_model, 2, 10 + rank, folder / "checkpoint")

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed_model = fully_shard(make(), mesh=line, mp_policy=half)
    mixed = train(mixed_model, 2, rank)

    parts = train(tensor_parallel(line), 2, rank)

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    two = tensor_parallel(both["tensor"])
    for block in two:
        fully_shard(block, mesh=both["data"])
    fully_shard(two, mesh=both["data"])
    in_two = train(two, 2, rank)
    record.write(
        first=first,
        resumed=resumed,
        mixed=mixed,
        parts=parts,
        in_two=in_two,
        norms=record.norms(model),
        norms_resumed=record.norms(resumed_model),
        norms_in_two=record.norms(two),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
