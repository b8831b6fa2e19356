"""What is looked at to find the cause of a difference. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Tensors: TypeAlias = dict[int, torch.Tensor]
"""By rank."""


@dataclass(frozen=True)
class Evidence:
    """Samples of one value that differs.

    Attributes
    ----------
    local, expected
        By rank, flat and float64: what the worker holds, what it should hold.
    shapes
        Of the worker's whole tensors.
    whole
        Whether the samples are all elements.
    odd
        The ranks that differ.
    rtol, atol
        The tolerance.
    dim
        Along which the value is cut; None if it is not.
    replicated
        Whether all should hold the same.
    terms
        Values of the reference that may have been added or left out: what they are called, and for
        each rank their samples at the same places.
    reference
        The whole value if it is small, else None.
    """

    local: Tensors
    expected: Tensors
    shapes: dict[int, tuple[int, ...]]
    whole: bool
    odd: tuple[int, ...]
    rtol: float
    atol: float
    dim: int | None
    replicated: bool
    terms: Sequence[tuple[str, Tensors]] = ()
    reference: torch.Tensor | None = None
    gradient: bool = False
    parameter: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.local)

    @property
    def count(self) -> int:
        return len(self.local)

    def close(self, a: torch.Tensor, b: torch.Tensor, slack: float = 2.0) -> bool:
        """Whether two are the same, nearly."""
        if a.shape != b.shape:
            return False
        near = (a - b).abs() <= slack * (self.atol + self.rtol * b.abs()) + 1e-12
        return bool((near | (a == b)).all())
