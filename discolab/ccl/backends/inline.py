"""Collectives whose tensors go through the coordinator, with the calls themselves. No state.

What a member gives are the bytes of its tensors, one after the other: the same for all, or a part
for each member. What comes from all is reduced in the order of the ranks, as `local` does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..coordinator.collectives import Data
from ..moves import as_bytes
from ..pattern import Pattern
from ..reductions import combine
from . import wire

Tensors = Sequence[torch.Tensor]

LARGEST = 48 << 10  # bytes that go to one member: more do not fit in one datagram of a local line
LEAST = 1024  # bytes that one member may give, however many there are
_NOTHING = b""


def pack(pattern: Pattern, me: int, srcs: Tensors) -> Data:
    """What a member gives; None if that is too much to go through the coordinator."""
    limit = LARGEST
    if pattern.same_for_all:
        limit = max(min(LEAST, LARGEST), LARGEST // pattern.members)
    if sum(src.nbytes for src in srcs) > limit:
        return None
    if pattern.giver not in (None, me):
        return _NOTHING
    if pattern.same_for_all and pattern.taker is None:
        return _bytes(srcs)
    parts = [_NOTHING] * pattern.members
    for to in pattern.takers:
        parts[to] = _bytes([srcs[k] for k in pattern.gives(to)])
    return tuple(parts)


def unpack(pattern: Pattern, me: int, given: Sequence[bytes], outs: Tensors) -> None:
    """Write the results of what all members have given."""
    if not given or pattern.taker not in (None, me):
        return
    sources: dict[int, list[torch.Tensor]] = {}
    for giver in pattern.givers:
        whole = torch.frombuffer(bytearray(given[giver] or b"\0"), dtype=torch.uint8)
        first = 0
        for place in pattern.takes(giver):
            out = outs[place]
            part = whole[first : first + out.nbytes]
            sources.setdefault(place, []).append(wire.typed(part, out))
            first += out.nbytes
    for place, parts in sources.items():  # these are new memory: no output can disturb them
        total = parts[0] if pattern.reduction is None else combine(parts, pattern.reduction)
        as_bytes(outs[place]).copy_(as_bytes(total))


def _bytes(tensors: Tensors) -> bytes:
    return b"".join([wire.bytes_of(tensor).cpu().numpy().tobytes() for tensor in tensors])
