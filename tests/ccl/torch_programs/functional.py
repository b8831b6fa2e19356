"""Functional collectives, `torch.distributed.nn`, and both under `torch.compile` and `make_fx`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

from .catalogue import N, mine, program


def world() -> Any:
    return dist.group.WORLD


def calls() -> dict[str, Any]:
    return {
        "all_reduce": lambda x: funcol.all_reduce(x, "sum", world()),
        "all_reduce_max": lambda x: funcol.all_reduce(x, "max", world()),
        "all_reduce_avg": lambda x: funcol.all_reduce(x, "avg", world()),
        "all_gather": lambda x: funcol.all_gather_tensor(x, 0, world()),
        "all_gather_1": lambda x: funcol.all_gather_tensor(x, 1, world()),
        "reduce_scatter": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, world()),
        "reduce_scatter_1": lambda x: funcol.reduce_scatter_tensor(x, "sum", 1, world()),
        "all_to_all": lambda x: funcol.all_to_all_single(x, None, None, world()),
        "broadcast": lambda x: funcol.broadcast(x, 2, world()),
        "permute": lambda x: funcol.permute_tensor(x.flatten(), [1, 2, 3, 0], world()),
    }


NAMES = list(calls())


@program(name=NAMES)
def eager(name: str) -> Any:
    x = mine(N, N)
    return calls()[name](x), x


@program()
def into_outputs() -> Any:
    """The operators that graphs call with a buffer of their own."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    x = mine(N * N)
    gathered, part = torch.empty(N * N * N), torch.empty(N)
    all_parts = ops.all_gather_into_tensor_out(x, N, group, out=gathered)
    sum_ = ops.reduce_scatter_tensor_out(x, "sum", N, group, out=part)
    waited = [ops.wait_tensor(result) for result in (all_parts, sum_)]
    return waited, gathered, part


@program(name=NAMES, group=["pairs"])
def of_a_mesh(name: str, group: str) -> Any:
    """Over one axis of a mesh of 2 x 2."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, b = mine(4, 4), (mesh, 1)
    return {
        "all_reduce": lambda: funcol.all_reduce(x, "sum", b),
        "all_reduce_max": lambda: funcol.all_reduce(x, "max", mesh["a"]),
        "all_reduce_avg": lambda: funcol.all_reduce(x, "avg", b),
        "all_gather": lambda: funcol.all_gather_tensor(x, 0, b),
        "all_gather_1": lambda: funcol.all_gather_tensor(x, 1, mesh["a"]),
        "reduce_scatter": lambda: funcol.reduce_scatter_tensor(x, "sum", 0, b),
        "reduce_scatter_1": lambda: funcol.reduce_scatter_tensor(x, "sum", 1, mesh["b"]),
        "all_to_all": lambda: funcol.all_to_all_single(x, [2, 2], [2, 2], b),
        "broadcast": lambda: funcol.broadcast(x, 0, mesh["b"]),
        "permute": lambda: funcol.permute_tensor(x.flatten(), [1, 0], b),
    }[name]()


@program(name=["all_reduce", "all_gather", "reduce_scatter"])
def coalesced(name: str) -> Any:
    xs = [mine(4), mine(8, 2)]
    if name == "all_reduce":
        return funcol.all_reduce_coalesced(xs, "sum", world())
    if name == "all_gather":
        return funcol.all_gather_into_tensor_coalesced(xs, world())
    return funcol.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], world())


@program(name=["all_gather", "reduce_scatter", "all_to_all"])
def autograd(name: str) -> Any:
    x = mine(N, 2).requires_grad_()
    if name == "all_gather":
        y = funcol.all_gather_tensor_autograd(x, 0, world())
    elif name == "reduce_scatter":
        y = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world())
    else:
        y = funcol.all_to_all_single_autograd(x, [1] * N, [1] * N, world())
    (y * (dist.get_rank() + 1)).sum().backward()
    return y, x.grad


@program(name=["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def compiled(name: str) -> Any:
    call = calls()[name]
    function = torch.compile(lambda x: call(x * 2) + 1, backend="aot_eager", fullgraph=True)
    return function(mine(N, N))


@program(name=["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def compiled_in_place(name: str) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if name == "all_reduce":
            dist.all_reduce(y)
            return y
        if name == "all_gather_into_tensor":
            out = torch.empty(N * N, N)
            dist.all_gather_into_tensor(out, y)
            return out + 1
        out = torch.empty(1, N)
        dist.reduce_scatter_tensor(out, y)
        return out + 1

    return torch.compile(function, backend="aot_eager", fullgraph=True)(mine(N, N))


@program(name=["all_reduce", "all_gather", "reduce_scatter"])
def compiled_training(name: str) -> Any:
    call = calls()[name]
    x = mine(N, N).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (call(x * 2) * 3).sum()

    loss = torch.compile(function, backend="aot_eager")(x)
    loss.backward()
    return loss, x.grad


@program(name=["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def traced(name: str) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    call = calls()[name]
    graph = make_fx(lambda x: call(x) * 2, tracing_mode="fake")(mine(N, N))
    ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [op for op in ops if "c10d" in op], graph(mine(N, N))


# -- torch.distributed.nn --------------------------------------------------------------------------


@program(name=["broadcast", "reduce", "gather", "scatter", "all_gather", "all_reduce",
               "reduce_scatter", "all_to_all", "all_to_all_single"])  # fmt: skip
def nn(name: str) -> Any:
    """Forward and backward of each."""
    me = dist.get_rank()
    x = mine(N).requires_grad_()
    rows = [(mine(3) + r).requires_grad_() for r in range(N)]
    results: Any = {
        "broadcast": lambda: dist_nn.broadcast(x, 1),
        "reduce": lambda: dist_nn.reduce(x, 2),
        "gather": lambda: dist_nn.gather(x, 0),
        "scatter": lambda: dist_nn.scatter(rows, 1),
        "all_gather": lambda: dist_nn.all_gather(x),
        "all_reduce": lambda: dist_nn.all_reduce(x),
        "reduce_scatter": lambda: dist_nn.reduce_scatter(torch.empty(3), rows),
        "all_to_all": lambda: dist_nn.all_to_all([torch.empty(3) for _ in range(N)], rows),
        "all_to_all_single": lambda: dist_nn.all_to_all_single(torch.empty(N), x),
    }[name]()
    outs = [results] if isinstance(results, torch.Tensor) else list(results)
    if name == "reduce" and me != 2:
        outs = [out * 0 for out in outs]  # what it holds there is anybody's guess
    sum((k + 1) * (out * (me + 1)).sum() for k, out in enumerate(outs)).backward()
    return outs, x.grad, [row.grad for row in rows]
