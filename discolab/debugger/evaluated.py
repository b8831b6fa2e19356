"""What an expression is on each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..runtime.drawn import Pictured
from ..views.parts import Part


@dataclass(frozen=True, repr=False)
class Evaluated(Pictured):
    """The value of an expression on some workers; shows itself.

    Attributes
    ----------
    expression
    values
        Rank -> ``("value", record)``, as `views.describe` makes records, or ``("error", text)``.
    """

    expression: str
    values: Mapping[int, tuple[str, Any]]

    @property
    def errors(self) -> dict[int, str]:
        """The workers on which it failed, and how."""
        return {rank: value for rank, (kind, value) in self.values.items() if kind == "error"}

    @property
    def part(self) -> Part:
        """How it is drawn."""
        from .picture import evaluated_parts

        return evaluated_parts(self.expression, self.values)
