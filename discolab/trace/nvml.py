"""What NVML tells of a GPU, through pynvml if that is installed. Never raises.

A device of torch is found by its UUID, as CUDA_VISIBLE_DEVICES changes the numbers. What was found,
or that nothing was, is remembered for the life of the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_handles: dict[str, tuple[Any, Any, str]] = {}  # by device: pynvml or None, handle, UUID


def gpu_facts(device: torch.device) -> dict[str, Any] | None:
    """``utilisation`` in %, ``memory`` in bytes, ``temperature`` in °C, ``power`` in W, ``uuid``.

    Single facts that the GPU does not tell are None; None if there is no such GPU, or no pynvml.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return None
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
