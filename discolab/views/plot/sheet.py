"""The sheet that a picture of a tensor is drawn on: which worker holds what of the two dims drawn.

Coordinates are in elements of the sheet: rows down, columns across. If it is not known how the
workers' tensors join, they stand apart on it, side by side. From the sheet follows what is asked of
whom for a picture: the size of its pixels, and whose values it shows. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ...layouts.infer import infer_maps
from ...layouts.join import ShardMap, join_shards
from ...layouts.layout import REPLICATE
from ...runtime.errors import ArgumentError
from ..dref.contents import content_classes
from ..dref.summary import LayoutFacts, stated_plans
from ..formats import format_ranks, format_shape
from .regions import Cut

Window: TypeAlias = tuple[int, int, int, int]
"""Rows and columns of a sheet: top, left, bottom, right; half open."""

Replicas: TypeAlias = Literal["equal", "differ", "not compared"]

_UNKNOWN = "how they join is not known: set .placements"
_GAP = 0.06  # between tensors that stand apart, as a share of the widest


@dataclass(frozen=True)
class Shard:
    """A rectangle of the sheet and who holds it.

    `terms` has more than one entry if the workers hold terms of a reduction; each entry lists the
    ranks that hold the same values. `index` and `dims` are those of a `Cut`.
    """

    window: Window
    terms: tuple[tuple[int, ...], ...]
    label: str
    index: tuple[int, ...]
    dims: tuple[int, int]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that hold something of it."""
        return tuple(sorted(rank for term in self.terms for rank in term))

    def cut(self, window: Window, blocks: tuple[int, int]) -> Cut | None:
        """What to ask of a worker that holds it; None if the window shows nothing of it."""
        top, left, bottom, right = self.window
        edges = (
            max(window[0] - top, 0), min(window[2], bottom) - top,
            max(window[1] - left, 0), min(window[3], right) - left,
            top, left,
        )  # fmt: skip
        if edges[0] >= edges[1] or edges[2] >= edges[3]:
            return None
        return self.index, self.dims, edges, blocks


@dataclass(frozen=True)
class Sheet:
    """What is drawn: its size in elements, the dims drawn (-1: none there), and the shards.

    `note` says why they are not joined, or what to know of how they are; `replicas`:
    whether workers that should hold the same values do.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[int, int]
    index: tuple[int, ...]
    size: tuple[int, int]
    shards: tuple[Shard, ...]
    layout: str
    joined: bool = True
    reduction: str = ""
    assumed: tuple[int, ...] = ()
    others: Mapping[int, str] = field(default_factory=dict)
    note: str = ""
    replicas: Replicas = "equal"

    @property
    def window(self) -> Window:
        """All of it."""
        return 0, 0, *self.size

    @property
    def copies(self) -> int:
        """How many workers hold the same values, at least."""
        return min(len(term) for shard in self.shards for term in shard.terms)

    @property
    def terms(self) -> int:
        """How many terms make up the value; 1 if the workers hold the value itself."""
        return max(len(shard.terms) for shard in self.shards)

    def shard_at(self, row: int, column: int) -> Shard | None:
        """The shard that an element of the sheet is in."""
        for shard in self.shards:
            top, left, bottom, right = shard.window
            if top <= row < bottom and left <= column < right:
                return shard
        return None

    def words_at(self, row: int, column: int) -> str:
        """The index of an element in the logical tensor, or in its worker's if they stand apart."""
        at = list(self.index)
        shard = self.shard_at(row, column)
        if shard is not None and not self.joined:
            row, column = row - shard.window[0], column - shard.window[1]
        for dim, place in zip(self.dims, (row, column), strict=True):
            if dim >= 0:
                at[dim] = place
        return format_shape(at)


