"""Experts over the workers, and tokens too: gathered before, reduced and scattered after."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

WIDTH, EXPERTS, CHOSEN = 16, 8, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.relu(self.w1(x)))


class Mixture(nn.Module):
    def __init__(self, world: int, rank: int, bug: str) -> None:
        super().__init__()
        self.world, self.bug = world, bug
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        count = EXPERTS // world
        self.mine = range(rank * count, (rank + 1) * count)
        self.experts = nn.ModuleDict({str(expert): Expert() for expert in self.mine})

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if self.bug == "not normalized":
            weights, chosen = logits.softmax(-1).topk(CHOSEN, -1)
        else:
            weights, chosen = logits.topk(CHOSEN, -1)
            weights = weights.softmax(-1)
        gates = torch.zeros_like(logits).scatter(-1, chosen, weights)
        if self.world > 1:
            x = dist_fn.gather_from_sequence_region(x, 0)
            if self.bug == "gates not scattered":
                gates = dist_fn.gather_from_region(gates, 0)
            else:
                gates = dist_fn.gather_from_sequence_region(gates, 0)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.mine):
            column = number if self.bug == "offset" else expert
            rows = gates[:, column].nonzero()[:, 0]
            if self.bug == "dropped":
                rows = rows[: x.shape[0] * CHOSEN // EXPERTS]
            terms = self.experts[str(expert)](x[rows]) * gates[rows, column, None]
            y = y.index_add(0, rows, terms)
        if self.world == 1:
            return y
        if self.bug == "average":
            return dist_fn.reduce_scatter(y, "avg", 0)
        return dist_fn.reduce_scatter_to_sequence_region(y, 0)


class Net(nn.Module):
    def __init__(self, world: int = 1, rank: int = 0, bug: str = "") -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.moe = Mixture(world, rank, bug)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.moe(self.norm(x))
        return self.out(x)


def swapped(names: Iterable[str]) -> dict[str, str]:
    """Map names to those of the other one of the experts 6 and 7."""
    other = {"6": "7", "7": "6"}
    return {name: ".".join(other.get(part, part) for part in name.split(".")) for name in names}


def sharded(state: dict[str, Tensor], bug: str, dtype: torch.dtype) -> Net:
    """Give the worker's model; the gradients of what all workers hold are summed by a hook."""
    worker = current_worker()
    model = Net(worker.world_size, worker.rank, bug).to(dtype)
    sources = {name: name for name in model.state_dict()}
    if bug == "other expert" and worker.rank == 3:
        sources = swapped(sources)
    model.load_state_dict({name: state[source] for name, source in sources.items()})
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            parameter.register_hook(lambda grad: ccl.all_reduce(grad))
    return model


def compared(
    session: Session, bug: str = "", *, dtype: torch.dtype = torch.float32
) -> ProgramComparison:
    torch.manual_seed(1)
    model = Net().to(dtype)
    x = torch.randn(64, WIDTH, dtype=dtype)
    workers = session.call_packed(sharded, model.state_dict(), bug, dtype)
    return compare(model, workers, x, layouts={"input": Shard(0)})
