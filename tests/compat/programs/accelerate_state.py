"""What accelerate does beside a loop: dispatched batches, FSDP2, local SGD, saved states."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    broadcast_object_list,
    pad_across_processes,
    set_seed,
)
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def fresh(**options: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size)[:, None] / 9)


def train(accelerator: Accelerator, size: int = 32, **options: Any) -> Any:
    set_seed(5)
    net = accelerator.prepare(model())  # FSDP2 wants the model before the optimizer
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(data(size), 4, **options))
    losses, seen = [], []
    for x, y in loader:
        loss = mse_loss(net(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seen.append(sorted(accelerator.gather_for_metrics(y).flatten().tolist()))
    return losses, seen, record.norms(accelerator.unwrap_model(net))


def sharded() -> Any:
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
    )
    try:
        return train(fresh(fsdp_plugin=plugin))
    finally:
        del os.environ["ACCELERATE_USE_FSDP"]


def local() -> Any:
    accelerator = fresh()
    set_seed(4)
    net, loader = accelerator.prepare(model(), DataLoader(data(32), 2))
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), 0.1))
    losses = []
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=2, enabled=True) as steps:
        for x, y in loader:
            with accelerator.no_sync(net):
                loss = mse_loss(net(x), y)
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.step()
            losses.append(loss.item())
    return losses, record.norms(net)


def saved(folder: Path) -> Any:
    place = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = fresh(project_config=place)
    set_seed(2)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    loader = DataLoader(data(40), 4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses, path = [], ""
    for index, (x, y) in enumerate(loader):
        if index == 1:
            path = accelerator.save_state()
            drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
        loss = mse_loss(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.load_state(path)
    again = [torch.rand(1).item(), random.random(), np.random.rand()]
    for x, y in accelerator.skip_first_batches(loader, 1):
        losses.append(mse_loss(net(x), y).item())
    accelerator.wait_for_everyone()
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return losses, drawn == again, names, record.norms(net)


def main() -> None:
    state = PartialState(cpu=True)
    dispatched = fresh(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    seedable = fresh(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    with state.split_between_processes(list(range(10))) as part:
        parts = list(part)
    rank = state.process_index
    folder = Path(sys.argv[1]) / "project"
    record.write(
        dispatched=train(dispatched),
        seedable=train(seedable, 50, shuffle=True),
        bf16=train(fresh(mixed_precision="bf16"), 50),
        sharded=sharded(),
        local=local(),
        saved=saved(folder),
        parts=parts,
        sent=broadcast_object_list([rank, "x"], from_process=2),
        padded=pad_across_processes(torch.ones(rank + 1, 2), 0, pad_index=-1, pad_first=True),
        place=[rank, state.is_last_process, dist.get_rank()],
    )


if __name__ == "__main__":
    main()
