"""Names of ranks: the workers and the controller, which can be called. No state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import UnknownWorkerError

CONTROLLER = -1
_NAME_OF_CONTROLLER = "controller"


class WorkerInfo(NamedTuple):
    """Name and rank of a worker or the controller: ``worker2``, 2, or ``controller``, -1."""

    name: str
    id: int


def name_of(rank: int) -> str:
    """``worker2`` or ``controller``."""
    return _NAME_OF_CONTROLLER if rank == CONTROLLER else f"worker{rank}"


def format_rank(rank: int) -> str:
    """For messages: ``worker 2`` or ``the controller``."""
    return "the controller" if rank == CONTROLLER else f"worker {rank}"


def rank_of(to: Any, num_workers: int, names: Mapping[int, str]) -> int:
    """The rank that a caller means.

    Parameters
    ----------
    to
        A rank, ``"worker2"``, ``"controller"``, or a `WorkerInfo`.
    names
        What ranks are called that have other names.

    Raises
    ------
    UnknownWorkerError
        If it is none of these, or there is no such worker.
    """
    rank = to
    if isinstance(to, WorkerInfo):
        rank = to.id
    elif isinstance(to, str) and to in names.values():
        rank = next(rank for rank, name in names.items() if name == to)
    elif isinstance(to, str):
        digits = to.removeprefix("worker")
        if to == _NAME_OF_CONTROLLER:
            rank = CONTROLLER
        elif to.startswith("worker") and digits.isdigit() and digits == str(int(digits)):
            rank = int(digits)
    try:
        rank = rank.__index__()
    except (AttributeError, TypeError):
        known = "".join(f", {name!r}" for name in names.values())
        raise UnknownWorkerError(
            f"whom to call is a rank, 'worker2' or 'controller'{known}, got {to!r}"
        ) from None
    if isinstance(to, bool) or not CONTROLLER <= rank < num_workers:
        raise UnknownWorkerError(
            f"there is no worker {to!r}: ranks go from 0 to {num_workers - 1}, "
            f"and {CONTROLLER} is the controller"
        )
    return int(rank)
