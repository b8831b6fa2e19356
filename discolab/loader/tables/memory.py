"""What each worker holds and reads of a checkpoint, counted from a plan's result. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...layouts.layout import Cut, Layout, Workers, cut

if TYPE_CHECKING:
    from ..plans.resolved import Resolved


class Cuts:
    """The cuts of a plan's result: each kind of parameter is cut once, not once in every layer."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.workers: Workers = resolved.workers
        self._found: dict[tuple[Layout, tuple[int, ...]], tuple[Cut | None, ...]] = {}

    def of(self, name: str) -> tuple[Cut | None, ...]:
        """What each worker holds of a parameter, by rank; None: nothing, not even an empty one."""
        layout, shape = self.resolved.layouts[name], self.resolved.catalog.entries[name].shape
        key = layout, shape
        if key not in self._found:
            ranks = range(self.workers.count)
            self._found[key] = tuple(cut(layout, shape, self.workers, rank) for rank in ranks)
        return self._found[key]

    def memory(self, name: str, dtype: torch.dtype | None) -> list[int]:
        """Bytes of a parameter on each worker, once it is loaded."""
        size = self.resolved.catalog.entries[name].loaded_as(dtype).itemsize
        return [0 if part is None else part.numel * size for part in self.of(name)]

    def read(self, name: str) -> list[int]:
        """Bytes that each worker reads of it."""
        size = self.resolved.catalog.entries[name].stored.itemsize
        return [
            0 if part is None else size * sum(math.prod(box.shape) for box in part.boxes)
            for part in self.of(name)
        ]

    def to_draw(self) -> str | None:
        """The parameter whose cut says most: fused before padded before plain, then by size."""
        found = None
        best = (False, False, False, 0)
        for name, layout in self.resolved.layouts.items():
            entry = self.resolved.catalog.entries[name]
            worth = bool(layout.heads), bool(layout.segments), bool(layout.pad_to), entry.numel
            if layout.cuts and entry.numel and worth > best:
                found, best = name, worth
        return found
