"""Who writes what: each byte of a checkpoint by one worker. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ...layouts.layout import Layout, Workers, cut
from ..catalog import Shape
from ..presharded import Sharding, shard_name
from .records import Slot


@dataclass(frozen=True, slots=True)
class Share:
    """A box that a worker writes.

    Attributes
    ----------
    name
        The parameter.
    slot
        The tensor that it is a part of, in the files.
    start
        Where it begins in that tensor.
    at, shape
        The box in the worker's own tensor.
    """

    name: str
    slot: Slot
    start: Shape
    at: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.slot.record.stored.itemsize


def shares(
    slots: Mapping[str, Slot], sharding: Sharding, presharded: bool, rank: int
) -> list[Share]:
    """What a worker writes, in the order of the files.

    Parameters
    ----------
    slots
        By the name of the tensor in the files.
    """
    found = []
    workers = sharding.workers
    for number, (name, layout) in enumerate(sharding.layouts.items()):
        shape = sharding.shapes[name]
        if presharded:
            slot = slots.get(shard_name(name, rank, workers.count))
            if slot is not None:
                mine = slot.record.shape
                zero = (0,) * len(mine)
                found.append(Share(name, slot, zero, zero, mine))
            continue
        for turn, (start, size, holders) in enumerate(_boxes(layout, shape, workers)):
            owner = (number + turn) % len(holders)  # in turn, for even work
            if holders[owner][0] == rank:
                found.append(Share(name, slots[name], start, holders[owner][1], size))
    return sorted(found, key=lambda share: (share.slot.file, share.slot.offset))


@lru_cache(maxsize=1024)  # layers of a model are alike
def _boxes(
    layout: Layout, shape: Shape, workers: Workers
) -> tuple[tuple[Shape, Shape, tuple[tuple[int, Shape], ...]], ...]:
    """The boxes of a parameter: begin, shape, and who holds it where in its tensor."""
    found: dict[tuple[Shape, Shape], list[tuple[int, Shape]]] = {}
    for rank in range(workers.count):
        made = cut(layout, shape, workers, rank)
        for box in made.boxes if made else ():
            found.setdefault((box.start, box.shape), []).append((rank, box.at))
    return tuple((*key, tuple(holders)) for key, holders in found.items())
