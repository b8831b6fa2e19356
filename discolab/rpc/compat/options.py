"""What `init_rpc` may be told; most of it is about connections, which a session has already."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..node import DEFAULT_TIMEOUT

Device = int | str | torch.device


class BackendType(enum.Enum):
    """PyTorch's backends, of which there is one."""

    TENSORPIPE = "TENSORPIPE"


class TensorPipeRpcBackendOptions:
    """Options of `init_rpc`.

    Parameters
    ----------
    rpc_timeout
        Seconds for calls that say nothing of it; 0: no limit.
    device_maps
        By the callee's name, which of its devices stands for which of the caller's. Tensors go to
        the device of the same name here, so any other map is refused by `init_rpc`.
    num_worker_threads, init_method, devices
        Ignored: a session has its threads, connections and devices.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = DEFAULT_TIMEOUT,
        init_method: str = "env://",
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        **_: Any,
    ) -> None:
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Add to the map for a callee."""
        known = self.device_maps.setdefault(to, {})
        known.update({torch.device(k): torch.device(v) for k, v in device_map.items()})

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Say which devices are used."""
        self.devices = [torch.device(device) for device in devices]
