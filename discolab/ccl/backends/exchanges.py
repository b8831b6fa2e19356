"""Programs of steps (steps.py) for members in processes of their own, and how they are carried out.

Tensors are given and taken where they lie: nothing is packed but several for one member, strided
ones, and what would be overwritten while it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import memory
from ..pattern import LIKE_BY_LIKE, Job, Pattern
from ..rendezvous.conductor import Gone, ProcessGroup
from .jobs import perform
from .process_groups import await_all, start
from .steps import (
    AllReduce,
    Await,
    Broadcast,
    DirectStep,
    DirectSteps,
    Exchange,
    Finish,
    Step,
    Tensor,
    Tensors,
    run,
)

Room = Callable[[int], Tensor]


def new_room(size: int) -> Tensor:
    """So many bytes."""
    return torch.empty(size, dtype=torch.uint8)


def flat(tensors: Tensors) -> Tensor:
    """Tensors of one dtype as a contiguous one of one dimension; a single one as it lies."""
    return memory.joined(tensors).view(tensors[0].dtype)


def typed(data: Tensor, like: Tensor) -> Tensor:
    """Bytes as elements of another tensor's dtype."""
    return data if data.dtype is like.dtype else data.view(like.dtype)


def room_for(targets: Tensors) -> tuple[Tensor, bool]:
    """Contiguous bytes to be written for some outputs, and whether they must be copied there."""
    if len(targets) == 1 and targets[0].numel() and memory.is_plain(targets[0]):
        return memory.as_bytes(targets[0]), False
    size = sum(target.nbytes for target in targets)
    return torch.empty(size, dtype=torch.uint8), True


