"""`torch.distributed.checkpoint`: save, load in other layouts, state dicts, formats."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from .catalogue import N, data, folder, mine, program

LAYOUTS: dict[str, Any] = {
    "S0": ((N,), [Shard(0)]),
    "S1": ((N,), [Shard(1)]),
    "R": ((N,), [Replicate()]),
    "S0+S1": ((2, 2), [Shard(0), Shard(1)]),
    "R+S0": ((2, 2), [Replicate(), Shard(0)]),
}


def laid(x: torch.Tensor, layout: str) -> DTensor:
    shape, placements = LAYOUTS[layout]
    return distribute_tensor(x, init_device_mesh("cpu", shape), placements)


@program(of=list(LAYOUTS), to=list(LAYOUTS))
def resharded(of: str, to: str) -> Any:
    with folder() as path:
        dcp.save({"x": laid(data(7, 5), of), "step": 3}, checkpoint_id=path)
        state: dict[str, Any] = {"x": laid(torch.zeros(7, 5), to), "step": 0}
        dcp.load(state, checkpoint_id=path)
        files = sorted(name for name in os.listdir(path) if not name.startswith("__"))
        return state["x"], state["x"].full_tensor(), state["step"], files


@program(kind=["int", "nested", "list", "tensor", "bytes"])
def plain_values(kind: str) -> Any:
    value: Any = {
        "int": 5,
        "nested": {"a": {"b": data(3), "c": "text"}, "d": 1.5},
        "list": [data(2), 7],
        "tensor": data(4, 2),
        "bytes": "bytes",
    }[kind]
    empty: Any = {
        "int": 0,
        "nested": {"a": {"b": torch.zeros(3), "c": ""}, "d": 0.0},
        "list": [torch.zeros(2), 0],
        "tensor": torch.zeros(4, 2),
        "bytes": "",
    }[kind]
    with folder() as path:
        dcp.save({"value": value}, checkpoint_id=path)
        state = {"value": empty}
        dcp.load(state, checkpoint_id=path)
        return state


def trained(model: nn.Module) -> torch.optim.Optimizer:
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(2):
        opt.zero_grad()
        model(mine(4, 6)).square().mean().backward()
        opt.step()
    return opt


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def wrapped(kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net())
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return fully_shard(net(), mesh=mesh)
    return fully_shard(net()) if kind == "fsdp" else net()


class App(Stateful):
    """A model and its optimizer, as torch's tutorial has them."""

    def __init__(self, model: nn.Module, opt: torch.optim.Optimizer) -> None:
        self.model, self.opt = model, opt

    def state_dict(self) -> dict[str, Any]:
        model, opt = helpers.get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        helpers.set_state_dict(
            self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"]
        )


@program(rounding=True, of=["fsdp", "hsdp", "ddp"], to=["fsdp", "hsdp", "ddp"])
def resumed(of: str, to: str) -> Any:
    model = wrapped(of)
    opt = trained(model)
    with folder() as path:
        dcp.save({"app": App(model, opt)}, checkpoint_id=path)
        torch.manual_seed(99)
        other = wrapped(to)
        again = torch.optim.Adam(other.parameters(), lr=0.05)
        dcp.load({"app": App(other, again)}, checkpoint_id=path)
        other(mine(4, 6)).square().mean().backward()
        again.step()
        full = helpers.StateDictOptions(full_state_dict=True)
        return helpers.get_model_state_dict(other, options=full)


@program(rounding=True, kind=["plain", "fsdp", "ddp"], offload=[False, True])
def full_state(kind: str, offload: bool) -> Any:
    model = wrapped(kind)
    opt = trained(model)
    options = helpers.StateDictOptions(full_state_dict=True, cpu_offload=offload)
    state, optim = helpers.get_state_dict(model, opt, options=options)
    return state, sorted(optim.get("state", ()))  # with `cpu_offload` on rank 0 alone


@program(rounding=True, kind=["fsdp", "ddp"])
def optimizer_state(kind: str) -> Any:
    model = wrapped(kind)
    opt = trained(model)
    flat = helpers.StateDictOptions(flatten_optimizer_state_dict=True)
    state = helpers.get_optimizer_state_dict(model, opt, options=flat)
    other = torch.optim.Adam(model.parameters(), lr=0.5)
    helpers.set_optimizer_state_dict(model, other, state, options=flat)
    return sorted(state), other.param_groups[0]["lr"]


@program(way=["to torch", "from torch"])
def formats(way: str) -> Any:
    with folder() as path:
        one = f"{path}/one.pt"
        if way == "to torch":
            dcp.save({"x": laid(data(8, 3), "S0")}, checkpoint_id=f"{path}/dcp")
            if dist.get_rank() == 0:
                dcp_to_torch_save(f"{path}/dcp", one)
            dist.barrier()
            return torch.load(one)
        if dist.get_rank() == 0:
            torch.save({"x": data(8, 3)}, one)
            torch_save_to_dcp(one, f"{path}/dcp")
        dist.barrier()
        state = {"x": laid(torch.zeros(8, 3), "S1")}
        dcp.load(state, checkpoint_id=f"{path}/dcp")
        return state["x"]


@program(strict=[True, False])
def partial_load(strict: bool) -> Any:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    with folder() as path:
        dcp.save({"x": laid(data(4, 4), "S0")}, checkpoint_id=path)
        state = {"x": laid(torch.zeros(4, 4), "S1"), "more": torch.ones(2)}
        planner = DefaultLoadPlanner(allow_partial_load=not strict)
        try:
            dcp.load(state, checkpoint_id=path, planner=planner)
        except dcp.CheckpointException as exc:
            return type(exc).__name__
        return state


@program()
def only_some_keys() -> Any:
    with folder() as path:
        dcp.save({"x": laid(data(4, 4), "S0"), "y": data(3), "z": 1}, checkpoint_id=path)
        state = {"y": torch.zeros(3)}
        dcp.load(state, checkpoint_id=path)
        return state


@program()
def without_ranks() -> Any:
    """One rank alone reads what all have written."""
    with folder() as path:
        dcp.save({"x": laid(data(8, 2), "S0")}, checkpoint_id=path)
        found = None
        if dist.get_rank() == 2:
            state = {"x": torch.zeros(8, 2)}
            dcp.load(state, checkpoint_id=path, no_dist=True)
            found = state["x"]
        dist.barrier()
        return found


@program()
def metadata() -> Any:
    with folder() as path:
        dcp.save({"x": laid(data(8, 2), "S0"), "n": {"k": 1}}, checkpoint_id=path)
        read = dcp.FileSystemReader(path).read_metadata()
        chunks = read.state_dict_metadata["x"].chunks
        return sorted(read.state_dict_metadata), [list(chunk.offsets) for chunk in chunks]


@program(single=[True, False])
def files_of_a_rank(single: bool) -> Any:
    with folder() as path:
        writer = dcp.FileSystemWriter(path, single_file_per_rank=single, thread_count=2)
        dcp.save(
            {f"x{k}": laid(data(8, 2, shift=k), "S0") for k in range(3)}, storage_writer=writer
        )
        state = {f"x{k}": laid(torch.zeros(8, 2), "R") for k in range(3)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        return state


@program(to=["S0", "S1", "R"])
def hugging_face(to: str) -> Any:
    """Safetensors, through DCP's writer and reader."""
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
    )

    with folder() as path:
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save({"x": laid(data(8, 4), "S0")}, storage_writer=writer)
        state = {"x": laid(torch.zeros(8, 4), to)}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
        return state["x"]
