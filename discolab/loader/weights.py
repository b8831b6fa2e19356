"""What a load gives: parameters by name, and how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.display import Pictured
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError

if TYPE_CHECKING:
    from ..views import Part
    from .plan import Resolved


class Weights(Pictured, dict[str, DRef]):
    """Parameters by name: each a `DRef`, with its placements where torch has words for them.

    On a worker whose pipeline stage does not hold a parameter, the value is None.

    Attributes
    ----------
    resolved
        The layout of each, and what was read.
    dtype
        What floating-point parameters were cast to; None: nothing.
    """

    def __init__(
        self, refs: Mapping[str, DRef], resolved: Resolved, dtype: torch.dtype | None
    ) -> None:
        super().__init__(refs)
        self.resolved = resolved
        self.dtype = dtype

    def __missing__(self, name: str) -> DRef:
        import difflib

        near = difflib.get_close_matches(str(name), self, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ArgumentError(f"no parameter {name!r} was loaded{hint}")

    @property
    def part(self) -> Part:
        """The picture: what was loaded, and how it is cut."""
        from .tables import plan_parts

        return plan_parts(self.resolved, self.dtype)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))
