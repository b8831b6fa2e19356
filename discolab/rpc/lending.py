"""Lending: large tensors are sent while the caller goes on computing.

A tensor that is sent later is copied later. If the caller has changed it in place by then, which
its version tells, nothing is sent and the call fails with a clear error. That is a help and no
guarantee: torch counts a change when it is over, so a copy made during one may go unnoticed. The
router's sender thread calls `check` and `failed` (router.py).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..runtime.errors import ArgumentError
from .containers import tensors_in
from .refs.table import ReferenceTable

LARGE = 1 << 20  # bytes of a tensor for which it is worth it


class Lender(Protocol):
    """A call whose tensors are sent later."""

    def describe(self) -> str:
        """What is called."""

    def fail(self, error: BaseException) -> None:
        """It was not sent."""


class Lent:
    """The tensors of a call, as they were when it was made."""

    def __init__(
        self, call: Lender, references: ReferenceTable, tensors: list[torch.Tensor]
    ) -> None:
        self._call, self._references = call, references
        self._tensors = [(tensor, tensor._version) for tensor in tensors]
        self.forks: list[Any] = []  # of the references in the message

    def check(self) -> str:
        """After the copy: "" or why it is not what was to be sent."""
        for tensor, version in self._tensors:
            if tensor._version != version:
                shape = tuple(tensor.shape)
                return (
                    f"a tensor of shape {shape} was changed in place while the "
                    f"{self._call.describe()} was sending it: wait for the call first, or give it "
                    "tensor.clone()"
                )
        return ""

    def failed(self, text: str) -> None:
        """It was not sent."""
        self._references.undo(self.forks)
        self._call.fail(ArgumentError(text))


def lend(call: Lender, references: ReferenceTable, value: Any) -> Lent | None:
    """How to send the value of a call later; None if that is not worth it or can't be watched."""
    tensors = tensors_in(value)
    if not any(t.numel() * t.element_size() >= LARGE and t.is_cpu for t in tensors):
        return None
    if any(t.is_inference() for t in tensors):  # these have no version
        return None
    return Lent(call, references, tensors)
