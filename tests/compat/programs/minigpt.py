"""A small language model, trained and resumed with arguments of the command line."""

import argparse
import math
import os
import random
import sys
from dataclasses import dataclass

import numpy
import record
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Config:
    """Its sizes."""

    vocabulary: int = 32
    block: int = 16
    layers: int = 2
    heads: int = 2
    width: int = 16
    dropout: float = 0.1


class Attention(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = torch.nn.Linear(config.width, 3 * config.width)
        self.out = torch.nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class GPT(torch.nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(config.vocabulary, config.width)
        self.places = torch.nn.Embedding(config.block, config.width)
        self.drop = torch.nn.Dropout(config.dropout)
        self.blocks = torch.nn.ModuleList()
        for _ in range(config.layers):
            self.blocks.append(
                torch.nn.ModuleDict(
                    {
                        "norm": torch.nn.LayerNorm(config.width),
                        "attention": Attention(config),
                        "feed": torch.nn.Sequential(
                            torch.nn.LayerNorm(config.width),
                            torch.nn.Linear(config.width, 4 * config.width),
                            torch.nn.GELU(),
                            torch.nn.Linear(4 * config.width, config.width),
                        ),
                    }
                )
            )
        self.head = torch.nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = x + block["attention"](block["norm"](x))
            x = x + block["feed"](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def rate(step: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(1337)
    random.seed(1337 + rank)
    numpy.random.seed(1337 + rank)
    config = Config()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(1337 + rank)  # dropout differs
    data = numpy.random.RandomState(0).randint(0, config.vocabulary, 4096)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = [random.randrange(len(data) - config.block - 1) for _ in range(2)]
        starts += numpy.random.randint(len(data) - config.block - 1, size=2).tolist()
        ids = torch.stack([torch.from_numpy(data[s : s + config.block + 1]) for s in starts])
        return ids[:, :-1], ids[:, 1:]

    def train(steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * rate(step, args.steps)
            for micro in range(2):  # gradients are accumulated
                wrapped.require_backward_grad_sync = micro == 1
                with torch.autocast("cpu", torch.bfloat16):
                    loss = wrapped(*batch()) / 2
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = train(args.steps)
    path = os.path.join(args.out, "last.pt")
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    losses += train(2)
    draws = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
    record.write(losses=losses, draws=draws, norms=record.norms(model), argv=len(sys.argv))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
