"""What is asked of whom for a picture: the size of its pixels, and whose values it shows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...runtime.errors import ArgumentError
from ..formats import format_ranks
from .sheet import Shard, Sheet, Window


def choose_blocks(
    sheet: Sheet, window: Window, pixels: tuple[int, int], most: int
) -> tuple[int, int]:
    """How many elements fall on a pixel, down and across.

    Parameters
    ----------
    pixels : two ints
        At most so many, down and across.
    most : int
        At most so many from one worker.
    """
    tall, wide = window[2] - window[0], window[3] - window[1]
    blocks = [max(-(-tall // pixels[0]), 1), max(-(-wide // pixels[1]), 1)]
    while True:
        found = [_cells(shard, window, blocks) for shard in sheet.shards]
        excess = max(found, default=0) / most
        if excess <= 1:
            return blocks[0], blocks[1]
        grown = math.sqrt(excess)
        finer = [size // block for size, block in zip((tall, wide), blocks, strict=True)]
        both = [min(grown, max(count, 1)) for count in finer]  # one pixel is the least
        if both[0] < grown:
            both[1] = excess / both[0]
        elif both[1] < grown:
            both[0] = excess / both[1]
        blocks = [
            max(math.ceil(b * g * 0.999), b + (g > 1)) for b, g in zip(blocks, both, strict=True)
        ]


def _cells(shard: Shard, window: Window, blocks: Sequence[int]) -> int:
    cut = shard.cut(window, (blocks[0], blocks[1]))
    if cut is None:
        return 0
    count = 1
    for axis in (0, 1):
        first, last = (cut[2][2 * axis + edge] + cut[2][4 + axis] for edge in (0, 1))
        count *= -(-last // blocks[axis]) - first // blocks[axis]
    return count


def choices(sheet: Sheet) -> Iterator[tuple[str, str]]:
    """What may be shown of values that several workers hold: a key, and words for it."""
    if sheet.terms > 1:
        if sheet.reduction in ("sum", "avg"):
            yield "value", f"{sheet.reduction} of the terms, taken at the controller"
        for place in range(sheet.terms):
            yield f"term {place}", f"term of {_holders(sheet, place, 0)}"
        return
    for place in range(sheet.copies):
        yield ("value" if not place else f"copy {place}"), f"values of {_holders(sheet, 0, place)}"
    for place in range(1, sheet.copies):
        yield (
            f"difference {place}",
            f"{_holders(sheet, 0, place)} minus {_holders(sheet, 0, 0)}",
        )


def _holders(sheet: Sheet, term: int, copy: int) -> str:
    ranks = sorted(shard.terms[min(term, len(shard.terms) - 1)][copy] for shard in sheet.shards)
    if len(ranks) > 1 and sheet.copies == 1 and sheet.terms == 1:
        return "all workers"
    return ("worker " if len(ranks) == 1 else "workers ") + format_ranks(ranks)


def sources(sheet: Sheet, choice: str) -> list[tuple[Shard, list[tuple[int, float]]]]:
    """Whose values are shown for each shard, with the factor that each is added with.

    Raises
    ------
    ArgumentError
        If there is no such choice.
    """
    known = dict(choices(sheet))
    if choice not in known:
        raise ArgumentError(f"plot: choice is one of {', '.join(known)}: got {choice!r}")
    kind, _, number = choice.partition(" ")
    place = int(number or 0)
    found = []
    for shard in sheet.shards:
        copies = shard.terms[0]
        if kind == "difference":
            wanted = [(copies[place], 1.0), (copies[0], -1.0)]
        elif kind == "term":
            wanted = [(shard.terms[min(place, len(shard.terms) - 1)][0], 1.0)]
        elif len(shard.terms) > 1:
            share = 1.0 if sheet.reduction == "sum" else 1.0 / len(shard.terms)
            wanted = [(term[0], share) for term in shard.terms]
        else:
            wanted = [(copies[place], 1.0)]
        found.append((shard, wanted))
    return found
