"""A convolutional net over the batch: norms of the whole batch, AdamW over flat shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from discolab import Session, ccl, compare, current_worker
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

RATE, DECAY = 1e-2, 0.1


class SyncNorm(nn.BatchNorm2d):
    """Statistics of the whole batch, of which each worker has a part."""

    bug = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "own statistics":
            return super().forward(x)
        mean = dist_fn.all_reduce(x.mean((0, 2, 3)), "avg")
        square = dist_fn.all_reduce((x * x).mean((0, 2, 3)), "avg")
        var = square - mean * mean
        count = x.numel() // x.shape[1] * current_worker().world_size
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            unbiased = var if self.bug == "biased" else var * count / (count - 1)
            self.running_var.lerp_(unbiased, self.momentum)

        def wide(channels: Tensor) -> Tensor:
            return channels[None, :, None, None]

        normed = (x - wide(mean)) * torch.rsqrt(wide(var) + self.eps)
        return normed * wide(self.weight) + wide(self.bias)


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = norm(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 2, padding=1, bias=False)
        self.norm2 = norm(16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def grouped(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def drawn(norm: Callable[[int], nn.Module]) -> tuple[Net, Tensor, Tensor]:
    """Give a model, a batch whose parts have other statistics, and labels."""
    torch.manual_seed(1)
    x = 2 * torch.randn(16, 3, 8, 8) + torch.linspace(-2, 2, 16)[:, None, None, None]
    labels = torch.randint(0, 10, (16,))
    model = Net(norm)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model, x, labels


def part(tensor: Tensor) -> Tensor:
    return tensor.chunk(current_worker().world_size)[current_worker().rank]


def synced(state: dict[str, Tensor], bug: str) -> Net:
    model = Net(SyncNorm)
    model.load_state_dict(state)
    for module in model.modules():
        if isinstance(module, SyncNorm):
            module.bug = bug
    return model


def forward(session: Session, bug: str = "") -> ProgramComparison:
    """Compare forward and the buffers."""
    model, x, _ = drawn(nn.BatchNorm2d)
    workers = session.call_packed(synced, model.state_dict(), bug)
    return compare(model, workers, x, layouts={"input": Shard(0)}, backward=False)


def loss_of(model: Net, x: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    return loss.detach()


def averaged(model: Net, x: Tensor, labels: Tensor, *, bug: str = "") -> Tensor:
    loss = loss_of(model, part(x), part(labels))
    for name, parameter in model.named_parameters():
        if bug == "not averaged" and name == "fc.bias":
            continue
        assert parameter.grad is not None
        parameter.grad = ccl.all_reduce(parameter.grad, "avg")
    return ccl.all_reduce(loss, "avg")


def backward(session: Session, bug: str = "") -> ProgramComparison:
    """Compare programs that run backward and average gradients."""
    model, x, labels = drawn(nn.BatchNorm2d)

    def sharded(state: dict[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return functools.partial(averaged, synced(state, ""), bug=bug)

    workers = session.call_packed(sharded, model.state_dict())
    return compare(functools.partial(loss_of, model), workers, (x, labels))


def adam(
    decayed: Sequence[Tensor], others: Sequence[Tensor], decay_of_others: float = 0.0
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": DECAY},
            {"params": others, "weight_decay": decay_of_others},
        ],
        lr=RATE,
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def groups(model: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Give the weights, and what has no weight decay."""
    every = list(model.parameters())
    return [p for p in every if p.ndim > 1], [p for p in every if p.ndim < 2]


def trained(model: Net, x: Tensor, labels: Tensor, *, steps: int) -> dict[str, Tensor]:
    optimizer, schedule = adam(*groups(model))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, x, labels)
        optimizer.step()
        schedule.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Give all in one dimension, padded to equal parts."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return F.pad(joined, (0, -len(joined) % current_worker().world_size))


def zero(model: Net, x: Tensor, labels: Tensor, *, steps: int, bug: str = "") -> dict[str, Tensor]:
    """Each worker steps its part of the flat parameters, as ZeRO's first stage does."""
    both = groups(model)
    shards = [nn.Parameter(part(flat([p.detach() for p in group])).clone()) for group in both]
    optimizer, schedule = adam(shards[:1], shards[1:], DECAY if bug == "decay" else 0.0)
    for _ in range(steps):
        model.zero_grad()
        loss_of(model, part(x), part(labels))
        for shard, group in zip(shards, both, strict=True):
            grads = [p.grad for p in group if p.grad is not None]
            shard.grad = ccl.reduce_scatter(flat(grads), "avg")
        # an overflow that one worker sees, and does not tell
        overflow = bug == "skipped" and current_worker().rank == 1
        if not overflow:
            optimizer.step()
        schedule.step()
        if bug == "schedule":
            schedule.step()
        with torch.no_grad():
            for shard, group in zip(shards, both, strict=True):
                whole = ccl.all_gather(shard.detach()).reshape(-1)
                start = 0
                for p in group:
                    p.copy_(whole[start : start + p.numel()].view_as(p))
                    start += p.numel()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped(session: Session, bug: str = "", *, steps: int = 2) -> ProgramComparison:
    """Compare the parameters after steps of training."""
    model, x, labels = drawn(grouped)

    def sharded(state: dict[str, Tensor]) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
        own = Net(grouped)
        own.load_state_dict(state)
        return functools.partial(zero, own, steps=steps, bug=bug)

    workers = session.call_packed(sharded, model.state_dict())
    program = functools.partial(trained, model, steps=steps)
    return compare(program, workers, (x, labels))
