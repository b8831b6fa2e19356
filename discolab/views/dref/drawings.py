"""Draws tensors as rectangles to scale: joined where their layout is known, else side by side.

Pure. The thumbnails of all workers are on one scale, and stand in the rectangles where those hold
just what a worker holds; `Drawing.left_out` says that some are not seen there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...layouts.infer import AxisPattern
from ...layouts.join import ShardMap
from ..facts.thumbnails import Scale, heat_of, shared_scale
from ..formats import format_number, format_shape, format_workers
from ..parts import Grid, Heat, Legend, Part, Text, Tile
from .layout import draw_plan, drawn_dims, layout_caption

_MOST_PLANS = 4
_MOST_PICTURES = 16
_UNKNOWN = "how they join is not known: set .placements to see them joined"
_KINDS = {"values": "all values", "means": "means of blocks", "samples": "sampled values"}


@dataclass(frozen=True)
class Pictures:
    """The thumbnails of a view, by rank, and the scale that they share."""

    heats: Mapping[int, Heat]
    scale: Scale | None

    def legend(self) -> list[Part]:
        """What the colours mean, if any are seen."""
        if self.scale is None or not self.heats:
            return []
        low, high = self.scale.low, self.scale.high
        if self.scale.diverging:
            high = max(-low, high)
            low = -high
        words = " and ".join(_KINDS.get(kind, kind) for kind in self.scale.of.split(" and "))
        ends = ("", "") if self.scale.empty else (format_number(low), format_number(high))
        return [Legend(*ends, self.scale.diverging, self.scale.nonfinite, words)]


@dataclass(frozen=True)
class Drawing:
    """What stands beside the table, and whether a thumbnail is not seen in it."""

    parts: tuple[Part, ...] = ()
    left_out: bool = True


def take_pictures(records: Mapping[int, Mapping[str, Any]]) -> Pictures:
    """Put the thumbnails that the records hold on one scale; none of more than 16 workers."""
    scale = shared_scale(records.values())
    if scale is None or scale.flat or len(records) > _MOST_PICTURES:
        return Pictures({}, scale)
    heats = {rank: heat_of(rec, scale, _alt(rank, rec)) for rank, rec in records.items()}
    return Pictures({rank: heat for rank, heat in heats.items() if heat is not None}, scale)


def _alt(rank: int, record: Mapping[str, Any]) -> str:
    thumb = record.get("thumbnail")
    if not isinstance(thumb, Mapping):
        return f"worker {rank}"
    size = f"{thumb['rows']} x {thumb['columns']}"
    kind = _KINDS.get(thumb["of"], thumb["of"])
    ends = (
        "none finite"
        if thumb["low"] is None
        else f"{format_number(thumb['low'])} to {format_number(thumb['high'])}"
    )
    return f"worker {rank}: {size} {kind}, {ends}"


def draw_plans(
    plans: Sequence[ShardMap],
    classes: Mapping[int, str] | None,
    pictures: Pictures,
    suffix: str = "",
) -> Drawing:
    """Draw known layouts, one logical tensor each.

    Parameters
    ----------
    plans : sequence of ShardMap
        More than one if groups hold one tensor each.
    classes : mapping of rank to letter, or None
        Which contents are equal, if known.
    pictures : Pictures
    suffix : str
        Goes behind the placements, such as " (inferred)".
    """
    parts: list[Part] = []
    seen: set[int] = set()
    for place, plan in enumerate(plans[:_MOST_PLANS]):
        caption = layout_caption(plan, suffix)
        if len(plans) > 1:
            caption = f"group {place}: {caption}"
        drawn, inside = _draw_one(plan, caption, classes, pictures.heats)
        parts += drawn
        seen |= inside
    if len(plans) > _MOST_PLANS:
        like = " alike" if len({plan.logical for plan in plans}) == 1 else ""
        parts.append(Text(f"and {len(plans) - _MOST_PLANS} more groups{like}", "muted"))
    return Drawing(tuple(parts), not set(pictures.heats) <= seen)


def draw_replicas(plan: ShardMap, pictures: Pictures) -> Drawing:
    """Draw values that proved equal on all workers as one rectangle."""
    caption = f"replicated (inferred), {format_shape(list(plan.logical))}"
    grid = draw_plan(plan, caption)
    if grid is None:
        return Drawing()
    tile = grid.tiles[0][0]
    heat = pictures.heats.get(tile.owners[0])
    grid = dataclasses.replace(grid, tiles=((dataclasses.replace(tile, heat=heat),),))
    return Drawing((grid,), False)


def _draw_one(
    plan: ShardMap,
    caption: str,
    classes: Mapping[int, str] | None,
    heats: Mapping[int, Heat],
) -> tuple[list[Part], set[int]]:
    grid = draw_plan(plan, caption)
    if grid is None:
        return [], set()
    shown = [tile for row in grid.tiles for tile in row]
    if plan.partial and len(shown) == 1 and len(plan.replicas) == len(plan.keys) <= _MOST_PICTURES:
        ops = set(filter(None, plan.layout.partial))
        terms = [Tile(shown[0].label, (rank,), heats.get(rank)) for rank in plan.keys]
        between = "+" if ops == {"sum"} else ""
        sizes = grid.heights * len(terms), grid.widths * len(terms)
        return [Grid(grid.caption, *sizes, (tuple(terms),), True, between)], set(plan.keys)
    dims, ndim = drawn_dims(plan), len(plan.logical)
    if ndim > 2 and dims != [0, ndim - 1]:
        return [grid], set()  # a thumbnail shows other dims than the drawing
    seen: set[int] = set()
    rows = []
    for row in grid.tiles:
        tiles = []
        for tile in row:
            if _alike(tile.owners, classes) and not plan.partial:
                tile = dataclasses.replace(tile, heat=heats.get(tile.owners[0]))
                seen |= set(tile.owners)
            tiles.append(tile)
        rows.append(tuple(tiles))
    grid = dataclasses.replace(grid, tiles=tuple(rows))
    if len(shown) > 1 or seen or plan.partial or classes is None:
        return [grid], seen
    by_class = _by_class(list(plan.keys), classes)
    words = f"{caption}; one tile per distinct value"
    shapes = {held: plan.logical for _, held in by_class}
    drawn = _tiles("", shapes, by_class, heats)  # the words in a line, so that text has them too
    return [Text(words, "muted"), *drawn], set(plan.keys)


def _alike(owners: tuple[int, ...], classes: Mapping[int, str] | None) -> bool:
    if len(owners) == 1:
        return True
    return classes is not None and len({classes.get(rank) for rank in owners}) == 1


def draw_apart(
    shapes: Mapping[int, Sequence[int]],
    classes: Mapping[int, str] | None,
    pattern: AxisPattern | None,
    others: Sequence[int],
    pictures: Pictures,
) -> Drawing:
    """Draw tensors whose layout is not known side by side.

    Parameters
    ----------
    shapes : mapping of rank to shape
        Of the workers that hold a tensor.
    classes : mapping of rank to letter, or None
    pattern : AxisPattern, optional
        Along which axes of the mesh contents are equal.
    others : sequence of int
        The workers that hold nothing.
    pictures : Pictures
    """
    ranks = sorted(shapes)
    same = len({tuple(shape) for shape in shapes.values()}) == 1
    groups: list[tuple[str, tuple[int, ...]]] = [("", (rank,)) for rank in ranks]
    if pattern is not None:
        groups = [("", held) for held in pattern.groups]
        along = f"replicated along {' and '.join(pattern.equal)} (inferred)"
        words = f"{along}; along {' and '.join(pattern.distinct)} {_UNKNOWN}"
    elif len(ranks) == 1:
        words = ""
    elif same and classes is not None and len({classes[rank] for rank in ranks}) < len(ranks):
        groups = _by_class(ranks, classes)
        words = "one tile per distinct value" if len(groups) > 1 else ""
    else:
        words = f"one tensor per worker; {_UNKNOWN}"
    if others:
        place = f"only {format_workers(ranks)} hold{'s' if len(ranks) == 1 else ''} a tensor"
        words = f"{place}; {format_workers(others)}: None"
    if len(groups) > _MOST_PICTURES:
        return Drawing()
    sizes = {held: shapes[held[0]] for _, held in groups}
    drawn = _tiles(words, sizes, groups, pictures.heats)
    return Drawing(tuple(drawn), not drawn)


def _by_class(
    ranks: Sequence[int], classes: Mapping[int, str]
) -> list[tuple[str, tuple[int, ...]]]:
    held: dict[str, list[int]] = {}
    for rank in ranks:
        held.setdefault(classes[rank], []).append(rank)
    if len(held) == 1:
        return [("", tuple(ranks))]
    return [(letter, tuple(owners)) for letter, owners in held.items()]


def _tiles(
    caption: str,
    shapes: Mapping[tuple[int, ...], Sequence[int]],
    groups: Sequence[tuple[str, tuple[int, ...]]],
    heats: Mapping[int, Heat],
) -> list[Part]:
    """One rectangle a group; tensors of many dims are drawn by their last two."""
    drawn = [(label, held) for label, held in groups if shapes[held] and 0 not in shapes[held]]
    if not drawn or len({min(len(shapes[held]), 2) for _, held in drawn}) != 1:
        return []
    if any(len(shapes[held]) > 2 for _, held in drawn):
        caption += f"{'; ' if caption else ''}the last two dims drawn"
    heights, widths, tiles = [], [], []
    for label, held in drawn:
        shape = shapes[held]
        heights.append(shape[-2] if len(shape) > 1 else 0)
        widths.append(shape[-1])
        tiles.append(Tile(label, held, heats.get(held[0])))
    return [Grid(caption, tuple(heights), tuple(widths), (tuple(tiles),), apart="")]
