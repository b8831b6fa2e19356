"""What torch hands to a process group, checked and in discolab's terms. No state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.errors import ArgumentError
from .. import checks
from ..reductions import check_reduction

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]

_REDUCTIONS = {
    "SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max",
    "BAND": "band", "BOR": "bor", "BXOR": "bxor", "PREMUL_SUM": "sum",
}  # fmt: skip


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_plain(name: str, tensors: Tensors, *, writable: bool = True) -> list[Tensor]:
    """The tensors without their history, if they can be moved and, as outputs, written to."""
    found = [checks.as_source(name, tensor) for tensor in tensors]
    if writable:
        for tensor in tensors:
            checks.check_output(name, tensor)
    return found


def reduction_of(name: str, opts: Any, tensors: Tensors) -> tuple[str, Any]:
    """discolab's word for the reduction in `opts`, and what to multiply with before."""
    op: Any = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    kind = getattr(op, "op", op)
    word = _REDUCTIONS.get(getattr(kind, "name", ""))
    if word is None:
        raise ArgumentError(f"{name}: torch's {kind} is not known here")
    for tensor in tensors:
        check_reduction(name, word, tensor.dtype)
    factor = op.__getstate__()[1] if kind.name == "PREMUL_SUM" else None
    return word, factor


def root_of(opts: Any) -> int:
    """The root's rank within the group, given in options or by itself."""
    return int(getattr(opts, "rootRank", opts))


def scaled(tensors: list[Tensor], factor: Any) -> list[Tensor]:
    return tensors if factor is None else [tensor * factor for tensor in tensors]


def pieces_of(name: str, whole: Tensor, like: Tensor, n: int) -> list[Tensor]:
    """`whole` as n tensors in the shape of `like`, be it n of them in a row or stacked."""
    if whole.numel() != n * like.numel():
        raise ArgumentError(
            f"{name}: {whole.numel()} elements for {n} workers with {like.numel()} each"
        )
    if whole.is_contiguous():
        return list(whole.detach().view(n, *like.shape).unbind(0))
    if whole.dim() == like.dim() + 1:
        return list(whole.detach().unbind(0))
    if whole.dim() == like.dim() and like.dim() and whole.shape[1:] == like.shape[1:]:
        return list(whole.detach().unflatten(0, (n, -1)).unbind(0))
    raise ArgumentError(f"{name}: the tensor that is cut must be contiguous; use .contiguous()")


def check_pieces(name: str, pieces: Tensors, likes: Tensors, n: int) -> None:
    """n pieces for each of `likes`, of its dtype and size."""
    if len(pieces) != n * len(likes):
        raise ArgumentError(f"{name}: {len(pieces)} tensors for {len(likes)} in a group of {n}")
    for k, like in enumerate(likes):
        for piece in pieces[k * n : (k + 1) * n]:
            if piece.shape != like.shape or piece.dtype != like.dtype:
                raise ArgumentError(
                    f"{name}: {piece.dtype}{list(piece.shape)} stands opposite "
                    f"{like.dtype}{list(like.shape)}; shape and dtype must be the same"
                )


def cut(name: str, what: str, tensor: Tensor, splits: Any, n: int) -> list[Tensor]:
    """Parts along the first dimension, equal ones without `splits`."""
    size = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if size % n:
            raise ArgumentError(
                f"{name}: the first dimension of the {what}, {size}, can't be cut in {n} equal "
                f"parts; give {what}_split_sizes"
            )
        splits = [size // n] * n
    if len(splits) != n or sum(splits) != size:
        raise ArgumentError(
            f"{name}: {what}_split_sizes {list(splits)} must be {n} numbers that add up to {size}"
        )
    return list(checks.as_source(name, tensor).split(list(splits)))
