"""The device `sim` for torch, as `torch.cuda` is for CUDA: `load()` registers it in this process.

Four devices whose work runs late and out of step, on threads, by torch's CPU kernels. A *fault* is
an access to memory that nothing has ordered after an earlier one: it is raised where it is made
and noted, and `faults()` gives what was noted. Environment: ``SIM_DELAYS`` (seed of the delays; 0:
none), ``SIM_MEMORY`` (bytes a device), ``SIM_VISIBLE_DEVICES`` (which devices there are, and in
which order: "2,0"). The library is built on first use, see build.py.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import importlib.util
import os
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

from . import build

NAME, COLLECTIVES = "sim", "simccl"
Stream, Event = torch.Stream, torch.Event
_lib: Any = None
_loaded_at = time.perf_counter()
_looked: dict[int, tuple[float, float]] = {}  # by device: when somebody looked, how long it worked
_peaks = ("limit", "allocated", "peak", "allocations")


def load() -> types.ModuleType:
    """Register the device, once; the module that torch then knows as ``torch.sim``."""
    global _lib
    import sys

    module = sys.modules[__name__]
    if _lib is None:
        path = str(build.library())
        torch.utils.rename_privateuse1_backend(NAME)
        torch.ops.load_library(path)
        _lib = ctypes.CDLL(path)
        _lib.sim_faults.restype = ctypes.c_size_t
        _lib.sim_faults.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
        _lib.sim_sleep.argtypes = (ctypes.c_double,)
        _lib.sim_busy.restype = ctypes.c_double
        _lib.sim_limit_memory.argtypes = (ctypes.c_int, ctypes.c_size_t)
        torch._register_device_module(NAME, module)
        torch.utils.generate_methods_for_privateuse1_backend()
        _register_collectives(path)
        atexit.register(_at_exit)
    return module


def _register_collectives(path: str) -> None:
    """Have torch know the collective library, by which it finds one for the device."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    library = importlib.util.module_from_spec(spec)
    loader.exec_module(library)
    torch.distributed.Backend.register_backend(COLLECTIVES, library.connect, devices=[NAME])


def loaded() -> bool:
    """Whether this process has the device."""
    return _lib is not None


def faults(*, forget: bool = True) -> list[str]:
    """What was noted since the last call."""
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = _lib.sim_faults(buffer, size, forget)
        if needed <= size:
            return buffer.raw[:needed].decode().splitlines()
        size = needed


def set_delays(seed: int) -> None:
    """Choose how streams drift apart; 0: no delays."""
    _lib.sim_delays(seed)


def sleep(seconds: float) -> None:
    """Keep the caller's current stream busy; returns at once."""
    _lib.sim_sleep(seconds)


def limit_memory(device: int, size: int) -> None:
    """Let a device have so many bytes."""
    _lib.sim_limit_memory(device, size)


def _at_exit() -> None:
    for index in range(device_count()):
        try:
            synchronize(index)
        except RuntimeError:
            pass


# -- what torch and others expect of a device's module ---------------------------------------------


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether it was used."""
    return True


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """How many devices there are."""
    return int(_lib.sim_device_count())


def current_device() -> int:
    """The calling thread's device."""
    return torch.accelerator.current_device_index()


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def set_device(device: Any) -> None:
    """Set the calling thread's device."""
    torch.accelerator.set_device_index(_index(device))


class device:  # noqa: N801  # as in torch.cuda
    """A block in which another device is the current one."""

    def __init__(self, which: Any) -> None:
        self._which = _index(which)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._which)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def current_stream(device: Any = None) -> torch.Stream:
    """The calling thread's stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    """The stream on which everybody is who has chosen none."""
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    """Set the calling thread's stream."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(which: torch.Stream) -> Iterator[None]:
    """A block in which another stream is the current one."""
    with which:
        yield


def synchronize(device: Any = None) -> None:
    """Wait until all work of a device is done."""
    torch.accelerator.synchronize(_index(device))


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Name, memory and identity of a device."""
    index = _index(device)
    return types.SimpleNamespace(
        name="simulated device",
        total_memory=_memory(index)["limit"],
        uuid=f"sim-{_lib.sim_physical(index)}",
        major=0,
        minor=0,
        multi_processor_count=1,
    )


def get_device_name(device: Any = None) -> str:
    """Name of a device."""
    return str(get_device_properties(device).name)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Version of a device."""
    return 0, 0


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes for autocast."""
    return [torch.float16, torch.bfloat16]


def _memory(device: Any = None) -> dict[str, int]:
    four = (ctypes.c_size_t * 4)()
    _lib.sim_memory(_index(device), four)
    return dict(zip(_peaks, four, strict=True))


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors have."""
    return _memory(device)["allocated"]


memory_reserved = memory_allocated


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors had at once."""
    return _memory(device)["peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count the most bytes from now on."""
    _lib.sim_reset_peak(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    """Figures under the names that `torch.cuda.memory_stats` gives them."""
    now = _memory(device)
    return {
        "allocated_bytes.all.current": now["allocated"],
        "allocated_bytes.all.peak": now["peak"],
        "reserved_bytes.all.current": now["allocated"],
        "allocation.all.allocated": now["allocations"],
    }


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free bytes, and all bytes."""
    now = _memory(device)
    return now["limit"] - now["allocated"], now["limit"]


def utilization(device: Any = None) -> int:
    """Percent of the time since the last call in which the device had something to do."""
    index, now = _index(device), time.perf_counter()
    busy = float(_lib.sim_busy(index))
    since, before = _looked.get(index, (_loaded_at, 0.0))
    _looked[index] = now, busy
    return round(100 * min(1.0, (busy - before) / max(now - since, 1e-9)))


def empty_cache() -> None:
    """Do nothing: nothing is cached."""


def _random(device: Any, seed: int | None = None, drawn: int = 0) -> tuple[int, int]:
    two = (ctypes.c_uint64 * 2)((seed or 0) % (1 << 64), drawn)
    _lib.sim_random(_index(device), two, seed is not None)
    return two[0], two[1]


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _random(None, seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices."""
    for index in range(device_count()):
        _random(index, seed)


def seed() -> None:
    """Seed the current device with a number that is another one each time."""
    _random(None, int.from_bytes(os.urandom(7), "little"))


def initial_seed() -> int:
    """The seed of the current device."""
    return _random(None)[0]


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of a device's generator: ``[16]`` uint8, on the CPU."""
    return torch.tensor(_random(device), dtype=torch.uint64).view(torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the state of a device's generator."""
    seed, drawn = state.clone().view(torch.uint64).tolist()
    _random(device, seed, drawn)
