"""Lightning Fabric: data parallel, with a loader that it makes distributed, and a log of rank 0."""

import sys
from pathlib import Path

import record
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    folder = Path(sys.argv[1])
    log = CSVLogger(folder)
    fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp", loggers=log)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        fabric.log("rank", fabric.global_rank, step=len(losses))
    log.finalize("success")
    fabric.barrier()
    record.write(
        losses=losses,
        place=[fabric.global_rank, fabric.world_size, fabric.local_rank],
        mean=fabric.all_reduce(torch.tensor(losses[-1])),
        gathered=fabric.all_gather(torch.tensor(losses[-1])),
        sent=fabric.broadcast({"from": fabric.global_rank}),
        logged=[path.read_text() for path in folder.rglob("metrics.csv")],
        norms=record.norms(model),
    )


if __name__ == "__main__":
    main()
