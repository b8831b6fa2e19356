"""Rank sets in one grammar: ``0``, ``1,3``, ``1-3``, ``0:4:2``, ``ranks(1,3)``, ``pp=1,tp=0:2``."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from .errors import ArgumentError
from .mesh import Mesh

_RANGE = re.compile(r"^(\d+)-(\d+)$")
_COMMA = re.compile(r",(?![^()\[\]]*[)\]])")  # not one in brackets
_SLICE = re.compile(r"^(-?\d{1,9})?:(-?\d{1,9})?(?::(-?\d{1,9})?)?$")


def parse_ranks(
    text: str | int | Iterable[int] | None, num_workers: int, mesh: Mesh | None = None
) -> list[int]:
    """Read a rank set.

    Parameters
    ----------
    text
        Ranks, ranges (``1-3``, as output is labelled) and slices separated by commas, ``all`` or
        None for every worker, or an iterable of integers. Negative ranks count from the end,
        slices are Python's. With a mesh also places along its axes, ``pp=1,tp=0:2`` or
        ``tp=(0,2)``: the workers that are at all of them.
    mesh
        The session's mesh, if it has one.

    Returns
    -------
    list of int
        In rank order, without repetition.

    Raises
    ------
    ArgumentError
        If it can't be read, or names a worker or an axis that there is not.
    """
    if text is None or (isinstance(text, str) and text == "all"):
        return list(range(num_workers))
    if isinstance(text, str) and "=" in text:
        found = set(_at_places(text, mesh))
    else:
        found = _indices(_parts(text), num_workers)
    if not found:
        raise ArgumentError(f"{text!r} names no worker; try 0, 1,3 or 0:4:2")
    return sorted(found)


def _parts(text: str | int | Iterable[int]) -> list[str]:
    if isinstance(text, int | np.integer):
        return [str(text)]
    if isinstance(text, str):
        inner = text.strip().removeprefix("ranks(").removesuffix(")").strip("[]() ")
        return [part.strip() for part in inner.split(",") if part.strip()]
    return [str(part) for part in text]


def _at_places(text: str, mesh: Mesh | None) -> Iterable[int]:
    """The workers at places along the axes of a mesh."""
    if mesh is None:
        raise ArgumentError(
            f"{text!r}: this session has no device mesh; sess.mesh(dp=2, tp=2) makes one"
        )
    inner = text.strip()
    if inner.startswith("ranks("):
        inner = inner.removeprefix("ranks(").removesuffix(")")
    places: dict[str, set[int]] = {}
    for part in _COMMA.split(inner):
        axis, equals, chosen = (word.strip() for word in part.partition("="))
        if not equals or axis in places:
            raise ArgumentError(
                f"{text!r} can't be read: of a mesh, name each axis once, as in pp=1,tp=0:2; "
                "several places of one are tp=(0,2)"
            )
        places[axis] = _indices(_parts(chosen), mesh.size(axis), axis)
    return mesh.select(places)


def _indices(parts: Iterable[str], count: int, axis: str = "") -> set[int]:
    """The ranks below `count` that the parts name; of an `axis` its places."""
    return {index for part in parts for index in _part(part, count, axis)}


def _part(part: str, count: int, axis: str) -> Iterable[int]:
    span = _RANGE.match(part)
    if span and int(span[1]) <= int(span[2]):
        _part(span[2], count, axis)  # raises if there is no such worker
        return range(int(span[1]), int(span[2]) + 1)
    match = _SLICE.match(part)
    if match:
        start, stop, step = (int(g) if g else None for g in match.groups())
        if step == 0:
            raise ArgumentError(f"{part!r}: the step of a slice can't be 0")
        return range(count)[slice(start, stop, step)]
    try:
        rank = int(part)
    except ValueError:
        raise ArgumentError(
            f"{part!r} is no rank: write ranks as 0, as a list 1,3 or as a slice 0:4:2"
        ) from None
    if not -count <= rank < count:
        raise ArgumentError(
            f"{axis}={rank} is out of range: axis {axis} of the mesh has places 0 to {count - 1}"
            if axis
            else f"worker id {rank} is out of range: this session has workers 0 to {count - 1}"
        )
    return [rank % count]
