"""peft's LoRA under DDP, with einops and metrics of torchmetrics over all ranks."""

import record
import torch
import torch.distributed as dist
from einops import rearrange
from einops.layers.torch import Rearrange
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy


class Model(torch.nn.Module):
    """A small classifier of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Rearrange("b (h p) (w q) -> b (h w) (p q)", p=2, q=2)
        self.up = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.up(self.patches(x))).mean(1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    adapted = get_peft_model(Model(), LoraConfig(r=2, target_modules=["up"], lora_dropout=0.0))
    model = DistributedDataParallel(adapted)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    accuracy, mean, auroc = MulticlassAccuracy(num_classes=3), MeanMetric(), BinaryAUROC()
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        x = rearrange(torch.randn(16 * 5, generator=generator), "(b h w) -> b h w", h=4, w=4)
        y = torch.randint(3, (5,), generator=generator)
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        accuracy.update(logits, y)
        mean.update(loss.detach())
        auroc.update(torch.rand(5, generator=generator), y % 2)
    record.write(
        losses=losses,
        accuracy=accuracy.compute(),
        mean=mean.compute(),
        auroc=auroc.compute(),
        trained=sorted(name for name, p in adapted.named_parameters() if p.requires_grad),
        norms=record.norms(adapted),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
