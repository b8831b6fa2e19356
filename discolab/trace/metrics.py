"""What a worker's device and process are doing: memory, time on the CPU, the GPU by NVML.

`sample` is a probe, so it works while workers compute or hang. It reads what there is and changes
nothing: CUDA is never initialised by a look, and what is not there is None or -1. NVML is asked
through pynvml, if that is installed; which GPU of NVML a device of torch is, or that it is none, is
remembered in `_handles` for the life of the process.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..ccl.board.ledger import ledger_of
from ..ccl.board.rounds import in_words
from ..ccl.call import WAITING, Call
from ..runtime import accelerators
from ..runtime.services import probe
from ..runtime.worker import Worker
from .recorder import recorder_of

_handles: dict[str, tuple[Any, Any, str]] = {}  # by device: pynvml or None, handle, UUID


@probe
def sample(worker: Worker) -> dict[str, Any]:
    """What a worker's process and device are doing at this moment.

    Returns
    -------
    dict
        ``at`` (ns on the worker's clock), ``rank``, ``pid``, ``thread`` (of the operating system),
        ``host``, ``device``, ``device_name``; ``cpu_ns``, the time on the CPU so far, of the
        worker's thread or of its whole process (``cpu_of``); ``rss``, the bytes of its process,
        which ``threads`` workers share; ``memory`` of torch on a GPU and ``gpu`` as NVML tells it,
        or None; ``executed``, ``busy``, ``tracing``; ``collective``, which it is in, or None.
    """
    thread = native_id(worker)
    alone = _has_process(worker)
    recorder = recorder_of(worker)
    return {
        "at": time.perf_counter_ns(),
        "rank": worker.worker_id,
        "pid": os.getpid(),
        "thread": thread,
        "host": _host(),
        "device": str(worker.device),
        "device_name": _device_name(worker.device),
        "cpu_ns": time.process_time_ns() if alone else _thread_time(thread),
        "cpu_of": "process" if alone else "thread",
        "rss": _resident(),
        "threads": 1 if alone else len(worker.peers),
        "memory": _memory(worker.device),
        "gpu": gpu_facts(worker.device),
        "executed": worker.executed,
        "busy": worker.current is not None,
        "tracing": recorder is not None and recorder.on,
        "collective": _collective(worker),
    }


def utilisation(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """How much of the time between two samples of a worker was on the CPU: 1.0 is one core.

    None if it is not known, or if they are of different processes.
    """
    if before["pid"] != after["pid"] or before["thread"] != after["thread"]:
        return None
    if before["cpu_ns"] < 0 or after["cpu_ns"] < 0 or after["at"] <= before["at"]:
        return None
    return float((after["cpu_ns"] - before["cpu_ns"]) / (after["at"] - before["at"]))


def native_id(worker: Worker) -> int:
    """What the operating system calls the worker's thread; 0 if it has none."""
    if _has_process(worker) and sys.platform == "linux":
        return os.getpid()  # Python remembers the number that it had before a fork
    for thread in threading.enumerate():
        if thread.ident == worker.thread_id:
            return thread.native_id or 0
    return 0


def _has_process(worker: Worker) -> bool:
    """Whether its process is there for this worker alone; worker 0 is in the controller's."""
    return worker.worker_id > 0 and len(worker.peers) == 1


@functools.lru_cache(maxsize=1)
def _host() -> str:
    return socket.gethostname()


def _device_name(device: torch.device) -> str:
    if not accelerators.in_use(device):
        return ""
    return str(accelerators.module_of(device).get_device_properties(device).name)


def _thread_time(thread: int) -> int:
    """Nanoseconds on the CPU of a thread of this process; -1 if unknown."""
    if not thread:
        return -1
    try:
        text = Path(f"/proc/self/task/{thread}/schedstat").read_bytes()
        return int(text.split()[0])
    except (OSError, ValueError, IndexError):
        pass
    import psutil

    try:
        times = {one.id: one.user_time + one.system_time for one in psutil.Process().threads()}
        return int(times[thread] * 1e9)
    except (psutil.Error, KeyError):
        return -1


def _resident() -> int:
    """Bytes of memory that this process holds; -1 if unknown."""
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except psutil.Error:
        return -1


def _memory(device: torch.device) -> dict[str, int] | None:
    """Of this process on its GPU, and of the GPU."""
    if not accelerators.in_use(device):
        return None
    try:
        module = accelerators.module_of(device)
        stats = module.memory_stats(device)
        free, total = module.mem_get_info(device)
    except (RuntimeError, AssertionError):  # an error of CUDA that a kernel has left
        return None
    return {
        "used": stats.get("allocated_bytes.all.current", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "free": free,
        "total": total,
    }


def gpu_facts(device: torch.device) -> dict[str, Any] | None:
    """``utilisation`` in %, ``memory`` in bytes, ``temperature`` in °C, ``power`` in W, ``uuid``.

    Of CUDA's GPUs NVML is asked; of other accelerators their module in torch, if it tells any.
    Single facts that are not told are None; None if there is no such GPU, or nobody to ask.
    """
    if not accelerators.in_use(device):
        return None
    return _from_nvml(device) if device.type == "cuda" else _from_module(device)


def _from_module(device: torch.device) -> dict[str, Any] | None:
    """What the module of an accelerator tells by functions with the names of `torch.cuda`'s."""
    module = accelerators.module_of(device)
    if not any(hasattr(module, name) for name in ("utilization", "temperature")):
        return None
    free_and_total = _ask(lambda: module.mem_get_info(device)) or (0, 0)
    return {
        "utilisation": _ask(lambda: int(module.utilization(device))),
        "memory": free_and_total[1] - free_and_total[0],
        "temperature": _ask(lambda: int(module.temperature(device))),
        "power": None,
        "uuid": str(_ask(lambda: module.get_device_properties(device).uuid) or ""),
    }


def _from_nvml(device: torch.device) -> dict[str, Any] | None:
    key = str(device)
    if key not in _handles:
        _handles[key] = _find(device)
    nvml, handle, uuid = _handles[key]
    if nvml is None:
        return None
    return {
        "utilisation": _ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "memory": _ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
        "temperature": _ask(
            lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        "power": _ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "uuid": uuid,
    }


def _find(device: torch.device) -> tuple[Any, Any, str]:
    """The device by its UUID, as CUDA_VISIBLE_DEVICES changes the numbers."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        if not uuid.startswith(("GPU-", "MIG-")):
            uuid = f"GPU-{uuid}"
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), uuid
    except Exception:
        return None, None, ""


def _ask(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception:  # not supported by this GPU, or lost
        return None


def _collective(worker: Worker) -> dict[str, Any] | None:
    """The collective or message in which a worker is now."""
    call = _call_now(worker)
    if call is None:
        return None
    signature = call.signature
    return {
        "op": call.name,
        "what": str(signature),
        "group": list(call.group.ranks),
        "ordinal": call.ordinal,
        "number": call.number,
        "site": in_words(call.site),
        "seconds": time.monotonic() - call.began,
        "state": call.state,
    }


def _call_now(worker: Worker) -> Call | None:
    if worker.current is None:
        return None
    call_of = getattr(worker.waiting_for, "call_of", None)
    call: Call | None = None if call_of is None else call_of(worker.worker_id)
    if call is not None:
        return call
    story = ledger_of(worker).story(worker.worker_id)
    last = story[-1] if story else None
    if last is None or last.state is not WAITING or last.ordinal != worker.executed:
        return None
    return None if last.asynchronous else last
