"""DTensor: making, redistributing, operators by placement, random functions, on one or two axes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from .catalogue import N, data, mine, program

PLACEMENTS: dict[str, Any] = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (N,))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def placed(names: str) -> list[Any]:
    return [PLACEMENTS[name] for name in names.split("+")]


def laid(tensor: torch.Tensor, names: str) -> DTensor:
    mesh = line() if "+" not in names else square()
    if "P" not in names:
        return distribute_tensor(tensor, mesh, placed(names))
    return DTensor.from_local(tensor, mesh, placed(names), run_check=False)


@program(where=["R", "S0", "S1", "S0+S1", "S1+S0", "S0+S0", "R+S0"], rows=[8, 5, 2])
def made(where: str, rows: int) -> Any:
    x = laid(data(rows, 6), where)
    return x, x.full_tensor(), x.device_mesh.get_coordinate()


@program(of=["R", "S0", "S1", "P"], to=["R", "S0", "S1", "P"], rows=[8, 5])
def redistribute(of: str, to: str, rows: int) -> Any:
    if to == "P" and of != "P":
        to, back = "R", True
    else:
        back = False
    x = laid(data(rows, 6), of)
    y = x.redistribute(placements=placed(to))
    return y, (y + 1).full_tensor(), back


_PAIRS = ["R+R", "S0+S1", "S0+S0", "S1+R", "P+S0"]


@program(pair=[f"{a}>{b}" for a, b in itertools.permutations(_PAIRS, 2) if "P" not in b])
def redistribute_two_axes(pair: str) -> Any:
    of, to = pair.split(">")
    shape = (4, 6) if "P" in of else (8, 6)
    y = laid(data(*shape), of).redistribute(placements=placed(to))
    return y, y.full_tensor()


@program(where=["S0", "S1", "R"], to=["R", "S0", "S1"])
def redistribute_backward(where: str, to: str) -> Any:
    x = laid(data(8, 4), where).requires_grad_()
    y = x.redistribute(placements=placed(to))
    (y * y).sum().full_tensor().backward()
    return x.grad


OPERATORS: dict[str, Any] = {
    "add": lambda x: x + x,
    "add_scalar": lambda x: x + 3,
    "mul": lambda x: x * (x - 1),
    "neg_abs": lambda x: -(x.abs()),
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "clamp": lambda x: x.clamp(-1, 2),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "sum": lambda x: x.sum(),
    "sum_0": lambda x: x.sum(0),
    "sum_keep": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(1),
    "argmax": lambda x: x.argmax(1),
    "var": lambda x: x.var(1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "transpose": lambda x: x.t(),
    "reshape": lambda x: x.reshape(2, 4, 4),
    "view_flat": lambda x: x.redistribute(placements=[Replicate()]).view(-1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "permute": lambda x: x.unsqueeze(0).permute(2, 0, 1),
    "split": lambda x: torch.split(x, 2, 1)[1],
    "chunk": lambda x: x.chunk(2, 0)[0],
    "cat": lambda x: torch.cat([x, x + 1], 0),
    "stack": lambda x: torch.stack([x, x], 0),
    "slice": lambda x: x[2:6],
    "index": lambda x: x[:, 1],
    "gather": lambda x: torch.gather(x, 1, torch.zeros_like(x, dtype=torch.int64)),
    "pad": lambda x: F.pad(x, (1, 1)),
    "tril": lambda x: x.tril(),
    "matmul": lambda x: x @ x.t(),
    "bmm": lambda x: torch.bmm(x.unsqueeze(0), x.t().unsqueeze(0)),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "to_double": lambda x: x.double() / 2,
    "equal": lambda x: bool(torch.equal(x, x.clone())),
    "zeros_like": lambda x: torch.zeros_like(x) + torch.ones_like(x),
    "topk": lambda x: x.topk(2, 1).values,
    "sort": lambda x: x.sort(1).values,
    "in_place": lambda x: x.clone().add_(1).mul_(2),
    "dropout_off": lambda x: F.dropout(x, 0.5, training=False),
}


@program(rounding=True, where=["S0", "S1", "R"], operator=list(OPERATORS))
def operator(where: str, operator: str) -> Any:
    try:
        y = OPERATORS[operator](laid(data(8, 4), where))
    except (RuntimeError, NotImplementedError) as exc:  # what DTensor does not do this torch
        return type(exc).__name__
    return [y, y.full_tensor()] if isinstance(y, DTensor) else y


@program(left=["R", "S0", "S1"], right=["R", "S0", "S1"])
def matmul_backward(left: str, right: str) -> Any:
    a = laid(data(8, 4), left).requires_grad_()
    b = laid(data(4, 12, shift=1), right).requires_grad_()
    y = a @ b
    y.sum().full_tensor().backward()
    return y, a.grad, b.grad


@program(where=["S0+S1", "S1+S0", "R+S0"])
def matmul_two_axes(where: str) -> Any:
    a, b = laid(data(8, 4), where), laid(data(4, 12, shift=1), "R+S1")
    return (a @ b).full_tensor()


@program(rounding=True, where=["R", "S0", "S1"])
def linear_layer(where: str) -> Any:
    model = torch.nn.Linear(8, 12)
    whole = [p.detach().clone() for p in model.parameters()]

    def shard(_name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            given = placed(where) if p.dim() > 1 or where != "S1" else [Replicate()]
            module.register_parameter(name, torch.nn.Parameter(distribute_tensor(p, mesh, given)))

    sharded = distribute_module(model, line(), shard)
    x = laid(data(4, 8), "R")
    y = sharded(x)
    y.sum().full_tensor().backward()
    return y.full_tensor(), [p.grad for p in sharded.parameters()], whole


@program(rounding=True, where=["S0", "S1", "R"])
def embedding(where: str) -> Any:
    table = laid(data(12, 8), where).requires_grad_()
    ids = distribute_tensor(torch.tensor([[0, 3, 11], [5, 5, 7]]), line(), [Replicate()])
    y = F.embedding(ids, table).redistribute(placements=[Replicate()])
    y.sum().to_local().backward()
    return y, table.grad.full_tensor()


@program(rounding=True, reduction=["mean", "sum", "none"], parallel=[False, True])
def cross_entropy(reduction: str, parallel: bool) -> Any:
    torch.manual_seed(3)
    logits, target = torch.randn(8, 16), torch.arange(8)
    x = distribute_tensor(logits, line(), [Shard(1) if parallel else Shard(0)]).requires_grad_()
    placement = Replicate() if parallel else Shard(0)
    t = distribute_tensor(target, line(), [placement])
    if parallel:
        with loss_parallel():
            loss = F.cross_entropy(x, t, reduction=reduction)
            loss.sum().backward()
    else:
        loss = F.cross_entropy(x, t, reduction=reduction)
        loss.sum().backward()
    return loss.full_tensor(), x.grad.full_tensor()


@program(rounding=True, where=["S0", "R"], affine=[False, True])
def layer_norm_backward(where: str, affine: bool) -> Any:
    x = laid(data(8, 6), where).requires_grad_()
    weight = laid(data(6), "R").requires_grad_() if affine else None
    y = F.layer_norm(x, (6,), weight)
    (y * 2).sum().full_tensor().backward()
    return y, x.grad, None if weight is None else weight.grad.full_tensor()


@program(rounding=True, where=["S0", "S1", "R"])
def attention(where: str) -> Any:
    torch.manual_seed(5)
    q, k, v = (torch.randn(4, 4, 6, 8) for _ in range(3))
    parts = [distribute_tensor(t, line(), placed(where)).requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):  # the only one that DTensor knows on the CPU
        y = F.scaled_dot_product_attention(*parts)
        y.sum().full_tensor().backward()
    return y.full_tensor(), [p.grad.full_tensor() for p in parts]


@program(name=["zeros", "ones", "full", "empty"], where=["S0", "R"])
def factories(name: str, where: str) -> Any:
    import torch.distributed.tensor as dt

    make = getattr(dt, name)
    given = (5, 3), 7 if name == "full" else None
    x = make(*[g for g in given if g is not None], device_mesh=line(), placements=placed(where))
    return [list(x.to_local().shape), list(x.shape)] if name == "empty" else x


@program(
    name=["rand_like", "rand_like_device", "randn_like_device", "dropout", "uniform_"],
    where=["S0", "R"],
)
def random(name: str, where: str) -> Any:
    """On the CPU each rank draws from its own state; seeds are the same here."""
    torch.manual_seed(11)
    like = laid(torch.ones(8, 3), where)
    x = {
        "rand_like": lambda: torch.rand_like(like),
        "rand_like_device": lambda: torch.rand_like(like, device="cpu"),
        "randn_like_device": lambda: torch.randn_like(like, device=like.device),
        "dropout": lambda: F.dropout(like, 0.5),
        "uniform_": lambda: like.uniform_(),
    }[name]()
    return x, torch.rand(2)


@program(where=["S0", "S1", "P"])
def local_and_back(where: str) -> Any:
    x = mine(4, 4).requires_grad_()
    d = DTensor.from_local(x, line(), placed(where), run_check=False)
    (d.redistribute(placements=[Replicate()]).to_local() * 2).sum().backward()
    return d, x.grad


@program()
def local_mapped() -> Any:
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b.sum() + dist.get_rank()

    function = local_map(
        add,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)], [Replicate()]),
        device_mesh=line(),
    )
    return function(laid(data(8, 2), "S0"), laid(data(3), "R"))


@program(optimizer=["SGD", "Adam", "AdamW"], foreach=[False, True])
def optimizers(optimizer: str, foreach: bool) -> Any:
    p = torch.nn.Parameter(laid(data(8, 4), "S0"))
    opt = getattr(torch.optim, optimizer)([p], lr=0.125, foreach=foreach)
    for _ in range(3):
        opt.zero_grad()
        (p * p).sum().full_tensor().backward()
        opt.step()
    return p


@program(rounding=True, kind=[2.0, float("inf"), 1.0])
def clip_gradients(kind: float) -> Any:
    ps = [torch.nn.Parameter(laid(data(8, 4, shift=k), "S0")) for k in range(2)]
    sum(((p * p).sum() for p in ps[1:]), (ps[0] * 3).sum()).full_tensor().backward()
    total = torch.nn.utils.clip_grad_norm_(ps, 1.0, norm_type=kind)
    return total.full_tensor(), [p.grad for p in ps]


@program(where=["S0", "S1"])
def compiled(where: str) -> Any:
    def function(x: DTensor) -> torch.Tensor:
        return (x @ x.t()).redistribute(placements=[Replicate()]).relu().to_local() + 1

    x = laid(data(8, 4), where)
    return torch.compile(function, backend="aot_eager", fullgraph=True)(x)


@program()
def comm_debug_mode() -> Any:
    from torch.distributed.tensor.debug import CommDebugMode

    x = laid(data(8, 4), "S0")
    with CommDebugMode() as mode:
        x.redistribute(placements=[Replicate()])
        x.sum().full_tensor()
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    return mode.get_total_counts(), dict(sorted(counts.items()))
