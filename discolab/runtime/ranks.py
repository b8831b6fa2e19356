"""Rank sets in one grammar: ``0``, ``1,3``, ``1-3``, ``0:4:2``, ``ranks(1,3)``."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from .errors import ArgumentError

_RANGE = re.compile(r"^(\d+)-(\d+)$")
_SLICE = re.compile(r"^(-?\d{1,9})?:(-?\d{1,9})?(?::(-?\d{1,9})?)?$")


def parse_ranks(text: str | int | Iterable[int] | None, num_workers: int) -> list[int]:
    """Read a rank set.

    Parameters
    ----------
    text
        Ranks, ranges (``1-3``, as output is labelled) and slices separated by commas, ``all`` or
        None for every worker, or an iterable of integers. Negative ranks count from the end,
        slices are Python's.

    Returns
    -------
    list of int
        In rank order, without repetition.

    Raises
    ------
    ArgumentError
        If it can't be read, or names a worker that there is not.
    """
    if text is None or (isinstance(text, str) and text == "all"):
        return list(range(num_workers))
    if isinstance(text, int | np.integer):
        parts = [str(text)]
    elif isinstance(text, str):
        inner = text.strip().removeprefix("ranks(").removesuffix(")").strip("[]() ")
        parts = [part.strip() for part in inner.split(",") if part.strip()]
    else:
        parts = [str(part) for part in text]
    found: set[int] = set()
    for part in parts:
        found.update(_part(part, num_workers))
    if not found:
        raise ArgumentError(f"{text!r} names no worker; try 0, 1,3 or 0:4:2")
    return sorted(found)


def _part(part: str, num_workers: int) -> Iterable[int]:
    span = _RANGE.match(part)
    if span and int(span[1]) <= int(span[2]):
        _part(span[2], num_workers)  # raises if there is no such worker
        return range(int(span[1]), int(span[2]) + 1)
    match = _SLICE.match(part)
    if match:
        start, stop, step = (int(g) if g else None for g in match.groups())
        if step == 0:
            raise ArgumentError(f"{part!r}: the step of a slice can't be 0")
        return range(num_workers)[slice(start, stop, step)]
    if "=" in part:
        raise ArgumentError(f"{part!r}: this session has no device mesh with named dimensions")
    try:
        rank = int(part)
    except ValueError:
        raise ArgumentError(
            f"{part!r} is no rank: write ranks as 0, as a list 1,3 or as a slice 0:4:2"
        ) from None
    if not -num_workers <= rank < num_workers:
        raise ArgumentError(
            f"worker id {rank} is out of range: this session has workers 0 to {num_workers - 1}"
        )
    return [rank % num_workers]
