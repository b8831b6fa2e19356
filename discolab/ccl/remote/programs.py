"""What one member does in a collective over a lane, step by step. No state.

A program is a generator: it yields each `Step`, is resumed when that is done, and returns what
writes the results that are not yet where they belong. All members yield steps of the same kinds in
the same order. Tensors are given and taken where they lie: nothing is packed but several for one
member, strided ones, and what would be overwritten while it is read.
"""

from __future__ import annotations

from .. import moves
from ..backends import wire
from ..pattern import LIKE_BY_LIKE, Pattern
from .lane_steps import Exchange, Room, Spread, Steps, Tensor, Tensors, new_room
from .layout import room_for, unharmed, whole
from .reducing import reduction

SPREAD = 256 << 10  # bytes from which a broadcast goes from member to member


def program(
    pattern: Pattern, me: int, srcs: Tensors, outs: Tensors, room: Room = new_room
) -> Steps:
    """The steps of one member; `room` gives memory that nobody needs once they are done."""
    if pattern.reduction is not None:
        return reduction(pattern, me, srcs, outs, room)
    spread = pattern.kind == LIKE_BY_LIKE and pattern.members > 2
    if spread and sum(out.nbytes for out in outs) > SPREAD:  # these all members have
        return _spread(pattern, me, srcs, outs)
    return _copy(pattern, me, srcs, outs)


def alone(steps: Steps) -> None:
    """The program of a group of one, in which there is nobody to exchange anything with."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            end.value()
            return


def _copy(pattern: Pattern, me: int, srcs: Tensors, outs: Tensors) -> Steps:
    """Everything from where it is to where it belongs."""
    own = []
    if pattern.giver in (None, me) and pattern.taker in (None, me):
        own = list(zip(pattern.gives(me), pattern.takes(me), strict=True))
    srcs = unharmed(srcs, outs, own)
    gives, takes, late = [], [], []
    if pattern.giver in (None, me):
        same: Tensor | None = None
        for to in pattern.takers:
            if to != me:
                if same is None or not pattern.same_for_all:
                    same = whole([srcs[k] for k in pattern.gives(to)])
                gives.append((to, same))
    if pattern.taker in (None, me):
        for of in pattern.givers:
            targets = [outs[k] for k in pattern.takes(of)]
            if of == me:
                moves.move_all([(outs[to], srcs[k]) for k, to in own])
            else:
                room, scattered = room_for(targets)
                takes.append((of, room))
                if scattered:
                    late.append((room, targets))
    yield Exchange(gives, takes)

    def finish() -> None:
        for room, targets in late:
            wire.unpack_bytes(room, targets)

    return finish


def _spread(pattern: Pattern, me: int, srcs: Tensors, outs: Tensors) -> Steps:
    """A broadcast of something large."""
    assert pattern.giver is not None
    if me == pattern.giver:
        moves.move_all(list(zip(outs, srcs, strict=True)))
        yield Spread(whole(outs), me)
        return _nothing
    room, scattered = room_for(outs)
    yield Spread(room, pattern.giver)
    return (lambda: wire.unpack_bytes(room, outs)) if scattered else _nothing


def _nothing() -> None:
    """All is where it belongs."""
