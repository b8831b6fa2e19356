"""A plan for one checkpoint and so many workers: what each of them holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...layouts.layout import Cut, Layout, Workers, cached_cut
from ...runtime.errors import ArgumentError
from ..catalog import Catalog
from .patterns import matcher, unknown_names


@dataclass(frozen=True)
class Resolved:
    """A plan for one checkpoint and for so many workers.

    Attributes
    ----------
    layouts
        Of each parameter, by name, in the checkpoint's order.
    unmatched
        Names that no rule matched; empty where the plan has no rules.
    unused
        Patterns of rules that decided nothing: they matched no name, or earlier ones did.
    """

    catalog: Catalog
    workers: Workers
    layouts: Mapping[str, Layout]
    unmatched: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Resolved:
        return self  # nothing in it changes, so the workers of one process can share it

    def cut(self, name: str, rank: int) -> Cut | None:
        """What a worker holds of a parameter; None if its stage does not hold it.

        Raises
        ------
        ArgumentError
            If the checkpoint has no such parameter.
        """
        if name not in self.layouts:
            raise unknown_names([name], self.layouts)
        return cached_cut(self.layouts[name], self.catalog.entries[name].shape, self.workers, rank)

    def bytes_on(self, rank: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of all tensors of a worker.

        Parameters
        ----------
        dtype
            What all floating ones are cast to; None: they stay as they are.
        """
        total = 0
        for name, entry in self.catalog.entries.items():
            held = self.cut(name, rank)
            if held is not None:
                total += held.numel * entry.loaded_as(dtype).itemsize
        return total

    def subset(self, names: str | Iterable[str]) -> Resolved:
        """The same for some of the parameters, in the checkpoint's order.

        Parameters
        ----------
        names
            Names or patterns, as in rules.

        Raises
        ------
        ArgumentError
            If one matches nothing.
        """
        wanted = [names] if isinstance(names, str) else names
        if not isinstance(wanted, Iterable):
            raise ArgumentError(f"names of parameters are strings, got {names!r:.60}")
        chosen: set[str] = set()
        missing = []
        for one in wanted:
            found = {one} if one in self.layouts else set(filter(matcher(one), self.layouts))
            chosen |= found
            if not found:
                missing.append(one)
        if missing:
            raise unknown_names(missing, self.layouts)
        entries = {name: e for name, e in self.catalog.entries.items() if name in chosen}
        return replace(
            self,
            catalog=replace(self.catalog, entries=entries),
            layouts={name: self.layouts[name] for name in entries},
            unmatched=tuple(name for name in self.unmatched if name in chosen),
        )
