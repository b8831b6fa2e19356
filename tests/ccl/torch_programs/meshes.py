"""`DeviceMesh`: making, slicing, flattening, and collectives over what comes of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .catalogue import mine, program


def told(mesh: DeviceMesh) -> Any:
    """What a rank knows of a mesh."""
    return [
        mesh.mesh.tolist(),
        list(mesh.mesh_dim_names or ()),
        mesh.get_coordinate(),
        [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)],
        [mesh.get_local_rank(dim) for dim in range(mesh.ndim)],
        mesh.size(),
        list(mesh.shape),
    ]


@program(shape=[(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (2, 2, 1)])
def made(shape: tuple[int, ...]) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    found = told(mesh)
    x = mine(2)
    for dim in range(mesh.ndim):
        dist.all_reduce(x, group=mesh.get_group(dim))
    return found, x, mesh == init_device_mesh("cpu", shape, mesh_dim_names=mesh.mesh_dim_names)


@program(name=["a", "b"])
def sliced(name: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    part, x = mesh[name], mine(3)
    dist.all_reduce(x, group=part.get_group())
    return told(part), x, [each.mesh.tolist() for each in mesh._get_all_submeshes(name)]


@program()
def flattened() -> Any:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    x = mine(2)
    dist.all_reduce(x, group=mesh["dp_cp"].get_group())
    return told(flat), x


@program(ranks=[((0, 2), (1, 3)), ((3, 2), (1, 0))])
def from_ranks(ranks: tuple[tuple[int, ...], ...]) -> Any:
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("x", "y"))
    outs = [torch.empty(2), torch.empty(2)]
    dist.all_gather(outs, mine(2), group=mesh.get_group("y"))
    return told(mesh), outs


@program()
def of_some_ranks() -> Any:
    mesh = DeviceMesh("cpu", [1, 3])
    if dist.get_rank() not in (1, 3):
        return mesh.get_coordinate()
    x = mine(2)
    dist.all_reduce(x, group=mesh.get_group())
    return told(mesh), x


@program()
def from_group() -> Any:
    own, _ = dist.new_subgroups(2)
    mesh = DeviceMesh.from_group(own, "cpu")
    x = mine(2)
    dist.all_reduce(x, group=mesh.get_group())
    return told(mesh), x


@program()
def as_context() -> Any:
    from torch.distributed.device_mesh import _mesh_resources

    with init_device_mesh("cpu", (4,)) as mesh:
        return _mesh_resources.get_current_mesh() is mesh, mesh.get_local_rank()
