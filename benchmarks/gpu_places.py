"""Where gpu_check.py puts workers, and how thoroughly it checks: frozen values, no state."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from discolab import ThreadedSession

_REGISTER = "tests.accelerator.register"
WAIT = 60.0  # seconds that a session may wait
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
QUICK_DTYPES = DTYPES[:2]


SIMULATED = "sim"


def make_known(device: str) -> None:
    """Have torch know the simulated accelerator of the tests, if it is asked for."""
    if device == SIMULATED:
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        from discolab.runtime.services import PRELOAD

        importlib.import_module(_REGISTER)
        PRELOAD.insert(0, _REGISTER)


@dataclass(frozen=True)
class Place:
    """Where the workers of a session are."""

    name: str
    devices: tuple[str, ...]

    def session(self) -> ThreadedSession:
        """A new session there."""
        return ThreadedSession(len(self.devices), devices=list(self.devices), timeout=WAIT)

    @property
    def shared(self) -> bool:
        """Whether all workers are on one device."""
        return len(set(self.devices)) == 1


@dataclass(frozen=True)
class Setting:
    """What to check, and how thoroughly."""

    section: str
    device: str
    quick: bool

    @property
    def gpus(self) -> int:
        """How many there are to use."""
        return 0 if self.device == "cpu" else torch.accelerator.device_count()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Element types of the tensors."""
        return QUICK_DTYPES if self.quick else DTYPES

    def shared_place(self) -> Place:
        """Four workers on one device."""
        device = f"{self.device}:0" if self.gpus else "cpu"
        return Place(f"4 workers on {device}", (device,) * 4)

    def spread_place(self) -> Place:
        """A worker on each GPU; on the CPU, four workers."""
        if not self.gpus:
            return self.shared_place()
        names = tuple(f"{self.device}:{index}" for index in range(self.gpus))
        if self.gpus == 1:
            return Place(f"1 worker on {names[0]}", names)
        return Place(f"{self.gpus} workers, a GPU each", names)

    def places(self) -> list[Place]:
        """Where `local` is checked."""
        found = [self.shared_place()]
        if self.gpus > 1:
            devices = tuple(f"{self.device}:{rank % self.gpus}" for rank in range(2 * self.gpus))
            found += [self.spread_place(), Place(f"{len(devices)} workers, two a GPU", devices)]
        return found

    def process_groups(self) -> str:
        """The backend that stands on torch's process groups."""
        return self.library() if self.gpus else "gloo"

    def library(self) -> str:
        """What torch calls the GPUs' own library; on the CPU the one that is refused there."""
        return dist.Backend.default_device_backend_map[self.device] if self.gpus else "nccl"
