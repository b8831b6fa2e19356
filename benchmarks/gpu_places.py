"""Where gpu_check.py puts workers, and how thoroughly it checks: frozen values, no state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from discolab import ThreadedSession

WAIT = 60.0  # seconds that a session may wait
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
QUICK_DTYPES = DTYPES[:2]


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
        return torch.cuda.device_count() if self.device == "cuda" else 0

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Element types of the tensors."""
        return QUICK_DTYPES if self.quick else DTYPES

    def shared_place(self) -> Place:
        """Four workers on one device."""
        device = "cuda:0" if self.gpus else "cpu"
        return Place(f"4 workers on {device}", (device,) * 4)

    def spread_place(self) -> Place:
        """A worker on each GPU; on the CPU, four workers."""
        if not self.gpus:
            return self.shared_place()
        names = tuple(f"cuda:{index}" for index in range(self.gpus))
        if self.gpus == 1:
            return Place("1 worker on cuda:0", names)
        return Place(f"{self.gpus} workers, a GPU each", names)

    def places(self) -> list[Place]:
        """Where `local` is checked."""
        found = [self.shared_place()]
        if self.gpus > 1:
            devices = tuple(f"cuda:{rank % self.gpus}" for rank in range(2 * self.gpus))
            found += [self.spread_place(), Place(f"{len(devices)} workers, two a GPU", devices)]
        return found

    def process_groups(self) -> str:
        """The backend that stands on torch's process groups."""
        return "nccl" if self.gpus else "gloo"
