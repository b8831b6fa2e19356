"""Finds in which order rows are dealt to workers, where each does not hold rows in a row. Pure.

A batch in strides (``x[rank::n]``), a sequence in zigzag for causal attention, heads or experts
dealt in turn: each row is on some worker, once. Which orders there may be is tried by a mark of
each row, a number; the values themselves then decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..layouts.layout import ShardLayout

MOST_ROWS = 2**16
_NEAR = 1e-2  # of a typical mark: rows that differ by less may be the same
_SAME = 1e-6  # of a typical mark: rows that differ by less are the same

Order = tuple[str, tuple[int, ...]]


def cut_dim(layout: ShardLayout) -> int | None:
    """The one dimension that is split along one axis, in equal parts; else None."""
    plain = layout.layout
    cuts = [dim for dim in layout.dims if dim is not None]
    whole = not (plain.segments or plain.heads or plain.pad_to or layout.is_partial or layout.order)
    return cuts[0] if whole and len(cuts) == 1 else None


def parts_of(layout: ShardLayout, dim: int) -> int:
    """Into how many parts a dimension is split."""
    sizes = zip(layout.dims, layout.workers.sizes, strict=True)
    return math.prod(size for cut, size in sizes if cut == dim)


def usual_orders(rows: int, parts: int) -> Iterator[Order]:
    """The orders in which programs deal rows to workers."""
    if rows % parts or rows > MOST_ROWS:
        return
    mine, whole = rows // parts, torch.arange(rows)
    for block in (b for b in range(1, mine) if mine % b == 0):
        dealt = whole.reshape(mine // block, parts, block).transpose(0, 1)
        words = "dealt in turn" if block == 1 else f"blocks of {block} dealt in turn"
        yield words, tuple(dealt.flatten().tolist())
    if mine % 2 == 0:
        chunks = whole.reshape(2 * parts, mine // 2)
        pairs = [chunks[i] for r in range(parts) for i in (r, 2 * parts - 1 - r)]
        yield "in zigzag", tuple(torch.cat(pairs).tolist())


def ordered(layout: ShardLayout, dim: int, order: Order) -> ShardLayout:
    """A layout of which the rows along a dimension are dealt in an order."""
    return replace(layout, order=(dim, *order))


def marks_of(value: torch.Tensor, dim: int) -> torch.Tensor:
    """A number for each row along a dimension, as float64 on the CPU."""
    rows = value.detach().movedim(dim, 0).reshape(value.shape[dim], -1)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(rows.shape[1], generator=generator).to(rows.device)
    kind = rows.to(torch.float32)
    return (kind @ weights).to("cpu", torch.float64)


def fitting_orders(
    whole: torch.Tensor, held: torch.Tensor, parts: int, others: bool
) -> Iterator[Order]:
    """The orders that the marks of rows allow, the usual ones first.

    Parameters
    ----------
    whole, held
        The marks of the reference's rows; of the workers' rows, one worker after the other.
    others
        Whether an order that is none of the usual ones counts.
    """
    typical = float(whole.square().mean().sqrt())
    for words, rows in usual_orders(len(whole), parts):
        if bool(((whole[list(rows)] - held).abs() <= _NEAR * typical).all()):
            yield words, rows
    if not others or len(whole.unique()) < len(whole) or len(whole) > MOST_ROWS:
        return
    (by_whole, first), (by_held, second) = whole.sort(), held.sort()
    if bool(((by_whole - by_held).abs() <= _SAME * typical).all()):
        order = torch.empty_like(first)
        order[second] = first
        if not bool((order == torch.arange(len(order))).all()):
            yield "in another order", tuple(order.tolist())
