"""`fully_shard` and the older FullyShardedDataParallel: steps, options and state dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from .catalogue import N, mine, program


class Model(nn.Module):
    """A few layers of sizes that four does not divide."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.wide, self.head = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(self.wide(self.norm(x)).relu())

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).softmax(-1)


def sharded(model: nn.Module, **options: Any) -> Any:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(model: nn.Module, steps: int = 3, between: Callable[[int], None] = lambda _: None) -> Any:
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        opt.zero_grad()
        between(step)
        loss = model(mine(4, 6) / 4 + step).float().square().mean()
        loss.backward()
        opt.step()
        losses.append(loss)
    state = {name: whole(p) for name, p in model.named_parameters()}
    return losses, state


@program(rounding=True, after=[True, False, 2])
def reshard_after_forward(after: Any) -> Any:
    return train(sharded(Model(), reshard_after_forward=after))


@program(rounding=True, param=[torch.bfloat16, torch.float32], reduce=[torch.bfloat16, None])
def mixed_precision(param: torch.dtype, reduce: torch.dtype | None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=param)
    model = sharded(Model(), mp_policy=policy)
    y = model(mine(4, 6) / 4)
    y.sum().backward()
    local = [p.grad.to_local().float() for p in model.parameters()]
    exact = param is torch.float32 and reduce is None
    shown = local if exact else [grad.shape.numel() for grad in local]
    return y.dtype, y.float() if exact else None, shown, {p.dtype for p in model.parameters()}


@program(rounding=True)
def cpu_offload() -> Any:
    return train(sharded(Model(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


@program(rounding=True, shape=[(2, 2), (4, 1), (1, 4)])
def hybrid(shape: tuple[int, int]) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return train(sharded(Model(), mesh=mesh))


@program(rounding=True)
def with_tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(12)
    plan = {"wide": ColwiseParallel(), "head": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    sharded(model, mesh=mesh["dp"])
    torch.manual_seed(dist.get_rank() // 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        opt.step()
    return [[list(p.to_local().shape), whole(p)] for p in model.parameters()]


@program(rounding=True)
def ignored_parameters() -> Any:
    model = Model()
    ignored = set(model.head.parameters())
    fully_shard(model, ignored_params=ignored)
    model(mine(4, 6) / 4).sum().backward()
    kinds = {name: type(p).__name__ for name, p in model.named_parameters()}
    return kinds, [whole(p.grad) for p in model.parameters()]


@program(rounding=True, sync=["gradients", "all_reduce"])
def gradient_accumulation(sync: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(Model(), mesh=mesh)
    for step in range(3):
        last = step == 2
        if sync == "gradients":
            model.set_requires_gradient_sync(last)
        else:
            model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
        model(mine(4, 6) / 4 + step).square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


@program(rounding=True, where=[0, 1])
def placed_by_a_function(where: int) -> Any:
    def placement(p: nn.Parameter) -> Shard | None:
        return Shard(min(where, p.dim() - 1))

    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    fully_shard(model, shard_placement_fn=placement)
    model(mine(2, 8) / 4).sum().backward()
    return [[p, p.grad] for p in model.parameters()]


@program(rounding=True)
def beside_the_whole_model() -> Any:
    """The same as one process with the whole batch."""
    model = Model()
    reference = copy.deepcopy(model)
    found = train(sharded(model), 2)
    from .catalogue import data

    opt = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(2):
        opt.zero_grad()
        batches = [data(4, 6, shift=r + 1) / 4 + step for r in range(N)]
        (sum(reference(x).square().mean() for x in batches) / N).backward()  # type: ignore[union-attr]
        opt.step()
    expected = [p.detach() for p in reference.parameters()]
    torch.testing.assert_close(list(found[1].values()), expected, rtol=1e-3, atol=1e-4)
    return found


@program(rounding=True)
def clipped() -> Any:
    model = sharded(Model())
    model(mine(4, 6)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return whole(norm), [whole(p.grad) for p in model.parameters()]


@program(rounding=True)
def other_methods() -> Any:
    model = sharded(Model())
    register_fsdp_forward_method(model, "scores")
    y = model.scores(mine(4, 6) / 4)
    y[:, 0].sum().backward()
    return y, [whole(p.grad) for p in model.parameters()]


@program(rounding=True)
def unshard_by_hand() -> Any:
    model = sharded(Model())
    handle = model.unshard(async_op=True)
    handle.wait()
    shapes = [list(p.shape) for p in model.head.parameters()]
    model.reshard()
    return shapes, [type(p).__name__ for p in model.parameters()]


@program(rounding=True)
def prefetch() -> Any:
    model = sharded(Model())
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
    return train(model)


@program(rounding=True)
def checkpointed() -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    return train(sharded(model))


@program(rounding=True)
def from_meta() -> Any:
    with torch.device("meta"):
        model = Model()
    sharded(model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.manual_seed(3)
        nn.init.constant_(p, 0.125)
    return train(model)


@program(rounding=True)
def loaded_state() -> Any:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    model, other = sharded(Model()), sharded(Model())
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state if dist.get_rank() == 0 else {}, options=spread)
    return sorted(state), [p.to_local() for p in other.parameters()]


# -- the older one ---------------------------------------------------------------------------------


@program(rounding=True, strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
         original=[False, True])  # fmt: skip
def older(strategy: str, original: bool) -> Any:
    model = FullyShardedDataParallel(
        Model(),
        sharding_strategy=getattr(ShardingStrategy, strategy),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    losses, _ = train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, [p.clone() for p in model.parameters()]


@program(rounding=True, kind=["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def older_state_dict(kind: str) -> Any:
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, getattr(StateDictType, kind)):
        state = model.state_dict()
        model.load_state_dict(state)
    if kind == "FULL_STATE_DICT":
        return state
    return sorted(state), [list(value.size()) for value in state.values()]


@program(rounding=True)
def older_mixed_precision() -> Any:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(
        Model(), mixed_precision=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    y = model(mine(4, 6) / 4)
    y.float().sum().backward()
    return y.dtype, [None if p.grad is None else p.grad.dtype for p in model.parameters()]


@program(rounding=True)
def older_clipped() -> Any:
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
    with model.no_sync():
        model(mine(4, 6) / 4).sum().backward()
    model(mine(4, 6) / 2).sum().backward()
    return model.clip_grad_norm_(1.0)
