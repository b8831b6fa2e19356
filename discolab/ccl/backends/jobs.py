"""Reducing and copying between the tensors of all members: what every collective comes down to.

A `Job` reads some sources of one dtype and size and writes their reduction, or the copy of a
single one, to some outputs. `perform` does jobs as if every source were read before any output
is written. Large ones are done block by block, so that a partial result never leaves the cache,
and the blocks are given back as `Chunks` for several threads. No state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .. import memory
from ..board.rendezvous import Chunks
from ..pattern import Job
from ..reductions import accumulates_in_place, combine, combine_into

BLOCK = 1 << 20  # bytes of one input; smaller ones cost hand-overs of the interpreter, larger cache


def perform(jobs: Sequence[Job], reduction: str | None) -> Chunks | None:
    """Do all jobs, or give chunks with which to do them."""
    if _in_blocks(jobs):
        return Chunks(_blocks(jobs, reduction))
    pairs = []
    for outs, sources in jobs:
        if reduction is None:
            total = sources[0]
        else:
            total = combine([_shaped(source, sources[0]) for source in sources], reduction)
        pairs += [(out, _shaped(total, out)) for out in outs]
    if reduction is not None and len(jobs) == 1:
        for out, total in pairs:  # the total is new: no output can disturb it
            memory.copy(out, total)
    else:
        memory.move_all(pairs)
    return None


def _shaped(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same elements in the shape of another tensor, which may be another member's."""
    return tensor if tensor.shape == like.shape else tensor.reshape(like.shape)


def _blocks(jobs: Sequence[Job], reduction: str | None) -> list[functools.partial[None]]:
    parts = []
    for job in jobs:
        outs, sources = ([memory.movable(t).view(-1) for t in tensors] for tensors in job)
        size = sources[0].dtype.itemsize
        step = max(1, BLOCK // size)
        if reduction is None:
            work = functools.partial(_copy_block, outs, sources[0])
        elif _first_holds_sum(job, reduction):
            work = functools.partial(_reduce_block_in_place, outs, sources, reduction)
        else:
            work = functools.partial(_reduce_block, outs, sources, reduction)
        parts += [
            functools.partial(work, first, first + step)
            for first in range(0, len(sources[0]), step)
        ]
    return parts


def _copy_block(outs: list[torch.Tensor], source: torch.Tensor, first: int, stop: int) -> None:
    part = source[first:stop]
    for out in outs:
        if out.data_ptr() != source.data_ptr():
            out[first:stop].copy_(part)


def _reduce_block(
    outs: list[torch.Tensor], sources: list[torch.Tensor], reduction: str, first: int, stop: int
) -> None:
    total = combine([source[first:stop] for source in sources], reduction)
    for out in outs:
        out[first:stop].copy_(total)


def _reduce_block_in_place(
    outs: list[torch.Tensor], sources: list[torch.Tensor], reduction: str, first: int, stop: int
) -> None:
    total = outs[0][first:stop]
    combine_into(total, [source[first:stop] for source in sources], reduction)
    for out in outs[1:]:
        out[first:stop].copy_(total)


def _first_holds_sum(job: Job, reduction: str) -> bool:
    """Whether the first output can take the partial results: it is no source but the first."""
    out = job.outs[0]
    return (
        accumulates_in_place(out.dtype, reduction)
        and len(job.sources) > 1
        and all(out.data_ptr() != source.data_ptr() for source in job.sources[1:])
    )


def _in_blocks(jobs: Sequence[Job]) -> bool:
    """Whether the jobs are large and no block of one can disturb another.

    An element of an output may share memory only with the same one of its own job's sources.
    """
    tensors = [tensor for job in jobs for tensor in (*job.outs, *job.sources)]
    large = sum(job.sources[0].nbytes for job in jobs if job.outs) > BLOCK
    if not large or any(not (tensor.is_cpu and memory.is_plain(tensor)) for tensor in tensors):
        return False
    spans = [
        (memory.span(tensor), number) for number, job in enumerate(jobs) for tensor in job.sources
    ]
    for number, job in enumerate(jobs):
        for out in job.outs:
            low, high = mine = memory.span(out)
            for other, of in spans:
                if other[0] < high and low < other[1] and (other, of) != (mine, number):
                    return False
    return True
