"""Modules and functions of TVM on workers, and Disco's collectives for the programs in them.

Each worker has a virtual machine of its own for a module that `relax` has compiled, on its own
device. What runs there finds the collectives in TVM's registry, under Disco's names: TVM's own are
replaced, once in a process, by functions that call this worker's. On a thread that is no worker of
ours they call TVM's, so that a Disco session of TVM's goes on as before.

`_libraries` and `_replaced` are read and written under `_lock`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import functions
from .errors import ArgumentError, WorkerInterrupted
from .interrupts import plain_lock
from .tvm_values import from_tvm, to_tvm
from .worker import current_worker_or_none

_POOLED = 2  # TVM's kind of allocator that keeps freed memory

# What compiled programs call.
_CALLED = (
    *("allreduce", "allgather", "broadcast_from_worker0", "scatter_from_worker0"),
    *("gather_to_worker0", "send_to_next_group", "recv_from_prev_group", "send_to_worker"),
    *("recv_from_worker", "recv_from_worker0", "worker_id", "worker_rank", "world_size", "device"),
)

_lock = plain_lock()
_libraries: dict[str, tuple[tuple[int, ...], Any]] = {}  # by path: which file it was, the library
_replaced = False
_local = threading.local()


class TVMModule:
    """A module of TVM whose functions take and return torch's tensors."""

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self.__name__ = name

    def get_function(self, name: str, query_imports: bool = False) -> Callable[..., Any] | None:
        """A function by name; with `query_imports` also of the modules that it imports."""
        try:
            return _callable(self._module.get_function(name, query_imports), name)
        except AttributeError:
            return None


def find(name: str) -> Callable[..., Any] | None:
    """A function of TVM's registry; TVM, if it is there, registers its own when it is imported."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return None
    ffi = _prepared()
    found = ffi.get_global_func(name, allow_missing=True)
    return None if found is None else _callable(found, name)


def load(file: Path, device: torch.device) -> TVMModule:
    """A shared library: the functions that `relax` has compiled, or those of `tvm_ffi`.

    Raises
    ------
    ArgumentError
        If it can't be loaded.
    """
    if importlib.util.find_spec("tvm_ffi") is None:
        raise ArgumentError(
            "load_module: a shared library needs the package apache-tvm-ffi, and one that TVM has "
            "compiled apache-tvm: pip install apache-tvm"
        )
    ffi = _prepared()
    try:
        library = _library(ffi, file)
    except Exception as exc:
        missing = importlib.util.find_spec("tvm") is None
        hint = "; a module that TVM has compiled needs apache-tvm: pip install it"
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        raise ArgumentError(
            f"load_module: TVM can't load {str(file)!r}: {lines[0]}{hint if missing else ''}"
        ) from exc
    try:
        begin = library.get_function("vm_load_executable")
    except AttributeError:  # no program of relax: the functions are its own
        return TVMModule(library, file.name)
    machine = begin()
    kind, index = torch.empty(0, device=device).__dlpack_device__()
    places = [int(kind), index, _POOLED]
    if device.type != "cpu":
        places += [*map(int, torch.empty(0, device="cpu").__dlpack_device__()), _POOLED]
    machine.get_function("vm_initialization")(*places)
    return TVMModule(machine, file.name)


def _library(ffi: Any, file: Path) -> Any:
    """The library in a file, one for all workers of a process, and a new one if the file is new.

    A copy is loaded: for the name of a file that it has loaded, the system gives the same library
    again, whatever has been compiled into that file since.
    """
    path = os.path.realpath(file)
    found = os.stat(path)
    version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    with _lock:
        known = _libraries.get(path)
        if known is not None and known[0] == version:
            return known[1]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            library = ffi.load_module(shutil.copy(path, folder))
        _libraries[path] = version, library
        return library


def _prepared() -> Any:
    """`tvm_ffi`, with TVM imported where it is installed, and our collectives in its registry."""
    global _replaced
    ffi = importlib.import_module("tvm_ffi")
    if importlib.util.find_spec("tvm") is not None:
        importlib.import_module("tvm")
    with _lock:
        if not _replaced:
            for name in _CALLED:
                _replace(ffi, f"runtime.disco.{name}")
            _replaced = True
    return ffi


def _replace(ffi: Any, name: str) -> None:
    theirs = ffi.get_global_func(name, allow_missing=True)

    def call(*args: Any) -> Any:
        ours = functions.registered(name)
        if theirs is not None and (ours is None or current_worker_or_none() is None):
            return theirs(*args)
        try:
            assert ours is not None
            found = ours(*map(from_tvm, args))
        except BaseException as exc:
            _local.raised = exc  # on its way TVM makes another kind of it
            raise
        return ffi.Shape([found]) if name.endswith("worker_id") else to_tvm(found)

    ours = ffi.convert_func(call, tensor_cls=torch.Tensor)
    ffi.register_global_func(name, ours, override=True)


def _callable(func: Any, name: str) -> Callable[..., Any]:
    """A function of TVM as one that takes and returns what Python and torch have."""

    def call(*args: Any) -> Any:
        given = [to_tvm(arg) for arg in args]
        try:
            return _opened(func(*given), name)
        except BaseException as exc:
            raised = getattr(_local, "raised", None) or _interrupt(exc)
            if raised is None or raised is exc:
                raise
            raise raised from None
        finally:
            _local.raised = None

    call.__name__ = call.__qualname__ = name
    return call


def _interrupt(exc: BaseException) -> WorkerInterrupted | None:
    """The interrupt that TVM has turned into an error without a message, if it is one."""
    worker = current_worker_or_none()
    if type(exc) is not RuntimeError or str(exc) or worker is None or not worker.interrupts:
        return None
    return WorkerInterrupted("interrupted")


def _opened(value: Any, name: str) -> Any:
    """A result; modules and functions among them are opened too."""
    ffi: Any = importlib.import_module("tvm_ffi")
    if isinstance(value, ffi.Module):
        return TVMModule(value, name)
    if isinstance(value, ffi.Function):
        return _callable(value, name)
    return from_tvm(value)


functions.finders.append(find)
