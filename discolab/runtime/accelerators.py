"""The machine's accelerators, of whichever kind torch has: which there are, and their streams.

torch has one kind of accelerator in a process: CUDA (or ROCm, which goes by that name), XPU, one
of another library. What only CUDA has is not here but where it is used. No state; any thread.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

_HOST = ("cpu", "meta")
_SHARES_MEMORY = "mps"  # has no streams to speak of, nor float64: nobody is placed there unasked


def on_accelerator(device: torch.device) -> bool:
    """Whether it is an accelerator's."""
    return device.type not in _HOST


def kind() -> str | None:
    """The type of device that this process's accelerators have; None if it can have none."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def count() -> int:
    """How many accelerators torch sees."""
    return torch.accelerator.device_count()


def default_kind() -> str | None:
    """The type of device that workers take unasked; None if there is none."""
    found = kind()
    return found if found != _SHARES_MEMORY and count() else None


def module_of(device: torch.device) -> ModuleType | Any:
    """What torch has for that type of device, such as `torch.cuda`."""
    return torch.get_device_module(device)


def in_use(device: torch.device) -> bool:
    """Whether it is an accelerator that this process has begun to use."""
    if not on_accelerator(device):
        return False
    ask = getattr(module_of(device), "is_initialized", None)
    return ask is None or bool(ask())


def any_in_use() -> bool:
    """Whether this process has begun to use an accelerator."""
    found = kind()
    return found is not None and in_use(torch.device(found))


def set_current(device: torch.device) -> None:
    """Make it the calling thread's device, if it is an accelerator."""
    if on_accelerator(device):
        torch.accelerator.set_device_index(device.index or 0)


def current_stream(device: torch.device) -> torch.Stream:
    """The calling thread's stream of an accelerator."""
    return torch.accelerator.current_stream(device)


def synchronize(device: torch.device) -> None:
    """Wait for what the calling thread's stream has been given, if it is an accelerator's."""
    if on_accelerator(device):
        current_stream(device).synchronize()
