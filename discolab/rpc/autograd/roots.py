"""What a backward may start from. No state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...runtime.errors import ArgumentError

Tensor = torch.Tensor


def check_roots(roots: Any) -> list[Tensor]:
    """The roots of a backward, or why they can't be.

    Raises
    ------
    ArgumentError
    """
    if isinstance(roots, Tensor):
        roots = [roots]
    if not isinstance(roots, Sequence) or isinstance(roots, str) or not roots:
        raise ArgumentError(f"backward: roots is a list of tensors, [loss], got {roots!r:.80}")
    for i, root in enumerate(roots):
        what = f"backward: root {i}"
        if not isinstance(root, Tensor):
            raise ArgumentError(f"{what} is no tensor but a {type(root).__name__}")
        if not root.requires_grad:
            raise ArgumentError(
                f"{what} does not require grad: it depends on no parameter, or came here outside "
                "of the context, which cuts tensors from their graph"
            )
        if root.numel() != 1:
            raise ArgumentError(
                f"{what} has shape {list(root.shape)}: a backward starts from scalars, "
                "give loss.sum() or loss.mean()"
            )
        if root.is_complex():
            raise ArgumentError(f"{what} is complex: a backward starts from real scalars")
    return list(roots)
