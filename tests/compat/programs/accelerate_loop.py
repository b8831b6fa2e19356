"""A training loop of accelerate, with accumulation and gathered metrics."""

import record
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    data = TensorDataset(torch.randn(50, 4), torch.randn(50, 1))
    loader = DataLoader(data, batch_size=3, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen = [], 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        seen += len(accelerator.gather_for_metrics(y))
    record.write(
        losses=losses,
        seen=seen,
        place=[accelerator.process_index, accelerator.num_processes, accelerator.is_main_process],
        ranks=gather_object([accelerator.process_index]),
        mean=accelerator.reduce(torch.tensor(losses[-1]), "mean"),
        norms=record.norms(accelerator.unwrap_model(model)),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