def rows_of(more: Room, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for tensors in rows."""
    size = like.itemsize
    for length in shape:
        size *= length
    return more(size)[:size].view(like.dtype).view(shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors are the same memory."""
    return a.data_ptr() == b.data_ptr()


PART = 4 << 20  # bytes of a block that one member reduces
SCRATCH = 32 << 20  # bytes that the parts of all members may take, of two blocks
SMALL = 2 << 20  # bytes of all members up to which everybody gets everything and reduces it all

_ORDER_FREE = (torch.float32, torch.float64, torch.int32, torch.int64)


def reduction(pattern: Pattern, me: int, srcs: Tensors, outs: Tensors, more: Room) -> DirectSteps:
    """Reduce what has one dtype at a time; several such tensors as one."""
    n, rows = pattern.members, pattern.kind != LIKE_BY_LIKE
    likes = [srcs[k * n] for k in range(pattern.count)] if rows else srcs
    by_dtype: dict[torch.dtype, list[int]] = {}
    for k, like in enumerate(likes):
        by_dtype.setdefault(like.dtype, []).append(k)
    late: list[tuple[Tensor, Tensors]] = []
    for places in by_dtype.values():
        targets = [outs[k] for k in places] if outs else []
        room, scattered = room_for(targets) if targets else (None, False)
        if rows:
            assert room is not None
            parts = [flat([srcs[k * n + i] for k in places]) for i in range(n)]
            part = typed(room, parts[0])
            parts = memory.unharmed(parts, [part], [(me, 0)])
            yield from _parts(pattern, me, parts, part, more)
        else:
            src = flat([srcs[k] for k in places])
            out = None if room is None else typed(room, src)
            if out is not None and not same(src, out):
                (src,) = memory.unharmed([src], [out], [])
            yield from _whole(pattern, me, src, out, more)
        if scattered:
            assert room is not None
            late.append((room, targets))
    return _writing(late)


def _writing(late: Sequence[tuple[Tensor, Tensors]]) -> Finish:
    def finish() -> None:
        for room, targets in late:
            memory.unpack(room, targets)

    return finish


def _parts(
    pattern: Pattern, me: int, parts: Sequence[Tensor], out: Tensor, more: Room
) -> Iterator[DirectStep]:
    """Every member gives its part for each."""
    n = pattern.members
    length = max(1, min(PART, SCRATCH // (2 * n)) // out.itemsize)
    rooms = rows_of(more, (2, n, min(length, len(out))), out)

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
) -> Iterator[DirectStep]:
    """Every member's whole tensor into one; `out` is None on a member that does not get it."""
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
    rooms = rows_of(more, (2, n + results, length // n), src)

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
) -> Iterator[DirectStep]:
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


def _at_once(pattern: Pattern, me: int, src: Tensor, out: Tensor | None) -> Iterator[DirectStep]:
    """Every member gives all that it has to all that want it."""
    rows = [torch.empty_like(src) for _ in range(pattern.members)] if out is not None else []
    exchange = _exchange(me, dict.fromkeys(pattern.takers, src), dict(enumerate(rows)))
    yield exchange
    yield Await(exchange)
    if out is not None:
        rows[me] = src
        _combine(out, rows, pattern.reduction)


def _added_up(src: Tensor, out: Tensor, name: str) -> Iterator[DirectStep]:
    """For two members: the library's own sum is ours, bit by bit."""
    if not same(out, src):
        out.copy_(src)
    yield AllReduce(out, "sum" if name == "avg" else name)
    if name == "avg":
        out.div_(2)


def _any_order(like: Tensor, name: str | None) -> bool:
    names = ("sum", "avg", "prod") if like.dtype.is_floating_point else ("sum", "prod")
    return like.dtype in _ORDER_FREE and name in names


def _exchange(me: int, gives: dict[int, Tensor], takes: dict[int, Tensor]) -> Exchange:
    """With all but oneself."""
    return Exchange(
        [(to, memory.as_bytes(tensor)) for to, tensor in gives.items() if to != me],
        [(of, memory.as_bytes(room)) for of, room in takes.items() if of != me],
        later=True,
    )


def _combine(out: Tensor, sources: list[Tensor], name: str | None) -> None:
    chunks = perform([Job([out], sources)], name)
    if chunks is not None:
        chunks.work()


SPREAD = 256 << 10  # bytes from which a broadcast goes from member to member


def program(
    pattern: Pattern, me: int, srcs: Tensors, outs: Tensors, room: Room = new_room
) -> DirectSteps:
    """The steps of one member; `room` gives memory that nobody needs once they are done."""
    if pattern.reduction is not None:
        return reduction(pattern, me, srcs, outs, room)
    spread = pattern.kind == LIKE_BY_LIKE and pattern.members > 2
    if spread and sum(out.nbytes for out in outs) > SPREAD:  # these all members have
        return _spread(pattern, me, srcs, outs)
    return _copy(pattern, me, srcs, outs)


def _copy(pattern: Pattern, me: int, srcs: Tensors, outs: Tensors) -> DirectSteps:
    """Everything from where it is to where it belongs."""
    own = []
    if pattern.giver in (None, me) and pattern.taker in (None, me):
        own = list(zip(pattern.gives[me], pattern.takes[me], strict=True))
    srcs = memory.unharmed(srcs, outs, own)
    gives, takes, late = [], [], []
    if pattern.giver in (None, me):
        same: Tensor | None = None
        for to in pattern.takers:
            if to != me:
                if same is None or not pattern.same_for_all:
                    same = memory.joined([srcs[k] for k in pattern.gives[to]])
                gives.append((to, same))
    if pattern.taker in (None, me):
        for of in pattern.givers:
            targets = [outs[k] for k in pattern.takes[of]]
            if of == me:
                memory.move_all([(outs[to], srcs[k]) for k, to in own])
            else:
                room, scattered = room_for(targets)
                takes.append((of, room))
                if scattered:
                    late.append((room, targets))
    yield Exchange(gives, takes)
    return _writing(late)


def _spread(pattern: Pattern, me: int, srcs: Tensors, outs: Tensors) -> DirectSteps:
    """A broadcast of something large."""
    assert pattern.giver is not None
    if me == pattern.giver:
        memory.move_all(list(zip(outs, srcs, strict=True)))
        yield Broadcast(memory.joined(outs), me)
        return _nothing
    room, scattered = room_for(outs)
    yield Broadcast(room, pattern.giver)
    return (lambda: memory.unpack(room, outs)) if scattered else _nothing


def _nothing() -> None:
    """All is where it belongs."""


# -- on the conductor's thread ---------------------------------------------------------------------

_own = threading.local()


def carry_out(end: ProcessGroup, steps: DirectSteps, void: Callable[[], bool]) -> Finish:
    """Do the steps of a program; what it returns.

    Raises
    ------
    Gone
        Between two steps, if `void()`.
    """
    under_way: dict[Exchange, list[Any]] = {}

    def do_or_begin(step: DirectStep) -> None:
        if void():
            raise Gone
        if isinstance(step, Await):
            await_all(under_way.pop(step.exchange))
        elif isinstance(step, Exchange) and step.later:
            under_way[step] = start(end, step)
        else:
            do(end, step)

    return run(steps, do_or_begin)


def do(end: ProcessGroup, step: Step | Exchange) -> None:
    """Do one step."""
    await_all(start(end, step))


def scratch(size: int) -> Tensor:
    """At least so many bytes, the same memory each time: for one program at a time on a thread."""
    held: Tensor | None = getattr(_own, "room", None)
    if held is None or len(held) < size:
        held = torch.empty(size, dtype=torch.uint8)
        _own.room = held if size <= SCRATCH else None
    return held
