"""Reductions of large tensors, block by block, so that a partial sum never leaves the cache.

Only for large tensors whose blocks can't disturb each other. No state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import moves
from .reductions import combine

BLOCK = 1 << 20  # bytes of one input


class Job(NamedTuple):
    """Reduce `sources`, in their order, into each of `outs`; all of one shape and dtype."""

    outs: list[torch.Tensor]
    sources: list[torch.Tensor]


def reduce_in_blocks(jobs: Sequence[Job], reduction: str) -> bool:
    """Do all jobs as if every source were read before any output is written; False: none done."""
    if not _independent(jobs):
        return False
    for job in jobs:
        outs, sources = ([t.view(-1) for t in tensors] for tensors in job)
        step = max(1, BLOCK // sources[0].dtype.itemsize)
        for first in range(0, len(sources[0]), step):
            total = combine([source[first : first + step] for source in sources], reduction)
            for out in outs:
                out[first : first + step].copy_(total)
    return True


def _independent(jobs: Sequence[Job]) -> bool:
    """Whether an element of an output shares memory only with the same one of its own sources."""
    tensors = [tensor for job in jobs for tensor in (*job.outs, *job.sources)]
    large = any(job.sources[0].nbytes > BLOCK for job in jobs)
    if not large or any(t.is_cuda or not t.is_contiguous() or t.is_conj() for t in tensors):
        return False
    spans = [
        (moves.span(tensor), number) for number, job in enumerate(jobs) for tensor in job.sources
    ]
    for number, job in enumerate(jobs):
        for out in job.outs:
            low, high = mine = moves.span(out)
            for other, of in spans:
                if other[0] < high and low < other[1] and (other, of) != (mine, number):
                    return False
    return True
