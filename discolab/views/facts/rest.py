"""Compares parameters and items beyond those that a record names: block by block, then by name.

Worker functions for `dref.ask`: no collective. Answers are bounded, whatever the value holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..formats import cut, format_shape
from .describe_module import MOST_BRIEF, MOST_LISTED, text_digest
from .guard import FAILURES, carriable, safe_repr
from .tensors import digest_of, dtype_name, shape_of

FIRST = MOST_LISTED + MOST_BRIEF  # the first that no record names
_MOST = 10_000  # tensors after it that are looked at
_MOST_BLOCKS = 256


def block_size(count: int) -> int:
    """How many of `count` tensors make a block."""
    return max(-(-min(count, _MOST) // _MOST_BLOCKS), 1)


def rest_blocks(value: object, count: int) -> list[str] | None:
    """A digest of each block of the `count` tensors after the first; None if one can't be read."""
    try:
        size = block_size(count)
        lines = [f"{name} {words} {digest}" for name, words, digest in _lines(value, 0, _MOST)]
        starts = range(0, len(lines), size)
        return [text_digest("\n".join(lines[start : start + size])) for start in starts]
    except FAILURES:
        return None


def rest_rows(value: object, count: int, blocks: Sequence[int]) -> list[list[str]] | None:
    """Name, words and digest of each tensor in these blocks, as in the ``brief`` of a record."""
    try:
        size = block_size(count)
        return [
            line
            for block in blocks
            for line in _lines(value, block * size, min((block + 1) * size, _MOST))
        ]
    except FAILURES:
        return None


for _function in (rest_blocks, rest_rows):  # what status calls it
    vars(_function)["disco_command"] = "drawing a value"


def _lines(value: Any, first: int, last: int) -> Iterator[list[str]]:
    """In a line each, the tensors from one number to another, counted after the first `FIRST`."""
    for name, item in itertools.islice(_named(value), FIRST + first, FIRST + last):
        digest = digest_of(item)
        if digest is None:
            raise ValueError("a tensor without data")
        words = f"{dtype_name(item.dtype)}{format_shape(shape_of(item))}"
        yield [carriable(cut(name, 120)), cut(words, 60), digest]


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        return itertools.chain(value.named_parameters(), value.named_buffers())
    if isinstance(value, dict):
        return ((safe_repr(key, 60)[0], item) for key, item in value.items())
    return ((str(place), item) for place, item in enumerate(value))
