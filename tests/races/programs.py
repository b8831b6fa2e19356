"""Small programs, each of which uses another part of torch, for the first time in its process.

Each is given its rank, seeds by it, and gives what it has computed. `alone`: no collectives, so
that one worker can run it by itself; the others begin with `dist.init_process_group`.
"""

from __future__ import annotations

import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

Program = Callable[[int], Any]
alone: dict[str, Program] = {}
together: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Enter a program without collectives; it draws from a seed of its rank's."""

    @functools.wraps(function)
    def seeded(rank: int) -> Any:
        torch.manual_seed(10 + rank)
        return function(rank)

    alone[function.__name__] = seeded
    return function


def collective(function: Program) -> Program:
    """Enter a program with collectives."""

    @functools.wraps(function)
    def grouped(rank: int) -> Any:
        dist.init_process_group("gloo")
        try:
            torch.manual_seed(0)
            return function(rank)
        finally:
            dist.destroy_process_group()

    together[function.__name__] = grouped
    return function


# -- training --------------------------------------------------------------------------------------


def _steps(kind: Any, rank: int, **settings: Any) -> Any:
    layer, called = nn.Linear(3, 3), []
    optimizer = kind(layer.parameters(), **settings)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def loss() -> torch.Tensor:
        value = layer(torch.ones(2, 3)).square().sum()
        value.backward()
        return value

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(loss)
    return called, list(layer.parameters())


def _steps_of(kind: Any) -> Program:
    def steps(rank: int) -> Any:
        return _steps(kind, rank)

    steps.__name__ = kind.__name__
    return steps


for _kind in (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "ASGD", "Adafactor", "LBFGS",
):  # fmt: skip
    program(_steps_of(getattr(torch.optim, _kind)))


class Descent(torch.optim.Optimizer):
    """An optimizer of a program's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Descend."""
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


@program
def own_optimizer(rank: int) -> Any:
    return _steps(Descent, rank)


@program
def schedules(rank: int) -> Any:
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0 + rank)
    warm_up = schedulers.LinearLR(optimizer, total_iters=2)
    schedule = schedulers.SequentialLR(
        optimizer, [warm_up, schedulers.CosineAnnealingLR(optimizer, 4)], [2]
    )
    rates = []
    for _ in range(5):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr())
    return rates


