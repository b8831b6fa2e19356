"""Reductions over a lane, as programs (see programs.py). No state.

Something large goes block by block: each member gets its part of the block from all others, reduces
these in the order of the ranks, as `local` does it, and gives the result to all. So it is the same
on every member and every engine, and no more goes over a lane than in a ring. The next block is on
its way while one is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..backends import wire
from ..backends.jobs import perform
from ..pattern import LIKE_BY_LIKE, Job, Pattern
from . import layout
from .lane_steps import AddUp, Await, Exchange, Finish, Room, Step, Steps, Tensor, Tensors

PART = 4 << 20  # bytes of a block that one member reduces
SCRATCH = 32 << 20  # bytes that the parts of all members may take, of two blocks
SMALL = 2 << 20  # bytes of all members up to which everybody gets everything and reduces it all

_ORDER_FREE = (torch.float32, torch.float64, torch.int32, torch.int64)


def reduction(pattern: Pattern, me: int, srcs: Tensors, outs: Tensors, more: Room) -> Steps:
    """Reduce what has one dtype at a time; several such tensors as one."""
    n, rows = pattern.members, pattern.kind != LIKE_BY_LIKE
    likes = [srcs[k * n] for k in range(pattern.count)] if rows else srcs
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, like in enumerate(likes):
        by_dtype.setdefault(like.dtype, []).append(k)
    late: list[tuple[Tensor, Tensors]] = []
    for places in by_dtype.values():
        targets = [outs[k] for k in places] if outs else []
        room, scattered = layout.room_for(targets) if targets else (None, False)
        if rows:
            assert room is not None
            parts = [layout.flat([srcs[k * n + i] for k in places]) for i in range(n)]
            parts = layout.unharmed(parts, [room], [(me, 0)])
            yield from _parts(pattern, me, parts, layout.typed(room, parts[0]), more)
        else:
            src = layout.flat([srcs[k] for k in places])
            out = None if room is None else layout.typed(room, src)
            if out is not None and not layout.same(src, out):
                (src,) = layout.unharmed([src], [out], [])
            yield from _whole(pattern, me, src, out, more)
        if scattered:
            assert room is not None
            late.append((room, targets))
    return _writing(late)


def _writing(late: Sequence[tuple[Tensor, Tensors]]) -> Finish:
    def finish() -> None:
        for room, targets in late:
            wire.unpack_bytes(room, targets)

    return finish


def _parts(
    pattern: Pattern, me: int, parts: Sequence[Tensor], out: Tensor, more: Room
) -> Iterator[Step]:
    """Every member gives its part for each."""
    n = pattern.members
    length = max(1, min(PART, SCRATCH // (2 * n)) // out.itemsize)
    rooms = layout.rows_of(more, (2, n, min(length, len(out))), out)

    def rows(block: int) -> list[Tensor]:
        size = len(out[block * length : (block + 1) * length])
        found = [rooms[block % 2, i, :size] for i in range(n)]
        found[me] = parts[me][block * length : (block + 1) * length]
        return found

    def begin(block: int) -> Exchange:
        pieces = [part[block * length : (block + 1) * length] for part in parts]
        return _exchange(me, dict(enumerate(pieces)), dict(enumerate(rows(block))))

    def reduce(block: int) -> None:
        piece = out[block * length : (block + 1) * length]
        _combine(piece, rows(block), pattern.reduction)

    yield from _pipelined(-(-len(out) // length), begin, reduce)


def _whole(
    pattern: Pattern, me: int, src: Tensor, out: Tensor | None, more: Room
) -> Iterator[Step]:
    """Everybody's whole tensor into one; `out` is None on who does not get it."""
    n = pattern.members
    if src.nbytes * n <= SMALL:
        yield from _at_once(pattern, me, src, out)
        return
    if n == 2 and out is not None and pattern.taker is None and _any_order(src, pattern.reduction):
        yield from _added_up(src, out, str(pattern.reduction))
        return
    part = max(1, min(PART, SCRATCH // (2 * n)) // src.itemsize)
    length = min(part, -(-len(src) // n)) * n  # of a block, but for the last one
    results = int(out is None)  # which then have rows of their own
    rooms = layout.rows_of(more, (2, n + results, length // n), src)

    def cut(tensor: Tensor, block: int) -> list[Tensor]:
        """A block in parts, one for each member."""
        piece = tensor[block * length : (block + 1) * length]
        size = -(-len(piece) // n)
        return [piece[i * size : (i + 1) * size] for i in range(n)]

    def rows(block: int) -> list[Tensor]:
        mine = cut(src, block)[me]
        found = [rooms[block % 2, i, : len(mine)] for i in range(n)]
        found[me] = mine
        return found

    def total(block: int) -> Tensor:
        if out is not None:
            return cut(out, block)[me]
        return rooms[block % 2, n, : len(cut(src, block)[me])]

    def begin(block: int) -> Exchange:
        return _exchange(me, dict(enumerate(cut(src, block))), dict(enumerate(rows(block))))

    def reduce(block: int) -> Exchange:
        _combine(total(block), rows(block), pattern.reduction)
        gives = {i: total(block) for i in pattern.takers}
        takes = {} if out is None else dict(enumerate(cut(out, block)))
        return _exchange(me, gives, takes)

    yield from _pipelined(-(-len(src) // length), begin, reduce)


def _pipelined(
    blocks: int, begin: Callable[[int], Exchange], reduce: Callable[[int], Exchange | None]
) -> Iterator[Step]:
    """The exchange of each block is under way while the one before is reduced.

    `reduce` gives what is to be exchanged then, if anything.
    """
    coming = begin(0) if blocks else None
    going: list[Exchange] = []
    if coming is not None:
        yield coming
    for block in range(blocks):
        here, coming = coming, begin(block + 1) if block + 1 < blocks else None
        if coming is not None:
            yield coming
        assert here is not None
        yield Await(here)
        if len(going) > 1:  # its memory is used again
            yield Await(going.pop(0))
        result = reduce(block)
        if result is not None:
            yield result
            going.append(result)
    for exchange in going:
        yield Await(exchange)


def _at_once(pattern: Pattern, me: int, src: Tensor, out: Tensor | None) -> Iterator[Step]:
    """Everybody gives all that it has to all who want it."""
    rows = [torch.empty_like(src) for _ in range(pattern.members)] if out is not None else []
    exchange = _exchange(me, dict.fromkeys(pattern.takers, src), dict(enumerate(rows)))
    yield exchange
    yield Await(exchange)
    if out is not None:
        rows[me] = src
        _combine(out, rows, pattern.reduction)


def _added_up(src: Tensor, out: Tensor, name: str) -> Iterator[Step]:
    """For two members: the library's own sum is ours, bit by bit."""
    if not layout.same(out, src):
        out.copy_(src)
    yield AddUp(out, "sum" if name == "avg" else name)
    if name == "avg":
        out.div_(2)


def _any_order(like: Tensor, name: str | None) -> bool:
    names = ("sum", "avg", "prod") if like.dtype.is_floating_point else ("sum", "prod")
    return like.dtype in _ORDER_FREE and name in names


def _exchange(me: int, gives: dict[int, Tensor], takes: dict[int, Tensor]) -> Exchange:
    """With all but oneself."""
    return Exchange(
        [(to, layout.as_bytes(tensor)) for to, tensor in gives.items() if to != me],
        [(of, layout.as_bytes(room)) for of, room in takes.items() if of != me],
        later=True,
    )


def _combine(out: Tensor, sources: list[Tensor], name: str | None) -> None:
    tickets = perform([Job([out], sources)], name)
    if tickets is not None:
        tickets.work()
