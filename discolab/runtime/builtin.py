"""The worker functions that every session has, under Disco's names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import tvm_modules
from .errors import ArgumentError
from .functions import register_func
from .interrupts import plain_lock
from .tvm_modules import TVMModule
from .worker import current_worker

_export_lock = plain_lock()  # torch.export keeps the package that it reads in a global

_files_run = itertools.count(1)  # makes the module names of loaded files unique


@register_func("runtime.disco.empty")
def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None = None,
    worker0_only: bool = False,
    in_group: bool = True,
) -> torch.Tensor | None:
    """An uninitialised tensor, or None on workers that `worker0_only` leaves out."""
    worker = current_worker()
    first = worker.is_root if in_group else worker.worker_id == 0
    if worker0_only and not first:
        return None
    return torch.empty(shape, dtype=dtype, device=device or worker.device)


@register_func("runtime.disco.worker_id")
def worker_id() -> int:
    """This worker's rank."""
    return current_worker().worker_id


@register_func("runtime.disco.worker_rank")
def worker_rank() -> int:
    """This worker's rank."""
    return current_worker().worker_id


@register_func("runtime.disco.world_size")
def world_size() -> int:
    """How many workers there are."""
    return current_worker().num_workers


@register_func("runtime.disco.device")
def device() -> torch.device:
    """This worker's device."""
    return current_worker().device


@register_func("runtime.disco.bind_worker_to_cpu_core")
def bind_worker_to_cpu_core(cpu_ids: Any) -> None:
    """Run this worker's thread on one core: the rank-th of `cpu_ids`."""
    cores = [int(core) for core in cpu_ids]
    worker = current_worker()
    if len(cores) != worker.num_workers:
        raise ArgumentError(f"give one core for each of the {worker.num_workers} workers")
    if not hasattr(os, "sched_setaffinity"):
        raise ArgumentError("this operating system can't bind a thread to a core")
    try:
        os.sched_setaffinity(0, {cores[worker.worker_id]})
    except (OSError, ValueError) as exc:
        raise ArgumentError(f"core {cores[worker.worker_id]} can't be used: {exc}") from None


@register_func("runtime.disco._import_python_module")
def import_python_module(name: str) -> None:
    """Import a module, so that the functions which it registers are known."""
    importlib.import_module(name)


@register_func("runtime.disco.load_vm_module")
def load_vm_module(path: str, device: torch.device | None = None) -> Any:
    """Load what `Session.load_module` describes; each worker has a module of its own."""
    where = device or current_worker().device
    file = Path(path)
    if file.suffix == ".py":
        return _run_file(_existing(file))
    if file.suffix == ".pt2":
        with _export_lock:
            program = torch.export.load(str(_existing(file)))
            return program.module().to(where)
    if file.suffix in (".so", ".dylib", ".dll"):
        return tvm_modules.load(_existing(file), where)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as exc:
        raise ArgumentError(
            f"load_module: {path!r} is neither an importable module nor a .py, .pt2 or "
            f"shared-library file: {exc}"
        ) from None


@register_func("runtime.disco.module_get_function")
@register_func("ffi.ModuleGetFunction")
def module_get_function(module: Any, name: str, query_imports: bool = False) -> Any:
    """A function of a loaded module, by name."""
    function = None if isinstance(module, TVMModule) else getattr(module, name, None)
    if function is None and not isinstance(module, ModuleType):
        getter = getattr(module, "get_function", None)
        function = getter(name, query_imports) if callable(getter) else None
    if not callable(function):
        raise ArgumentError(f"{getattr(module, '__name__', module)!s:.80} has no function {name!r}")
    return function


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ArgumentError(f"load_module: there is no file {str(file)!r}")
    return file


def _run_file(file: Path) -> ModuleType:
    """A fresh module of a file: its globals are this worker's alone."""
    name = f"{file.stem}_of_worker_{current_worker().worker_id}_{next(_files_run)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


# -- variables of cells -----------------------------------------------------------------------


def get_variable(name: str) -> Any:
    """The value of a global variable of this worker's cells."""
    namespace = current_worker().namespace
    try:
        return namespace[name]
    except KeyError:
        near = difflib.get_close_matches(name, list_variables(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ArgumentError(f"this worker has no variable named {name!r}{hint}") from None


def set_variables(values: dict[str, Any]) -> None:
    """Set global variables of this worker's cells."""
    current_worker().namespace.update(values)


def list_variables() -> list[str]:
    """Names that the user gave, sorted."""
    return sorted(n for n in current_worker().namespace if not n.startswith("_"))
