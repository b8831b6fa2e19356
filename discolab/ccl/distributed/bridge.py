"""Putting torch.distributed under worker threads, and taking it away again.

All private names of torch that are relied on are in `_NEEDED`; without one of
them nothing is changed, and every use on a worker says which.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from ...isolation import table
from ...isolation.patches import Patches
from ...isolation.table import Row, Treatment
from ...runtime import accelerators
from ...runtime.errors import SessionError
from ...runtime.worker import current_worker_or_none
from . import calls, environ, guards, registry
from .process_group import NAME
from .world import WorldProxy, close_world, world_here

# their private names have no types
c10d: Any = torch.distributed.distributed_c10d
_native: Any = torch._C._distributed_c10d

_NEEDED: tuple[tuple[Any, str], ...] = (
    (c10d, "_world"),
    (c10d, "_new_process_group_helper"),
    (c10d, "_unregister_all_process_groups"),
    (_native, "_set_thread_isolation_mode"),
    (_native, "_register_process_group"),
    (_native, "_unregister_process_group"),
    (_native, "_resolve_process_group"),
    (c10d, "_register_process_group"),
    (_native, "_create_work_from_future"),
    (dist, "_register_comm_hook"),
    (_native.Reducer, "_set_forward_pass_work_handle"),
    (device_mesh, "DeviceMesh"),
    (importlib._bootstrap, "_find_and_load"),
    (importlib._bootstrap, "_lock_unlock_module"),
)
_REGISTRIES = ("backend_capability", "backend_type_map", "default_device_backend_map")


def _install(patches: Patches) -> None:
    """Have torch.distributed look which worker calls."""
    missing = missing_names()
    if missing:
        if hasattr(c10d, "_world"):
            patches.replace(c10d, "_world", lambda world: _Refusal(world, missing))
        return
    _register_backend(patches)
    registry.isolate(patches)
    patches.replace(c10d, "_world", WorldProxy)
    patches.replace(c10d, "_new_process_group_helper", calls.new_process_group_helper)
    for ours in (calls.init_process_group, calls.monitored_barrier, calls.split_group):
        for owner in (c10d, dist):
            patches.replace(owner, ours.__name__, ours)
    patches.replace(torch._C, "_collect_all", calls.collect_all)
    patches.replace(dist, "_register_comm_hook", calls.register_comm_hook)
    handle = "_set_forward_pass_work_handle"
    patches.replace(_native.Reducer, handle, calls.set_forward_pass_work_handle)
    patches.add(device_mesh.DeviceMesh, "_thread_id", property(_mesh_number, _set_mesh_number))
    patches.replace(threading.Thread, "start", _start_over)
    patches.replace(concurrent.futures.ThreadPoolExecutor, "submit", _submit_over)


def missing_names() -> list[str]:
    """The names of torch that are needed and not there."""
    found = [f"{owner.__name__}.{name}" for owner, name in _NEEDED if not hasattr(owner, name)]
    equal = getattr(device_mesh.DeviceMesh.__eq__, "__code__", None)
    if equal is None or "_thread_id" not in equal.co_names:
        found.append("torch.distributed.device_mesh.DeviceMesh._thread_id")
    return found


class _Refusal:
    """Stands for torch's world where it can't be one for each worker."""

    def __init__(self, world: Any, missing: list[str]) -> None:
        object.__setattr__(self, "_torchs", world)
        object.__setattr__(self, "_missing", missing)

    def __getattr__(self, name: str) -> Any:
        self._check()
        return getattr(self._torchs, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check()
        setattr(self._torchs, name, value)

    def _check(self) -> None:
        if current_worker_or_none() is not None:
            raise SessionError(
                f"torch.distributed can't run in worker threads with torch {torch.__version__}: "
                f"it has no {', '.join(self._missing)}. Use a torch that this discolab was made "
                "for, or the collectives of discolab.ccl"
            )


def _register_backend(patches: Patches) -> None:
    dist.Backend.register_backend(NAME, calls.make_group, extended_api=True, devices=_devices())

    def forget() -> None:
        for registry_name in _REGISTRIES:
            getattr(dist.Backend, registry_name, {}).pop(NAME, None)
        dist.Backend._plugins.pop(NAME.upper(), None)
        if NAME in dist.Backend.backend_list:
            dist.Backend.backend_list.remove(NAME)
        if hasattr(dist.Backend, NAME.upper()):
            delattr(dist.Backend, NAME.upper())

    patches.at_undo(forget)


def _devices() -> Any:
    """The types of device whose tensors it moves."""
    return ["cpu", accelerators.kind() or "cuda"]


# What runs on another thread for a worker finds its groups, of which the default one is made on the
# worker's own thread.


def _start_over(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_with_groups(self: threading.Thread) -> None:
        self.run = _with_groups(self.run)  # type: ignore[method-assign]
        start(self)

    return start_with_groups


def _submit_over(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submit_with_groups(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, _with_groups(fn), *args, **kwargs)

    return submit_with_groups


def _with_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    world = world_here()
    if world is None:
        return function
    world.default_group()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        registry.carry_over(world)
        return function(*args, **kwargs)

    return call


# A mesh of one worker must not be taken for the like mesh of another one: torch keeps what it
# has worked out for a mesh, and that depends on the rank. It tells them apart by this number.


def _mesh_number(mesh: Any) -> int | None:
    found: int | None = vars(mesh).get("_thread_id")
    return found


def _set_mesh_number(mesh: Any, number: int | None) -> None:
    world = world_here()
    vars(mesh)["_thread_id"] = number if world is None else -world.number


# A process that is forked on a worker, as those of a DataLoader are, knows its rank, as one that is
# forked in a process of torchrun does. It has no part in collectives.

_forking = threading.local()


def _before_fork() -> None:
    world = _forking.world = world_here()
    if world is not None:
        world.default_group()
        _forking.environ = environ.seen_by(world.worker)


def _in_child() -> None:
    world = _forking.world
    if world is not None:
        c10d._world = world
        for name, value in _forking.environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
table.at_child.append(_in_child)

table.add(
    Row(
        state="groups and meshes of `torch.distributed`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker is a rank; `dist` is initialized from the start. The notebook is no "
        "rank.",
        test="tests/ccl/test_dist_failures.py::test_two_sessions_at_once_and_one_after_another",
        install=_install,
        leave=close_world,
        in_own_process=True,
    )
)

del guards  # imported for the rows that it adds
