"""What one member does in a collective that a library carries out, step by step. No state.

A program is a generator: it packs what the member gives, yields each `Step` that the library
must do, and is resumed when that is done. It returns a function that writes the results, so that
whoever drives it may look first whether anybody still wants them. All members of a collective
yield the same kinds of steps in the same order.

The programs here serve libraries that do all members' steps in this process (Gloo, NCCL) and those
that do one member's alone (MPI). exchanges.py has those for members that give each other their
tensors directly. Roots are indices in the group here, not ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from .. import memory
from ..pattern import LIKE_BY_LIKE, TO_ALL, Pattern
from ..reductions import combine
from . import encoding

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Reduce everybody's `data` in place."""

    data: Tensor
    op: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """As `AllReduce`, for `root` alone; the others' `data` may be anything afterwards."""

    data: Tensor
    op: str
    root: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Reduce everybody's `data`, and put the i-th of n equal parts in the i-th `out`."""

    data: Tensor
    out: Tensor
    op: str


@dataclass(frozen=True, slots=True)
class AllGather:
    """Put everybody's `data` one after the other in everybody's `out`."""

    data: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Copy the `data` of `root` to everybody's."""

    data: Tensor
    root: int


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Send ``gives[j]`` bytes of `data` to the j-th member, and get ``takes[j]`` from it."""

    data: Tensor
    out: Tensor
    gives: list[int]
    takes: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Give and take contiguous bytes: pairs of a member's place and a tensor.

    With `later` it is only begun; an `Await` follows.
    """

    gives: list[tuple[int, Tensor]]
    takes: list[tuple[int, Tensor]]
    later: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until an exchange is over that was begun before."""

    exchange: Exchange


Step = AllReduce | Reduce | ReduceScatter | AllGather | Broadcast | AllToAll
DirectStep = Step | Exchange | Await
Finish = Callable[[], None]
Steps = Generator[Step, None, Finish]
DirectSteps = Generator[DirectStep, None, Finish]


class Place(NamedTuple):
    """Who the member is: its index, the number of members, and the library's reductions."""

    me: int
    members: int
    ops: frozenset[str]


S = TypeVar("S")


def run(program: Generator[S, None, Finish], do: Callable[[S], object]) -> Finish:
    """Have `do` carry out the steps of one member's program; what writes the results."""
    while True:
        try:
            step = next(program)
        except StopIteration as end:
            finish: Finish = end.value
            return finish
        do(step)


class _Batch(NamedTuple):
    """Tensors of one call that go together: by their places in its list."""

    places: list[int]
    code: encoding.Code | None
    packed: Tensor


def program(pattern: Pattern, place: Place, srcs: Tensors, outs: Tensors) -> Steps:
    """What one member of a collective does."""
    if pattern.kind == LIKE_BY_LIKE:
        if pattern.reduction is not None:
            return _reduce(pattern.reduction, pattern.taker, place, srcs, outs)
        assert pattern.giver is not None
        return _broadcast(pattern.giver, place, srcs, outs)
    if pattern.reduction is not None:
        return _reduce_scatter(pattern.reduction, place, srcs, outs)
    if pattern.kind == TO_ALL and pattern.taker is None:
        return _all_gather(place, srcs, outs)
    return _exchange(pattern, place, srcs, outs)


def _reduce(name: str, root: int | None, place: Place, srcs: Tensors, outs: Tensors) -> Steps:
    """all_reduce; with `root` reduce."""
    done = []
    for batch in _batches(place, srcs, name, lambda k: [srcs[k]]):
        result = batch.packed
        if batch.code is None:
            result = result.new_empty(place.members * len(result))
            yield AllGather(batch.packed, result)
        elif root is None:
            yield AllReduce(result, batch.code.op)
        else:
            yield Reduce(result, batch.code.op, root)
        done.append((batch, result))
    return _results(done, outs, name, place.members)