def make_sheet(
    records: Mapping[int, Mapping[str, Any]],
    known: LayoutFacts,
    dims: Sequence[int] | None = None,
    index: Any = None,
) -> Sheet:
    """Lay out the tensors of all workers.

    Parameters
    ----------
    records : mapping of rank to record
        From `regions.read_facts`; of a worker that has not answered none, and then it is taken to
        hold what the others do.
    known
        How the workers hold it, as far as the controller knows.
    dims : two ints, or one, optional
        What runs down and across; None: the dims that are cut, then the last ones.
    index : mapping of dim to int, or sequence of int or None for each dim, optional
        Where the other dims are cut; 0 where nothing is said.

    Raises
    ------
    ArgumentError
        If there is no tensor, or `dims` or `index` do not fit it.
    """
    tensors = {rank: r for rank, r in records.items() if r.get("kind") == "tensor"}
    others = {r: str(v.get("type", v["kind"])) for r, v in records.items() if r not in tensors}
    if not tensors:
        held = ", ".join(sorted(set(others.values()))) or "nothing that could be asked"
        raise ArgumentError(f"plot draws tensors: the workers hold {held}")
    shapes = {rank: _shape(rank, record) for rank, record in tensors.items()}
    lacking = tuple(rank for rank in range(known.num_workers) if rank not in records)
    if len(set(shapes.values())) == 1:
        shapes.update(dict.fromkeys(lacking, next(iter(shapes.values()))))
    first = tensors[min(tensors)]
    plans, note = _plans(tensors, shapes, known)
    joined = plans[0] if len(plans) == 1 else None
    shape = joined.logical if joined else shapes[min(shapes)]
    cut_dims = [dim for dim in joined.layout.dims if dim is not None] if joined else []
    drawn = _dims(len(shape), dims, cut_dims)
    at = _index(shape, drawn, index)
    replicas: Replicas = "equal"
    if joined:
        replicas = _replicas(joined, content_classes(tensors) or {})
        shards, size = _joined(joined, drawn, at), _size(shape, drawn)
        layout, reduction = joined.words, _reduction(joined)
    else:
        shards, size = _apart(shapes, drawn, at)
        layout, reduction = "", ""
    if not shards or not math.prod(size):
        raise ArgumentError(f"plot: a tensor {format_shape(list(shape))} has nothing to draw")
    return Sheet(
        tuple(shape), str(first.get("dtype", "")), drawn, at, size, shards, layout,
        joined is not None, reduction, lacking, others, note, replicas,
    )  # fmt: skip


def _shape(rank: int, record: Mapping[str, Any]) -> tuple[int, ...]:
    shape = record.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ArgumentError(f"plot: the tensor of worker {rank} has no shape of plain numbers")
    if record.get("note"):
        raise ArgumentError(f"plot: worker {rank}: {record['note']}")
    return tuple(shape)


def _plans(
    tensors: Mapping[int, Mapping[str, Any]],
    shapes: Mapping[int, tuple[int, ...]],
    known: LayoutFacts,
) -> tuple[Sequence[ShardMap], str]:
    """The one plan that joins all tensors, else none or several; with what there is to say of it.

    The words say why the tensors are not joined, or what to know of how they are.
    """
    num_workers = known.num_workers
    if set(range(num_workers)) == set(shapes):
        try:
            found, words = stated_plans(tensors, lambda: shapes, known)
        except ValueError as error:
            return [], str(error)
        if found:
            return found, words.text if words else _several(found)
    if num_workers == 1 and len(shapes) == 1:
        return [join_shards(shapes, [0], REPLICATE, (1,))], ""
    if len(tensors) < num_workers:
        return [], _UNKNOWN if known.placements is None else ""
    plan = next(iter(infer_maps(shapes, content_classes(tensors))), None)
    return ([], _UNKNOWN) if plan is None else ([plan], "")


def _replicas(plan: ShardMap, classes: Mapping[int, str]) -> Replicas:
    told = [{classes.get(rank) for rank in ranks} for ranks in plan.replicas if len(ranks) > 1]
    if any(len(letters - {None}) > 1 for letters in told):
        return "differ"
    return "not compared" if any(None in letters for letters in told) else "equal"


def _several(plans: Sequence[ShardMap]) -> str:
    return f"each of {len(plans)} groups has a tensor of its own" if len(plans) > 1 else ""


def _reduction(plan: ShardMap) -> str:
    return next(filter(None, plan.layout.partial), "")


