"""`torch.distributed.autograd`: contexts are known by their ids, which are integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import autograd
from ..autograd.contexts import Scope

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Whether there is distributed autograd: always."""
    return True


class context:  # noqa: N801 - PyTorch's name
    """``with context() as context_id``: calls within it are recorded for a backward."""

    _scope: Scope

    def __enter__(self) -> int:
        self._scope = autograd.context()
        return self._scope.__enter__().id

    def __exit__(self, *exc: Any) -> None:
        self._scope.__exit__(*exc)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of scalars with respect to all leaves, on whatever rank they are."""
    autograd.backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this rank's leaves: leaf -> gradient."""
    return autograd.get_gradients(context_id)
