"""A block of attention in functions, over the sequence: gathered keys, or a softmax in parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discolab import Session, ccl, compare, current_worker, note
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison

WIDTH, HEADS, LENGTH = 32, 4, 32


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos = self.drawn(LENGTH, WIDTH)
        self.wq, self.wk = self.drawn(WIDTH, WIDTH), self.drawn(WIDTH, WIDTH)
        self.wv, self.wo = self.drawn(WIDTH, WIDTH), self.drawn(WIDTH, WIDTH)
        self.w1, self.w2 = self.drawn(64, WIDTH), self.drawn(WIDTH, 64)

    @staticmethod
    def drawn(rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(rows, columns) / math.sqrt(columns))


def by_heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def scores(q: Tensor, k: Tensor, at: Tensor, of: Tensor) -> Tensor:
    """Score keys at the positions `of` for queries at the positions `at`, causally."""
    raw = by_heads(q) @ by_heads(k).mT / math.sqrt(WIDTH // HEADS)
    return raw.masked_fill(of[None] > at[:, None], -1e9)


def tail(h: Tensor, ctx: Tensor, wo: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    ctx = note("ctx", ctx.transpose(1, 2).flatten(2))
    a = note("a", h + F.linear(ctx, wo))
    m = note("m", F.gelu(F.linear(a, w1)))
    return a + F.linear(m, w2)


def reference(weights: Weights, x: Tensor) -> Tensor:
    h = note("h0", x + weights.pos)
    q = note("q", F.linear(h, weights.wq))
    k, v = note("k", F.linear(h, weights.wk)), note("v", F.linear(h, weights.wv))
    every = torch.arange(LENGTH)
    ctx = scores(q, k, every, every).softmax(-1) @ by_heads(v)
    return tail(h, ctx, weights.wo, weights.w1, weights.w2)


def part(rank: int, world: int, zigzag: bool) -> Tensor:
    """Give the positions of a worker: in one piece, or one from each end."""
    if not zigzag:
        return torch.arange(LENGTH).chunk(world)[rank]
    pieces = torch.arange(LENGTH).chunk(2 * world)
    return torch.cat([pieces[rank], pieces[2 * world - 1 - rank]])


def gathered(weights: Weights, x: Tensor, *, zigzag: bool = False, bug: str = "") -> Tensor:
    """Queries stay with their worker, keys and values come from all."""
    world, rank = current_worker().world_size, current_worker().rank
    copied = dist_fn.copy_to_region
    mine = part(rank, world, zigzag)
    back = torch.cat([part(other, world, zigzag) for other in range(world)]).argsort()
    x, pos = x[:, mine], copied(weights.pos)
    h = note("h0", x + (pos.chunk(world)[rank] if bug == "positions" else pos[mine]))
    q = note("q", F.linear(h, copied(weights.wq)))
    k = note("k", F.linear(h, copied(weights.wk)))
    v = note("v", F.linear(h, copied(weights.wv)))
    if bug == "not scattered":
        k = dist_fn.gather_from_region(k, 1)
    else:
        k = dist_fn.gather_from_sequence_region(k, 1)
    k = k[:, back]
    v = dist_fn.gather_from_sequence_region(v, 1)[:, back]
    at = torch.arange(len(mine)) if bug == "mask" else mine
    ctx = scores(q, k, at, torch.arange(LENGTH)).softmax(-1) @ by_heads(v)
    w2 = weights.w2 if bug == "not copied" else copied(weights.w2)
    return tail(h, ctx, copied(weights.wo), copied(weights.w1), w2)


def in_parts(weights: Weights, x: Tensor, *, bug: str = "") -> Tensor:
    """Each worker has all queries, its part of the keys, and its part of the softmax."""
    world, rank = current_worker().world_size, current_worker().rank
    copied = dist_fn.copy_to_region
    h = note("h0", x + weights.pos)
    q = note("q", F.linear(h, weights.wq))
    mine = dist_fn.scatter_to_region(h, 1)
    k = note("k", F.linear(mine, copied(weights.wk)))
    v = note("v", F.linear(mine, copied(weights.wv)))
    every = torch.arange(LENGTH)
    s = scores(copied(q), k, every, every.chunk(world)[rank])
    largest = s.detach().amax(-1, keepdim=True)
    if bug != "largest":
        largest = ccl.all_reduce(largest, "max")
    p = (s - largest).exp()
    above = dist_fn.reduce_from_region(p @ by_heads(v))
    below = dist_fn.reduce_from_region(p.sum(-1, keepdim=True))
    return tail(h, above / below, weights.wo, weights.w1, weights.w2)


def compared(
    session: Session,
    bug: str = "",
    *,
    program: Callable[..., Tensor] = gathered,
    zigzag: bool = False,
) -> ProgramComparison:
    torch.manual_seed(1)
    weights = Weights()
    x = torch.randn(2, LENGTH, WIDTH)

    def sharded(state: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        own = Weights()
        own.load_state_dict(state)
        more = {"zigzag": zigzag} if program is gathered else {}
        return functools.partial(program, own, bug=bug, **more)

    workers = session.call_packed(sharded, weights.state_dict())
    return compare(functools.partial(reference, weights), workers, x)
