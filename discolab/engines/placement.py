"""How many workers a session has, and where each computes: the checks of all engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..runtime import accelerators
from ..runtime.arguments import parse_device
from ..runtime.errors import ArgumentError


def check_world(num_workers: Any, num_groups: Any) -> tuple[int, int]:
    """Check the number of workers and groups of any engine.

    Raises
    ------
    ArgumentError
        If either is no positive integer, or the workers can't be split into equal groups.
    """
    for what, value in (("num_workers", num_workers), ("num_groups", num_groups)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{what} must be a positive integer, got {value!r}")
    if num_workers % num_groups:
        raise ArgumentError(
            f"{num_workers} workers can't be split into {num_groups} equal groups: num_workers "
            "must be divisible by num_groups"
        )
    return num_workers, num_groups


def place_workers(num_workers: int, devices: Any) -> list[torch.device]:
    """The device of each worker.

    Raises
    ------
    ArgumentError
        If the list has another length, a name is none of torch's, or there is no such device.
    """
    if devices is None:
        kind, count = accelerators.default_kind(), accelerators.count()
        names: list[Any] = [f"{kind}:{r % count}" if kind else "cpu" for r in range(num_workers)]
    elif isinstance(devices, str | torch.device):
        names = [devices] * num_workers
    elif not isinstance(devices, Iterable):
        raise ArgumentError(
            f"devices is a device such as 'cpu' or 'cuda:0', or a list of them, got {devices!r}"
        )
    else:
        names = list(devices)
        if len(names) != num_workers:
            raise ArgumentError(
                f"devices lists {len(names)} devices for {num_workers} workers; give one for "
                "each, or a single one for all"
            )
    return [_check_device(name) for name in names]


def _check_device(name: Any) -> torch.device:
    device = parse_device(name)
    if device is None:
        raise ArgumentError("None is not a device; leave devices out to have them chosen")
    if device.type in ("cuda", accelerators.kind()):
        count = accelerators.count()
        if (device.index or 0) >= count:
            raise ArgumentError(f"there is no {device}: torch sees {count} GPUs; try devices='cpu'")
        device = torch.device(device.type, device.index or 0)
    elif device.type != "cpu":
        kind = accelerators.kind() or "cuda"
        raise ArgumentError(f"workers run on 'cpu' or '{kind}:N', not on {str(device)!r}")
    return device
