"""Merge what several workers printed into labelled lines; pure functions.

Each worker's text keeps its own order. Lines that all workers printed stand once, with the
ranks in front; what stands between them is given block by block in rank order, equal blocks
once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TypeVar

from ..runtime.failures import fold_ranks

T = TypeVar("T", bound=Hashable)

_MOST_ALIGNED = 4_000  # lines beyond which only whole texts are compared


def merge(items: Mapping[int, Sequence[T]]) -> list[tuple[tuple[int, ...], T]]:
    """Merge sequences by rank into ``(ranks, item)`` in the order to show them."""
    ranks = sorted(rank for rank in items if items[rank])
    if not ranks:
        return []
    merged: list[tuple[tuple[int, ...], T]] = []
    at = dict.fromkeys(ranks, 0)
    for anchor in [*_anchors([items[rank] for rank in ranks]), None]:
        ends = {
            rank: len(items[rank]) if anchor is None else anchor[i] for i, rank in enumerate(ranks)
        }
        merged += blocks({rank: items[rank][at[rank] : ends[rank]] for rank in ranks})
        if anchor is not None:
            merged.append((tuple(ranks), items[ranks[0]][anchor[0]]))
            at = {rank: ends[rank] + 1 for rank in ranks}
    return merged


def label(ranks: Sequence[int]) -> str:
    """``[0-3]``."""
    return f"[{fold_ranks(ranks).replace(' ', '')}]"


def blocks(parts: Mapping[int, Sequence[T]]) -> list[tuple[tuple[int, ...], T]]:
    """Blocks in rank order, those that are wholly equal once."""
    owners: dict[tuple[T, ...], list[int]] = {}
    for rank, part in parts.items():
        if part:
            owners.setdefault(tuple(part), []).append(rank)
    return [(tuple(ranks), item) for block, ranks in owners.items() for item in block]


def _anchors(sequences: Sequence[Sequence[T]]) -> list[tuple[int, ...]]:
    """Positions, one in each sequence, of items that all have in the same order."""
    first = sequences[0]
    if all(other == first for other in sequences[1:]):
        return [(i,) * len(sequences) for i in range(len(first))]
    if sum(map(len, sequences)) > _MOST_ALIGNED:
        return []
    common: dict[int, list[int]] = {i: [i] for i in range(len(first))}
    for other in sequences[1:]:
        found: dict[int, int] = {}
        matcher = SequenceMatcher(None, first, other, autojunk=False)
        for block in matcher.get_matching_blocks():
            found.update((block.a + k, block.b + k) for k in range(block.size))
        common = {i: [*where, found[i]] for i, where in common.items() if i in found}
    return [tuple(where) for where in common.values()]
