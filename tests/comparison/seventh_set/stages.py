"""A pipeline by hand: four stages, two micro-batches, and the program runs backward itself."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, ccl, compare, current_worker
from discolab.comparison import ProgramComparison

WIDTH, STAGES, BATCHES = 24, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """The whole model, or one stage of it."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        mine = range(STAGES) if stage is None else [stage]
        self.blocks = nn.ModuleDict({str(number): Block() for number in mine})
        if stage in (None, 0):
            self.inp = nn.Linear(8, WIDTH)
        if stage in (None, STAGES - 1):
            self.head = nn.Linear(WIDTH, 4)


def reference(model: Net, x: Tensor, y: Tensor) -> Tensor:
    h = model.inp(x)
    for block in model.blocks.values():
        h = block(h)
    loss = F.mse_loss(model.head(h), y)
    loss.backward()
    return loss.detach()


def piped(model: Net, x: Tensor, y: Tensor, *, bug: str = "") -> Tensor:
    rank, last = current_worker().rank, STAGES - 1
    block = model.blocks[str(rank)]
    xs, ys = x.chunk(BATCHES), y.chunk(BATCHES)
    received, given = [], []
    total = torch.zeros(())
    for batch in range(BATCHES):
        if rank == 0:
            h = model.inp(xs[batch])
        else:
            h = ccl.recv(torch.empty(len(xs[batch]), x.shape[1], WIDTH), rank - 1)
            received.append(h.requires_grad_())
        h = h + block(h) if bug == "residual" and rank == 1 else block(h)
        if rank == last:
            target = ys[BATCHES - 1 - batch] if bug == "targets" else ys[batch]
            loss = F.mse_loss(model.head(h), target)
            total = total + loss.detach() / BATCHES
            h = loss if bug == "not divided" else loss / BATCHES
        else:
            ccl.send(h.detach(), rank + 1)
        given.append(h)
    for batch, h in enumerate(given):
        if rank == last:
            h.backward()
        else:
            h.backward(ccl.recv(torch.empty_like(h), rank + 1))
        if rank > 0:
            grad = received[batch].grad
            assert grad is not None
            ccl.send(grad, rank - 1)
    return ccl.broadcast(total, last)


def compared(session: Session, bug: str = "") -> ProgramComparison:
    torch.manual_seed(1)
    model = Net()
    x, y = torch.randn(4, 5, 8), torch.randn(4, 5, 4)

    def sharded(state: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        stage = Net(current_worker().rank)
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        return functools.partial(piped, stage, bug=bug)

    workers = session.call_packed(sharded, model.state_dict())
    return compare(functools.partial(reference, model), workers, (x, y))
