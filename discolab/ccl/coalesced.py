"""Several tensors in one collective: instead of one for each. No state.

Arguments and errors are those of `discolab.ccl.ops`; the tensors of one call may differ in shape
and dtype, but the members must give the same list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import checks
from .choose import backend_of
from .groups import resolve
from .moves import rows
from .reductions import check_reduction

Tensors = Sequence[torch.Tensor]


def all_reduce_coalesced(
    tensors: Tensors,
    op: str = "sum",
    *,
    group: Any = None,
    outs: Tensors | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`all_reduce` of each tensor; the list of results. In place with ``outs=tensors``."""
    name = "all_reduce_coalesced"
    worker = checks.calling_worker(name)
    srcs = checks.as_sources(name, tensors)
    reduction = _check_reduction(name, op, srcs)
    members = resolve(worker, group, name)
    shapes = [tuple(src.shape) for src in srcs]
    results, dsts = checks.as_outputs(name, outs, shapes, srcs)
    call = checks.make_call(
        name, worker, members, srcs, reduction=reduction, timeout=timeout, async_op=async_op
    )
    return backend_of(worker).all_reduce(call, srcs, dsts, reduction).give(results, async_op)


def all_gather_coalesced(
    tensors: Tensors,
    *,
    group: Any = None,
    outs: Tensors | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather` of each tensor; the list of results."""
    name = "all_gather_coalesced"
    worker = checks.calling_worker(name)
    srcs = checks.as_sources(name, tensors)
    members = resolve(worker, group, name)
    n = len(members)
    shapes = [(n * s.shape[0], *s.shape[1:]) if s.dim() else (n,) for s in srcs]
    results, dsts = checks.as_outputs(name, outs, shapes, srcs)
    pieces = [
        piece
        for src, dst in zip(srcs, dsts, strict=True)
        for piece in (rows(dst, n) if src.dim() else dst.unbind(0))
    ]
    call = checks.make_call(name, worker, members, srcs, timeout=timeout, async_op=async_op)
    return backend_of(worker).all_gather(call, srcs, pieces).give(results, async_op)


def reduce_scatter_coalesced(
    tensors: Tensors,
    op: str = "sum",
    *,
    group: Any = None,
    outs: Tensors | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """`reduce_scatter` of each tensor; the list of results."""
    name = "reduce_scatter_coalesced"
    worker = checks.calling_worker(name)
    srcs = checks.as_sources(name, tensors)
    reduction = _check_reduction(name, op, srcs)
    members = resolve(worker, group, name)
    shapes = [checks.check_divides(name, src, members) for src in srcs]
    results, dsts = checks.as_outputs(name, outs, shapes, srcs)
    parts = [part for src in srcs for part in rows(src, len(members))]
    call = checks.make_call(
        name, worker, members, srcs, reduction=reduction, timeout=timeout, async_op=async_op
    )
    return backend_of(worker).reduce_scatter(call, parts, dsts, reduction).give(results, async_op)


def _check_reduction(name: str, op: str, srcs: Tensors) -> str:
    words = {check_reduction(name, op, src.dtype) for src in srcs}
    return words.pop()
