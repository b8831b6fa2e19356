"""Tensor and sequence parallel layers: outputs and gradients beside those of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from .catalogue import N, data, program
from .tools import MLPModule, MLPStacked, ModelArgs, Transformer


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(model: nn.Module, x: torch.Tensor, steps: int = 2) -> Any:
    opt = torch.optim.SGD(model.parameters(), lr=0.125)
    outs = []
    for _ in range(steps):
        opt.zero_grad()
        y = whole(model(x))
        y.square().mean().backward()
        opt.step()
        outs.append(y)
    grads = [whole(p.grad) for p in model.parameters()]
    return outs, grads, [whole(p) for p in model.parameters()]


@program(rounding=True, bias=[False, True], second=["shard", "replicate", "local"])
def mlp(bias: bool, second: str) -> Any:
    model = MLPModule("cpu", bias=bias)
    reference = copy.deepcopy(model)
    x = data(5, 10) / 4
    output = {
        "shard": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "replicate": RowwiseParallel(),
        "local": RowwiseParallel(output_layouts=Replicate(), use_local_output=True),
    }[second]
    mesh = init_device_mesh("cpu", (N,))
    parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": output})
    found, expected = trained(model, x), trained(reference, x)
    torch.testing.assert_close(found, expected)
    return found


@program(rounding=True, layers=[1, 2])
def stacked(layers: int) -> Any:
    model = MLPStacked("cpu", n_layers=layers)
    reference = copy.deepcopy(model)
    plan = {"layers.*.net1": ColwiseParallel(), "layers.*.net2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (N,)), plan)
    found, expected = trained(model, data(4, 10) / 8), trained(reference, data(4, 10) / 8)
    torch.testing.assert_close(found, expected)
    return found


@program(rounding=True, style=["col", "row", "replicated input", "sharded input"])
def single_linear(style: str) -> Any:
    model = nn.Linear(8, 12)
    plan = {
        "col": ColwiseParallel(output_layouts=Replicate()),
        "row": RowwiseParallel(input_layouts=Replicate()),
        "replicated input": ColwiseParallel(input_layouts=Replicate(), use_local_output=False),
        "sharded input": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0)),
    }[style]
    parallelize_module(model, init_device_mesh("cpu", (N,)), plan)
    return trained(model, data(4, 8) / 4)


@program(rounding=True, norm=["layer", "rms"])
def sequence_parallel(norm: str) -> Any:
    first = nn.LayerNorm(8) if norm == "layer" else nn.RMSNorm(8)
    model = nn.Sequential(first, nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (N,))
    plan: dict[str, Any] = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    x = DTensor.from_local(data(2, 8, 8) / 4, mesh, [Replicate()]).redistribute(
        placements=[Shard(1)]
    )
    return trained(model, x)


@program(rounding=True, embedding=["row", "col"])
def embedding_layer(embedding: str) -> Any:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    style = (
        RowwiseParallel(input_layouts=Replicate())
        if embedding == "row"
        else ColwiseParallel(output_layouts=Replicate())
    )
    parallelize_module(model, init_device_mesh("cpu", (N,)), {"0": style})
    return trained(model, torch.arange(12).reshape(3, 4))


@program(rounding=True, kind=["input", "output", "both"])
def prepared(kind: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (N,))
    inputs = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(0),)}
    outputs = {"output_layouts": (Shard(0),), "desired_output_layouts": (Replicate(),)}
    style: Any = {
        "input": lambda: PrepareModuleInput(**inputs, use_local_output=True),
        "output": lambda: PrepareModuleOutput(**outputs),
        "both": lambda: PrepareModuleInputOutput(
            **inputs, use_local_input=True, **outputs, use_local_output=True
        ),
    }[kind]()
    parallelize_module(model, mesh, style)
    return model(data(8, 8) / 4)


@program(rounding=True, sequence=[False, True], mesh=["line", "square"])
def transformer(sequence: bool, mesh: str) -> Any:
    """torch's own test model, by its own plan, on four ranks or two times two."""
    args = ModelArgs(dropout_p=0.0, weight_tying=False, use_attn_mask=False)
    model = Transformer(args)
    reference = copy.deepcopy(model)
    if mesh == "line":
        given = init_device_mesh("cpu", (N,))
    else:
        given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    parallel = Transformer.parallelize(model, given, sequence)
    ids = torch.arange(8 * 8).reshape(8, 8) % args.vocab_size
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = trained(parallel, ids), trained(reference, ids)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    return found[0]