def _dims(ndim: int, dims: Sequence[int] | None, cut: Sequence[int]) -> tuple[int, int]:
    """The dims drawn down and across; -1 for one that is not there."""
    if dims is None:
        ranked = sorted(set(cut)) + [dim for dim in reversed(range(ndim)) if dim not in cut]
        chosen = sorted(ranked[:2])
    else:
        chosen = [dims] if isinstance(dims, int) else list(dims)
        fits = all(type(dim) is int and -ndim <= dim < ndim for dim in chosen)
        chosen = [dim % ndim for dim in chosen] if fits and ndim else chosen
        if not fits or not 1 <= len(chosen) <= 2 or len(set(chosen)) < len(chosen):
            raise ArgumentError(
                f"plot: dims are one or two different dims of a tensor with {ndim}: got {dims!r}"
            )
    down, across = [-1, -1, *chosen][-2:]
    return down, across


def _index(shape: Sequence[int], drawn: tuple[int, int], index: Any) -> tuple[int, ...]:
    if index is not None and not isinstance(index, list | tuple | Mapping):
        raise ArgumentError(
            f"plot: index gives an int for each dim that is not drawn: got {index!r:.60}"
        )
    given = dict(enumerate(index)) if isinstance(index, list | tuple) else dict(index or {})
    found = [0] * len(shape)
    for dim, at in given.items():
        if at is None:
            continue
        if type(dim) is not int or not 0 <= dim < len(shape) or type(at) is not int:
            raise ArgumentError(
                f"plot: index gives an int for each dim that is not drawn: got {index!r}"
            )
        if dim in drawn and -shape[dim] <= at < shape[dim]:
            continue  # it is cut there when other dims are drawn
        if not -shape[dim] <= at < shape[dim]:
            raise ArgumentError(f"plot: index {at} of dim {dim}, which has {shape[dim]} elements")
        found[dim] = at % shape[dim]
    return tuple(found)


def _size(shape: Sequence[int], drawn: tuple[int, int]) -> tuple[int, int]:
    down, across = (1 if dim < 0 else shape[dim] for dim in drawn)
    return down, across


def _joined(plan: ShardMap, drawn: tuple[int, int], at: tuple[int, ...]) -> tuple[Shard, ...]:
    places: dict[object, list[tuple[int, ...]]] = {}
    for ranks in plan.replicas:
        places.setdefault(plan.keys[ranks[0]], []).append(ranks)
    return tuple(
        shard
        for terms in places.values()
        if (shard := _shard_of(plan, terms, drawn, at)) is not None
    )


def _shard_of(
    plan: ShardMap, terms: list[tuple[int, ...]], drawn: tuple[int, int], at: tuple[int, ...]
) -> Shard | None:
    keys = plan.keys[terms[0][0]]
    spans = [plan.spans[dim][key] for dim, key in enumerate(keys)]
    index = []
    for dim, (start, size) in enumerate(spans):
        if dim not in drawn and not start <= at[dim] < start + size:
            return None
        index.append(-1 if dim in drawn else at[dim] - start)
    (top, tall), (left, wide) = (spans[dim] if dim >= 0 else (0, 1) for dim in drawn)
    if not tall or not wide:
        return None
    words = [f"{start}:{start + size}" if keys[d] else ":" for d, (start, size) in enumerate(spans)]
    label = f"[{', '.join(words)}]"
    return Shard((top, left, top + tall, left + wide), tuple(terms), label, tuple(index), drawn)


def _apart(
    shapes: Mapping[int, tuple[int, ...]], drawn: tuple[int, int], at: tuple[int, ...]
) -> tuple[tuple[Shard, ...], tuple[int, int]]:
    shards: list[Shard] = []
    usual = len(at)
    held = {rank: shapes[rank] for rank in sorted(shapes) if len(shapes[rank]) == usual}
    sizes = {rank: _size(shape, drawn) for rank, shape in held.items()}
    gap = max(round(_GAP * max(wide for _, wide in sizes.values())), 1)
    left = 0
    for rank, (tall, wide) in sizes.items():
        inside = all(d in drawn or at[d] < size for d, size in enumerate(held[rank]))
        if tall and wide and inside:
            index = tuple(-1 if dim in drawn else place for dim, place in enumerate(at))
            window = 0, left, tall, left + wide
            label = format_shape(list(held[rank]))
            shards.append(Shard(window, ((rank,),), label, index, drawn))
            left += wide + gap
    return tuple(shards), (max(tall for tall, _ in sizes.values()), max(left - gap, 0))


# -- what is asked of whom: the size of pixels, and whose values are shown -------------------------


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