def _reduce_scatter(name: str, place: Place, srcs: Tensors, outs: Tensors) -> Steps:
    """k * n sources, n in a row for each of k outputs."""
    n = place.members
    done = []
    for batch in _batches(place, outs, name, lambda k: srcs[k * n : (k + 1) * n]):
        size = len(batch.packed) // n
        if batch.code is None:
            result = torch.empty_like(batch.packed)
            yield AllToAll(batch.packed, result, [size] * n, [size] * n)
        else:
            result = batch.packed.new_empty(size)
            yield ReduceScatter(batch.packed, result, batch.code.op)
        done.append((batch, result))
    return _results(done, outs, name, n)


def _all_gather(place: Place, srcs: Tensors, outs: Tensors) -> Steps:
    """k sources; k * n outputs, n in a row for each source."""
    n = place.members
    packed = memory.packed(srcs, srcs[0].device)
    whole = packed.new_empty(n * len(packed))
    yield AllGather(packed, whole)

    def finish() -> None:
        memory.unpack(whole, [outs[k * n + i] for i in range(n) for k in range(len(srcs))])

    return finish


def _broadcast(root: int, place: Place, srcs: Tensors, outs: Tensors) -> Steps:
    """The sources of `root` into everybody's outputs."""
    if place.me == root:
        packed = memory.packed(srcs, outs[0].device)
    else:
        size = sum(out.nbytes for out in outs)
        packed = torch.empty(size, dtype=torch.uint8, device=outs[0].device)
    yield Broadcast(packed, root)
    return lambda: memory.unpack(packed, outs)


def _exchange(pattern: Pattern, place: Place, srcs: Tensors, outs: Tensors) -> Steps:
    """What each member gives to each: scatter, gather, all_to_all."""
    parts = [[srcs[k] for k in pattern.gives[to]] if srcs else [] for to in pattern.takers]
    gives, takes = [0] * place.members, [0] * place.members
    for to, part in zip(pattern.takers, parts, strict=True):
        gives[to] = sum(src.nbytes for src in part)
    rooms = [[outs[k] for k in pattern.takes[of]] if outs else [] for of in pattern.givers]
    for of, room in zip(pattern.givers, rooms, strict=True):
        takes[of] = sum(out.nbytes for out in room)
    packed = memory.packed([src for part in parts for src in part], (*srcs, *outs)[0].device)
    whole = packed.new_empty(sum(takes))
    yield AllToAll(packed, whole, gives, takes)
    return lambda: memory.unpack(whole, [out for room in rooms for out in room])


def _batches(
    place: Place, likes: Tensors, name: str, sources: Callable[[int], Tensors]
) -> list[_Batch]:
    """What to reduce, packed by how it goes on its way; members' parts one after the other.

    `likes` give the dtypes; ``sources(k)`` are the tensors to reduce for the k-th of them: one,
    or one for each member.
    """
    kinds: dict[tuple[encoding.Code | None, torch.dtype | None], list[int]] = {}
    for k, like in enumerate(likes):
        code = encoding.code_of(like.dtype, name)
        if code is not None and code.op not in place.ops:
            code = None
        kinds.setdefault((code, like.dtype if code is None else None), []).append(k)
    batches = []
    for (code, _), places in kinds.items():
        rows = zip(*(sources(k) for k in places), strict=True)  # of one member each
        tensors = [tensor for row in rows for tensor in row]
        if code is None:
            packed = memory.packed(tensors, tensors[0].device)
        else:
            packed = encoding.pack(tensors, code, name)
        batches.append(_Batch(places, code, packed))
    return batches


def _results(
    done: Sequence[tuple[_Batch, Tensor]], outs: Tensors, name: str, members: int
) -> Finish:
    """Writes what came of each batch."""

    def finish() -> None:
        for batch, result in done if outs else ():
            targets = [outs[k] for k in batch.places]
            if batch.code is None:
                _combine(result, targets, name, members)
            else:
                encoding.unpack(result, targets, batch.code, name, members)

    return finish


def _combine(whole: Tensor, outs: Tensors, name: str, members: int) -> None:
    """Reduce the members' bytes here, where the library can't."""
    flat = whole.view(members, -1)
    first = 0
    for out in outs:
        inputs = [memory.typed(row[first : first + out.nbytes], out) for row in flat]
        out.copy_(combine(inputs, name))
        first += out.nbytes