@program
def mixed_precision(rank: int) -> Any:
    layer = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer(torch.randn(2, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return layer.weight, scaler.get_scale()


@program
def averaged(rank: int) -> Any:
    swa = torch.optim.swa_utils
    layer = nn.Linear(2, 2)
    mean = swa.AveragedModel(layer, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        mean.update_parameters(layer)
    return mean.module.weight


@program
def checkpointed(rank: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    grads = []
    for reentrant in (True, False):
        x = torch.randn(3, 4, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
        grads.append(x.grad)
    return grads


@program
def loader(rank: int) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    drawn = torch.utils.data.WeightedRandomSampler([1.0] * 20, 5)
    return [
        [batch[0] for batch in torch.utils.data.DataLoader(data, 4, shuffle=True)],
        [batch[0] for batch in torch.utils.data.DataLoader(data, sampler=drawn)],
    ]


# -- modules ---------------------------------------------------------------------------------------


@program
def transformer(rank: int) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 3, 8)
    return model.eval()(x), model.train()(x)


@program
def recurrent(rank: int) -> Any:
    return nn.LSTM(3, 4, 2, dropout=0.3)(torch.randn(2, 2, 3))[0], nn.GRU(3, 3)(torch.ones(2, 1, 3))


@program
def parametrized(rank: int) -> Any:
    makers = torch.nn.utils.parametrizations
    x = torch.ones(1, 3)
    return [
        makers.weight_norm(nn.Linear(3, 2))(x),
        makers.spectral_norm(nn.Linear(3, 2))(x),
        makers.orthogonal(nn.Linear(3, 3))(x),
    ]


@program
def pruned(rank: int) -> Any:
    import torch.nn.utils.prune as pruning

    layer = nn.Linear(4, 4)
    pruning.random_unstructured(layer, "weight", 0.5)
    pruning.l1_unstructured(layer, "bias", 2)
    return layer.weight, layer.bias


@program
def lazy(rank: int) -> Any:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    return model(torch.randn(4, 5)), [type(layer).__name__ for layer in model]


@program
def hooked(rank: int) -> Any:
    called: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_hook(lambda *_: called.append("forward"))
    model.register_full_backward_hook(lambda *_: called.append("backward"))
    model[0].weight.register_hook(lambda grad: called.append("grad"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: called.append("summed"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: called.append("all"))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    everywhere.remove()
    return called


def _quantizable() -> nn.Module:
    parts = torch.ao.quantization
    model = nn.Sequential(
        parts.QuantStub(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), parts.DeQuantStub()
    )
    model.qconfig = parts.get_default_qconfig("x86")
    return model.eval()


@program
def quantized(rank: int) -> Any:
    parts = torch.ao.quantization
    ready = parts.prepare(parts.fuse_modules(_quantizable(), [["1", "2"]]))
    ready(torch.randn(3, 4))
    return parts.convert(ready)(torch.ones(1, 4))


@program
def quantized_while_trained(rank: int) -> Any:
    parts = torch.ao.quantization
    model = _quantizable().train()
    model.qconfig = parts.get_default_qat_qconfig("x86")
    ready = parts.prepare_qat(model)
    ready(torch.randn(3, 4)).sum().backward()
    return parts.convert(ready.eval())(torch.ones(1, 4))


@program
def quantized_as_a_graph(rank: int) -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(1, 4)
    ready = quantize_fx.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    ready(torch.randn(3, 4))
    return quantize_fx.convert_fx(ready)(torch.ones(1, 4))


# -- programs as data ------------------------------------------------------------------------------


@program
def traced(rank: int) -> Any:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    return graph(torch.ones(1, 3)), graph.code


@program
def jit_compiled(rank: int) -> Any:
    return torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.GELU()))(torch.ones(1, 3))


@program
def jit_traced(rank: int) -> Any:
    return torch.jit.trace(nn.LSTMCell(3, 3), torch.ones(1, 3))(torch.ones(1, 3))


@program
def exported(rank: int) -> Any:
    model, shapes = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.ones(2, 3),), dynamic_shapes=shapes)
    return program.module()(torch.ones(4, 3))


@program
def compiled(rank: int) -> Any:
    layer = nn.Linear(3, 3)
    eager = torch.compile(lambda x: layer(x).relu() * (rank + 1), backend="eager")
    ahead = torch.compile(lambda x: layer(x).tanh().sum() * (rank + 1), backend="aot_eager")
    ahead(torch.ones(2, 3)).backward()
    return eager(torch.ones(2, 3)), eager(torch.ones(3, 3)), layer.weight.grad


@program
def graph_of_operators(rank: int) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: torch.sin(x) * (rank + 1), tracing_mode="symbolic")(torch.ones(3))
    return graph(torch.ones(3)), graph.code


@program
def own_operator(rank: int) -> Any:
    @torch.library.custom_op("discolab_races::times", mutates_args=())
    def times(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    times.register_fake(lambda x, factor: torch.empty_like(x))
    times.register_autograd(
        lambda context, grad: (grad * context.factor, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )
    x = torch.ones(3, requires_grad=True)
    times(x, rank + 1.0).sum().backward()
    return x.grad


@program
def functional(rank: int) -> Any:
    from torch.func import functional_call, grad, hessian, jacfwd, jvp, stack_module_state, vmap

    x, layers = torch.randn(3), [nn.Linear(3, 2) for _ in range(3)]
    cube = lambda x: (x**3).sum() * (rank + 1)  # noqa: E731
    states, base = stack_module_state(layers), copy.deepcopy(layers[0]).to("meta")
    ensemble = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(*states)
    derived = [grad(cube)(x), jacfwd(torch.sin)(x), hessian(cube)(x), jvp(cube, (x,), (x,))]
    return derived, ensemble, vmap(torch.linalg.norm)(torch.randn(4, 3))


@program
def own_function(rank: int) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * (rank + 1)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (rank + 2)

    x = torch.ones(3, requires_grad=True)
    Scaled.apply(x).sum().backward()
    return x.grad


@program
def flexible_attention(rank: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(1, 1, 128, 8)
    past = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    return flex_attention(q, q, q, block_mask=past)


# -- tensors ---------------------------------------------------------------------------------------


@program
def ragged(rank: int) -> Any:
    rows = [torch.randn(2, 3), torch.randn(1 + rank, 3)]
    a, b = (torch.nested.nested_tensor(rows, layout=torch.jagged) for _ in range(2))
    try:
        a + b
    except RuntimeError:
        return (a * 2 + a).values(), a.to_padded_tensor(0.0)
    return "two ragged tensors passed for one shape"


@program
def sparse(rank: int) -> Any:
    product = torch.randn(4, 4).relu().to_sparse_csr() @ torch.ones(4, 2)
    return product, nn.EmbeddingBag(4, 2, sparse=True, mode="sum")(torch.tensor([[0, rank]]))


@program
def distributions(rank: int) -> Any:
    kinds = torch.distributions
    changes = [kinds.ExpTransform(), kinds.AffineTransform(1.0, 2.0)]
    changed = kinds.TransformedDistribution(kinds.Normal(0.0, 1.0), changes)
    return [
        kinds.kl_divergence(kinds.Normal(1.0 * rank, 1.0), kinds.Normal(0.0, 2.0)),
        kinds.kl_divergence(kinds.Bernoulli(0.3), kinds.Bernoulli(0.6)),
        changed.sample((2,)),
        kinds.Dirichlet(torch.ones(3)).rsample(),
    ]


@program
def files(rank: int) -> Any:
    state, model = io.BytesIO(), io.BytesIO()
    layer = nn.Linear(3, 3)
    torch.save({"layer": layer.state_dict(), "rank": rank}, state)
    torch.save(layer, model)
    state.seek(0)
    model.seek(0)
    return torch.load(state), torch.load(model, weights_only=False)(torch.ones(1, 3))


@program
def counted(rank: int) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2 + rank, 4)).sum().backward()
    return counter.get_total_flops()


@program
def fake(rank: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return tuple((torch.empty(3 + rank, 4) @ torch.empty(4, 2)).shape)


@program
def devices(rank: int) -> Any:
    with torch.device("meta" if rank % 2 else "cpu"):
        inside = [torch.zeros(2).device.type, nn.Linear(2, 2).weight.device.type]
    return inside, torch.zeros(1).device.type


# -- collectives -----------------------------------------------------------------------------------


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def _train(model: nn.Module, rank: int, kind: Any = torch.optim.AdamW) -> list[float]:
    optimizer, losses = kind(model.parameters(), lr=0.01), []
    torch.manual_seed(rank)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(getattr(loss, "full_tensor", lambda loss=loss: loss)().item())
    return losses


def _mesh(*shape: int) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape or (dist.get_world_size(),))


@collective
def data_parallel(rank: int) -> Any:
    return _train(nn.parallel.DistributedDataParallel(_model()), rank)


@collective
def fully_sharded(rank: int) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mixed = _model(), _model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    fully_shard(mixed, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return _train(model, rank), _train(mixed, rank)


@collective
def tensor_parallel(rank: int) -> Any:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return _train(parallelize_module(_model(), _mesh(), plan), 0)


@collective
def sharded_tensors(rank: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    mesh = _mesh()
    a, b = (distribute_tensor(torch.randn(8, 8), mesh, [Shard(dim)]) for dim in range(2))
    with implicit_replication():
        c = a + torch.ones(8)
    found = [a @ b, a.softmax(-1), a.sum(0), a.redistribute(mesh, [Replicate()]), c]
    return [tensor.full_tensor() for tensor in found]


@collective
def sharded_random(rank: int) -> Any:
    import torch.distributed.tensor as sharded

    mesh, rows = _mesh(), [sharded.Shard(0)]
    drawn = sharded.rand(8, device_mesh=mesh, placements=rows)
    dropped = F.dropout(sharded.ones(16, device_mesh=mesh, placements=rows), 0.5)
    return drawn.full_tensor(), dropped.full_tensor()


@collective
def pipelined(rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    world = dist.get_world_size()
    stage = PipelineStage(nn.Linear(8, 8), rank, world, torch.device("cpu"))
    schedule, losses = Schedule1F1B(stage, 4, loss_fn=F.mse_loss), []
    first = (torch.ones(8, 8),) if rank == 0 else ()
    last = {"target": torch.zeros(8, 8), "losses": losses} if rank == world - 1 else {}
    schedule.step(*first, **last)
    return losses, [parameter.grad for parameter in stage.submod.parameters()]


@collective
def saved_sharded(rank: int) -> Any:
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    model, other = _model(), _model()
    fully_shard(model)
    fully_shard(other)
    checkpoints.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = {"model": other.state_dict()}
    checkpoints.load(state, checkpoint_id=folder[0])
    return state["model"]["0.weight"].full_tensor()


@collective
def groups_and_objects(rank: int) -> Any:
    world = dist.get_world_size()
    group, _ = dist.new_subgroups(2)
    tensor, objects = torch.ones(1) * rank, [None] * world
    dist.all_reduce(tensor, group=group)
    dist.all_gather_object(objects, {"rank": rank, "tensor": torch.ones(rank + 1)})
    return tensor, objects


@collective
def compiled_with_collectives(rank: int) -> Any:
    from torch.distributed import _functional_collectives as functional

    torch.manual_seed(rank)
    doubled = torch.compile(
        lambda x: functional.all_reduce(x.sin(), "sum", dist.group.WORLD) * 2, backend="aot_eager"
    )
    return doubled(torch.randn(3)), doubled(torch.randn(3))


@collective
def counted_collectives(rank: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    rows = distribute_tensor(torch.ones(8), _mesh(), [Shard(0)])
    with CommDebugMode() as counter:
        rows.redistribute(placements=[Replicate()])
        dist.all_reduce(torch.ones(2))
    return counter.get_total_counts()


@collective
def optimizer_in_parts(rank: int) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_model())
    return _train(model, rank, lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=lr))


def run(name: str, rank: int) -> Any:
    """Run one; gives plain values, or an error's text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _plain((alone.get(name) or together[name])(rank))
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().to_dense().tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
