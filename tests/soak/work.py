"""What the soak has workers do; they import it by name."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from discolab import ccl, current_worker, rpc

MODULUS = 9973
PLANTED = "DISCOLAB_SOAK_PLANTED"  # in the environment: of which operation the result is wrong


class Raised(Exception):
    """What a function raises that is to fail."""


def values(seed: int, rank: int, size: int) -> torch.Tensor:
    """What `make` makes on a worker."""
    return (torch.arange(size) * (seed + rank) + seed) % MODULUS


def make(seed: int, size: int) -> torch.Tensor:
    return values(seed, current_worker().rank, size)


def combine(how: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = (a + b if how == "add" else a * b) % MODULUS
    return found + 1 if os.environ.get(PLANTED) == how else found


def change(a: torch.Tensor, by: int) -> None:
    a.add_(by).remainder_(MODULUS)


def reduce(a: torch.Tensor, how: str, group: str) -> torch.Tensor:
    if how == "sum":
        return ccl.all_reduce(a.clone(), group=group) % MODULUS
    if how == "gather":
        return ccl.all_gather(a, group=group)
    return ccl.broadcast(a.clone(), 0, group=group)


def fail(ranks: Sequence[int]) -> int:
    if current_worker().rank in ranks:
        raise Raised(f"as it should, on {list(ranks)}")
    return current_worker().rank


def busy(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


def busy_at(rank: int) -> None:
    if current_worker().rank == rank:
        busy(1000)


def asleep(seconds: float) -> None:
    time.sleep(seconds)


def stuck(rank: int) -> None:
    """All but one wait for that one, which computes."""
    if current_worker().rank == rank:
        busy(1000)
    ccl.barrier(group="world")


BLOCKING = {"busy": (busy, 1000.0), "asleep": (asleep, 1000.0), "stuck": (stuck, 0)}


def pid() -> int:
    return os.getpid()


def ring(seed: int, size: int) -> torch.Tensor:
    """Each worker asks the next one, by a call or by a reference."""
    worker = current_worker()
    to = (worker.rank + 1) % worker.num_workers
    mine = values(seed, worker.rank, size)
    if seed % 2:
        return rpc.rpc_sync(to, combine, ("add", mine, mine))
    ref = rpc.remote(to, combine, ("add", mine, mine))
    return ref.to_here()
