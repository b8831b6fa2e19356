"""DistributedDataParallel: options, hooks, uneven inputs, buffers, and what is built on it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
)
from torch.nn.parallel import DistributedDataParallel

from .catalogue import N, data, mine, program


class Net(nn.Module):
    """Linear layers, a buffer, and a layer that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        self.seen += x.sum()
        x = self.first(x).relu()
        return self.spare(x) if spare else self.second(x)


class Plain(nn.Sequential):
    """Without anything special."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, opt: Any = None, steps: int = 3, **given: Any) -> Any:
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    losses = []
    for step in range(steps):
        opt.zero_grad()
        loss = model(mine(4, 6) / 4 + step, **given).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss)
    return losses, list(model.parameters())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-6},
    "static": {"static_graph": True},
    "no buffers": {"broadcast_buffers": False},
    "no first sync": {"init_sync": False},
}


@program(rounding=True, option=list(OPTIONS))
def options(option: str) -> Any:
    return train(DistributedDataParallel(Plain(), **OPTIONS[option]))


@program(rounding=True, spare=[False, True])
def unused_parameters(spare: bool) -> Any:
    return train(DistributedDataParallel(Net(), find_unused_parameters=True), spare=spare)


@program(rounding=True)
def buffers() -> Any:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    train(model)
    return model.module.seen


@program(rounding=True)
def different_branches() -> Any:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    return train(model, spare=dist.get_rank() % 2 == 0)


@program(rounding=True)
def first_weights_come_from_rank_0() -> Any:
    torch.manual_seed(dist.get_rank())
    return list(DistributedDataParallel(Plain()).parameters())


@program(rounding=True, count=[2, 3])
def no_sync(count: int) -> Any:
    model = DistributedDataParallel(Plain())
    with model.no_sync():
        for step in range(count):
            model(mine(4, 6) / 4 + step).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model(mine(4, 6) / 4).square().mean().backward()
    return before, [p.grad for p in model.parameters()]


@program(rounding=True)
def beside_the_whole_batch() -> Any:
    model = Plain()
    reference = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    wrapped(mine(4, 6) / 4).square().mean().backward()
    batch = torch.cat([data(4, 6, shift=r + 1) / 4 for r in range(N)])
    reference(batch).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    torch.testing.assert_close(grads, [p.grad for p in reference.parameters()])
    return grads


HOOKS: dict[str, Any] = {
    "allreduce": (None, default_hooks.allreduce_hook),
    "fp16": (None, default_hooks.fp16_compress_hook),
    "fp16 wrapped": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "noop": (None, debugging_hooks.noop_hook),
}


@program(rounding=True, hook=["allreduce", "noop"])
def communication_hooks(hook: str) -> Any:
    model = DistributedDataParallel(Plain())
    model.register_comm_hook(*HOOKS[hook])
    return train(model)


@program(hook=["fp16", "fp16 wrapped"])
def compressing_hooks(hook: str) -> Any:
    """Whole numbers, so that the order of the sums does not matter."""
    model = DistributedDataParallel(nn.Linear(6, 2, bias=False))
    model.register_comm_hook(*HOOKS[hook])
    model(mine(4, 6)).sum().backward()
    return model.module.weight.grad


@program(rounding=True, rank=[1, 2])
def power_sgd(rank: int) -> Any:
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2,
        min_compression_rate=0.1,
    )  # fmt: skip
    model = DistributedDataParallel(Plain())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses, params = train(model, steps=4)
    return losses[:2], [list(p.shape) for p in params]


@program(rounding=True)
def own_hook() -> Any:
    def hook(_state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations
        work = dist.all_reduce(bucket.buffer().mul_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / N)

    model = DistributedDataParallel(Plain())
    model.register_comm_hook(None, hook)
    return train(model)


@program(rounding=True, throw=[False])
def uneven_inputs(throw: bool) -> Any:
    model = DistributedDataParallel(Plain())
    opt = torch.optim.SGD(model.parameters(), lr=0.125)
    with model.join(throw_on_early_termination=throw):
        for step in range(dist.get_rank() + 1):
            opt.zero_grad()
            model(mine(4, 6) / 4 + step).square().mean().backward()
            opt.step()
    return list(model.parameters())


@program(rounding=True)
def batch_norm() -> Any:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    wrapped = DistributedDataParallel(model)
    wrapped(mine(4, 6) / 4).sum().backward()
    return model[1].running_mean, model[1].running_var, model[0].weight.grad


@program(rounding=True)
def state_dict_of_it() -> Any:
    model, other = DistributedDataParallel(Plain()), DistributedDataParallel(Plain())
    train(model)
    other.load_state_dict(model.state_dict())
    return other.state_dict()


@program(rounding=True)
def checkpointed() -> Any:
    from torch.utils.checkpoint import checkpoint_sequential

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)

    return train(DistributedDataParallel(Checkpointed(), static_graph=True))


@program(rounding=True)
def double_backward() -> Any:
    model = DistributedDataParallel(Plain(), static_graph=False)
    x = (mine(4, 6) / 4).requires_grad_()
    y = model(x).square().mean()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return grad


@program(rounding=True)
def sampler() -> Any:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dataset = TensorDataset(torch.arange(22))
    found = []
    for shuffle in (False, True):
        sampling = DistributedSampler(dataset, shuffle=shuffle, seed=3)
        sampling.set_epoch(1)
        loader = DataLoader(dataset, batch_size=3, sampler=sampling)
        found.append([batch.tolist() for (batch,) in loader])
    return found


# -- optimizers over ranks -------------------------------------------------------------------------


@program(rounding=True, kind=["SGD", "Adam", "AdamW"], views=[False, True])
def zero_redundancy(kind: str, views: bool) -> Any:
    model = DistributedDataParallel(Plain(), gradient_as_bucket_view=views)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), getattr(torch.optim, kind), lr=0.125,
        parameters_as_bucket_view=views,
    )  # fmt: skip
    return train(model, opt)


@program(rounding=True, to=[0, 2])
def zero_redundancy_state(to: int) -> Any:
    model = DistributedDataParallel(Plain())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.125)
    train(model, opt)
    opt.consolidate_state_dict(to)
    if dist.get_rank() != to:
        return None
    state = opt.state_dict()["state"]
    return [state[key]["exp_avg"] for key in sorted(state)]


@program(rounding=True)
def zero_redundancy_groups() -> Any:
    model = DistributedDataParallel(Plain())
    first, *rest = model.parameters()
    opt = ZeroRedundancyOptimizer([first], torch.optim.SGD, lr=0.125)
    opt.add_param_group({"params": rest, "lr": 0.25})
    return train(model, opt)


@program(rounding=True)
def zero_redundancy_uneven() -> Any:
    model = DistributedDataParallel(Plain())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.125)
    with Join([model, opt]):
        for step in range(dist.get_rank() + 1):
            opt.zero_grad()
            model(mine(4, 6) / 4 + step).square().mean().backward()
            opt.step()
    return list(model.parameters())


@program(rounding=True, period=[1, 2])
def post_local_sgd(period: int) -> Any:
    model = DistributedDataParallel(Plain())
    own, _ = dist.new_subgroups(2)
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, own, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    opt = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125),
        PeriodicModelAverager(period=period, warmup_steps=1),
    )
    return train(model, opt, steps=4)


@program(rounding=True)
def hierarchical_averaging() -> Any:
    from collections import OrderedDict

    averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=1)
    model = Plain()
    for step in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.grad = torch.zeros_like(p)  # what has none is left out
                p.add_(dist.get_rank() + step)
        averager.average_parameters(model.parameters())
    return list(model.parameters())
