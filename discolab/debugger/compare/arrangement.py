"""Whether a value that differs has the right elements in the wrong places. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...views.formats import format_workers
from .evidence import Evidence


def swapped(e: Evidence) -> Iterator[str]:
    """Another worker's part."""
    if e.replicated:
        return
    theirs: dict[int, int] = {}
    for rank in e.odd:
        others = [
            other for other in e.ranks
            if other != rank and e.close(e.local[rank], e.expected[other])
            and not e.close(e.expected[rank], e.expected[other])
        ]  # fmt: skip
        if others:
            theirs[rank] = others[0]
    if not theirs:
        return
    groups: dict[int, list[int]] = {}
    for rank, other in theirs.items():
        groups.setdefault(other, []).append(rank)
    told = [
        f"{format_workers(ranks)} hold{'s' * (len(ranks) == 1)} worker {other}'s part"
        for other, ranks in groups.items()
    ]
    if len(told) > 4:
        told = [*told[:4], f"and so on for {len(theirs)} workers"]
    words = "; ".join(told)
    if len(theirs) == e.count > 2 and len(set(theirs.values())) == e.count:
        words += ": the parts are in another order"
    yield words


def order(e: Evidence) -> Iterator[str]:
    """A whole value whose pieces along a dim are in another order, as after an all-gather."""
    if not (e.replicated and e.whole and e.reference is not None and e.count > 1):
        return
    rank = e.odd[0]
    shape, n = e.shapes[rank], e.count
    if tuple(e.reference.shape) != shape:
        return
    local, whole = e.local[rank].reshape(shape), e.reference
    for dim, size in enumerate(shape):
        if size % n:
            continue
        pieces, theirs = whole.chunk(n, dim), local.chunk(n, dim)
        order = [
            next((j for j, piece in enumerate(pieces) if e.close(one, piece)), -1) for one in theirs
        ]
        if sorted(order) == list(range(n)) and order != list(range(n)):
            told = ", ".join(map(str, order))
            yield f"its parts along dim {dim} are in the order {told}: gathered in a wrong order"
            return


def cut_otherwise(e: Evidence) -> Iterator[str]:
    """A shard of the right shape that was cut in another way."""
    if e.replicated or e.reference is None or not e.whole:
        return
    words = ""
    for rank in e.odd:
        told = _cut_words(e, rank, e.reference)
        if not told:
            return
        words = words or told
    if words:
        who = "" if len(e.odd) == e.count else f"{format_workers(e.odd)}: "
        yield f"{who}{words}"


def _cut_words(e: Evidence, rank: int, whole: torch.Tensor) -> str:
    shape, n, place = e.shapes[rank], e.count, e.ranks.index(rank)
    local = e.local[rank].reshape(shape)
    if whole.dim() == 2:
        for dim in (0, 1):
            if whole.shape[1 - dim] % n == 0:
                part = whole.t().chunk(n, dim)[place]
                if part.shape == local.shape and e.close(local, part):
                    return f"the shard was cut along dim {1 - dim} and is transposed"
    for dim in range(whole.dim()):
        size = whole.shape[dim]
        if size % n:
            continue
        part = whole.chunk(n, dim)[place]
        if part.shape == local.shape and e.close(local, part):
            return f"it is the shard along dim {dim}"
        block = size // n // 2
        for width in sorted({1, *(b for b in _divisors(size // n) if b <= block)}, reverse=True):
            part = _interleaved(whole, dim, n, place, width)
            if part.shape == local.shape and e.close(local, part):
                step = f"every {n}th element" if width == 1 else f"every {n}th block of {width}"
                return f"it holds {step} along dim {dim}, not one piece: heads are interleaved"
        for count in (2, 3):
            if size % (count * n):
                continue
            pieces = [piece.chunk(n, dim)[place] for piece in whole.chunk(count, dim)]
            if e.close(local, torch.cat(pieces, dim)):
                return f"it is cut as {count} fused parts along dim {dim}, not as one"
    return ""


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _interleaved(whole: torch.Tensor, dim: int, n: int, place: int, width: int) -> torch.Tensor:
    size = whole.shape[dim]
    index = torch.arange(size).reshape(size // width, width)[place::n].reshape(-1)
    return whole.index_select(dim, index)


def shifted(e: Evidence) -> Iterator[str]:
    """Rows that are off by one."""
    if not e.whole or e.reference is None:
        return
    rank = e.odd[0]
    shape = e.shapes[rank]
    local, expected = e.local[rank].reshape(shape), e.expected[rank].reshape(shape)
    for dim, size in enumerate(shape):
        if size < 3:
            continue
        for step, words in ((1, "later"), (-1, "earlier")):
            a = local.narrow(dim, max(-step, 0), size - 1)
            b = expected.narrow(dim, max(step, 0), size - 1)
            if e.close(a, b):
                yield f"its elements along dim {dim} are those of one place {words}: off by one"
                return
