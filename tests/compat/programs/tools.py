"""Figures, logs, configurations and data sets of each rank."""

import hashlib
import logging
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import hydra
import matplotlib.pyplot as plt
import record
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(sys.argv[1])
    plt.rcParams["lines.linewidth"] = 1 + rank
    plt.figure(figsize=(2, 1 + rank))
    plt.plot([0, rank, 1])
    plt.title(f"rank {rank}")
    dist.barrier()
    figure = plt.gcf()
    figure.savefig(folder / f"{rank}.rgba", format="rgba")
    pixels = hashlib.sha256((folder / f"{rank}.rgba").read_bytes()).hexdigest()
    figures = plt.get_fignums()
    plt.close("all")

    with SummaryWriter(str(folder / f"log{rank}")) as writer:
        for step in range(4):
            writer.add_scalar("loss", rank + 0.5 * step, step)
    events = EventAccumulator(str(folder / f"log{rank}"))
    events.Reload()
    logged = [[event.step, event.value] for event in events.Scalars("loss")]

    if rank == 0:
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").write_text("lr: 0.1\nname: run${oc.env:RANK}\n")
    dist.barrier()
    with hydra.initialize_config_dir(str(folder / "conf"), version_base=None):
        config = hydra.compose("config", overrides=[f"lr={rank / 10}"])
    OmegaConf.register_new_resolver("mine", lambda: rank, replace=True)
    resolved = OmegaConf.create({"who": "${mine:}"}).who

    rows = Dataset.from_dict({"x": list(range(22))})
    mine = split_dataset_by_node(rows, rank=rank, world_size=size)
    doubled = mine.map(lambda row: {"y": 2 * row["x"]}).with_format("torch")
    logger = logging.getLogger("mine")
    logger.setLevel(10 * (rank + 1))
    dist.barrier()
    record.write(
        pixels=pixels,
        figures=figures,
        logged=logged,
        config=OmegaConf.to_container(config, resolve=True),
        resolved=resolved,
        rows=torch.as_tensor(doubled["y"][:]),
        level=logger.level,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
