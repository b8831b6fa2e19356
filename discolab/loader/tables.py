"""What people look at of a checkpoint and of a plan's result: tables, and drawings of a parameter.

Parts that text and HTML are made of. Pure. Layers of a model that are alike share a row (`fold`),
so a model of hundreds of parameters fits on a page. What workers hold and read is counted from the
plan's result (`Cuts`).

`draw` shows how one parameter is cut: its boxes to scale, in the colours of the workers that hold
them. Unlike the pictures of DRefs it needs nobody's tensor, and knows segments, heads and padding.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..layouts.layout import Cut, Layout, Workers, chunk, cut
from ..views.formats import cut as shorten
from ..views.formats import format_bytes, format_ranks, format_shape
from ..views.parts import Column, Details, Grid, Line, Part, Row, Table, Text, Tile, VStack
from .catalog import Catalog, Entry

if TYPE_CHECKING:
    from .plan import Resolved
    from .presharded import Sharding

_NUMBER = re.compile(r"(?:^|(?<=[._]))\d+(?=$|[._])")


@dataclass(frozen=True, slots=True)
class Fold:
    """Parameters that are told together.

    Attributes
    ----------
    label
        What they are called: a name, or one with ``*`` or ``{0-15}`` in the place of numbers.
    names
        Theirs, in order.
    """

    label: str
    names: tuple[str, ...]


def fold(kinds: Mapping[str, Hashable]) -> list[Fold]:
    """Put names together that differ in numbers only and are of one kind.

    Parameters
    ----------
    kinds
        For each name what it must have in common with others; in the order of the result.

    Examples
    --------
    >>> [f.label for f in fold({"h.0.w": 1, "h.0.b": 2, "h.1.w": 1, "h.1.b": 2, "out": 1})]
    ['h.*.w', 'h.*.b', 'out']
    >>> [f.label for f in fold({"h.0.w": 1, "h.1.w": 1, "h.2.w": 2, "h.3.w": 2})]
    ['h.{0,1}.w', 'h.{2,3}.w']
    """
    every: dict[str, list[str]] = {}
    alike: dict[tuple[str, Hashable], list[str]] = {}
    for name, kind in kinds.items():
        template = _NUMBER.sub("*", name)
        every.setdefault(template, []).append(name)
        alike.setdefault((template, kind), []).append(name)
    return [
        Fold(_label(names, every[template]), tuple(names)) for (template, _), names in alike.items()
    ]


def fold_names(names: Sequence[str]) -> list[str]:
    """Labels of names that need nothing else in common."""
    return [
        found.label + (f" ×{len(found.names)}" if len(found.names) > 1 else "")
        for found in fold(dict.fromkeys(names))
    ]


def _label(names: Sequence[str], every: Sequence[str]) -> str:
    """What some of the names of one template are called."""
    if len(names) == 1:
        return names[0]
    here = [set(column) for column in zip(*map(_numbers, names), strict=True)]
    there = [set(column) for column in zip(*map(_numbers, every), strict=True)]
    words = [
        str(next(iter(some))) if len(some) == 1 else "*" if some == all_ else _set(some)
        for some, all_ in zip(here, there, strict=True)
    ]
    found = iter(words)
    return _NUMBER.sub(lambda _: next(found), names[0])


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(name)]


def _set(numbers: set[int]) -> str:
    return "{" + format_ranks(numbers) + "}"


# -- memory ----------------------------------------------------------------------------------------


class Cuts:
    """The cuts of a plan's result: each kind of parameter is cut once, not once in every layer."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.workers: Workers = resolved.workers
        self._found: dict[tuple[Layout, tuple[int, ...]], tuple[Cut | None, ...]] = {}

    def of(self, name: str) -> tuple[Cut | None, ...]:
        """What each worker holds of a parameter, by rank; None: nothing, not even an empty one."""
        layout, shape = self.resolved.layouts[name], self.resolved.catalog.entries[name].shape
        key = layout, shape
        if key not in self._found:
            ranks = range(self.workers.count)
            self._found[key] = tuple(cut(layout, shape, self.workers, rank) for rank in ranks)
        return self._found[key]

    def memory(self, name: str, dtype: torch.dtype | None) -> list[int]:
        """Bytes of a parameter on each worker, once it is loaded."""
        size = self.resolved.catalog.entries[name].loaded_as(dtype).itemsize
        return [0 if part is None else part.numel * size for part in self.of(name)]

    def read(self, name: str) -> list[int]:
        """Bytes that each worker reads of it."""
        size = self.resolved.catalog.entries[name].stored.itemsize
        return [
            0 if part is None else size * sum(math.prod(box.shape) for box in part.boxes)
            for part in self.of(name)
        ]

    def to_draw(self) -> str | None:
        """The parameter whose cut says most: fused before padded before plain, then by size."""
        found = None
        best = (False, False, False, 0)
        for name, layout in self.resolved.layouts.items():
            entry = self.resolved.catalog.entries[name]
            worth = bool(layout.heads), bool(layout.segments), bool(layout.pad_to), entry.numel
            if layout.cuts and entry.numel and worth > best:
                found, best = name, worth
        return found


# -- tables ----------------------------------------------------------------------------------------


LIMIT = 40  # rows of a table
_MOST_NAMES = 8
_MOST_FILES = 8
_NAME_LIMIT = 90  # characters


def plan_parts(
    resolved: Resolved,
    dtype: torch.dtype | None = None,
    limit: int | None = LIMIT,
    drawn: str | None = None,
) -> Part:
    """What a plan does with a checkpoint: parameters, memory of each worker, what fits no rule.

    Parameters
    ----------
    resolved
        The plan's result.
    dtype
        What floating point parameters are cast to.
    limit
        Rows of the table at most; None: all of them.
    drawn
        The parameter to draw; None: a fused one, or else the largest that is cut.

    Returns
    -------
    Part
    """
    cuts = Cuts(resolved)
    name = drawn if drawn is not None else cuts.to_draw()
    parts = [
        _title(resolved.catalog, list(resolved.layouts)),
        *_memory(cuts, dtype),
        _parameters(cuts, dtype, limit),
        *_not_matched(resolved),
    ]
    if name is not None:
        parts.append(drawing_part(resolved, name))
    return VStack(tuple(parts))


def drawing_part(resolved: Resolved, name: str) -> Part:
    """One parameter, cut as the plan says.

    Raises
    ------
    KeyError
        If there is no such parameter.
    """
    return draw(resolved.catalog.entries[name], resolved.layouts[name], resolved.workers)


def catalog_parts(
    catalog: Catalog, limit: int | None = LIMIT, sharding: Sharding | None = None
) -> Part:
    """What a checkpoint holds: parameters, files, and what its index says of the whole.

    Parameters
    ----------
    catalog
        Of whole parameters, if it was written as shards.
    limit
        Rows of the table at most; None: all of them.
    sharding
        How it was cut, if it was written as shards.
    """
    cut_as = {} if sharding is None else sharding.layouts
    kinds: dict[str, Hashable] = {
        name: (entry.shape, entry.dtype, entry.stored, cut_as.get(name))
        for name, entry in catalog.entries.items()
    }
    folds = fold(kinds)
    rows: _Rows = []
    for found in folds[:limit]:
        entry = catalog.entries[found.names[0]]
        total = sum(catalog.entries[name].stored_bytes for name in found.names)
        cells = [format_shape(entry.shape), _dtype(entry, None), format_bytes(total)]
        if sharding is not None:
            cells.insert(2, str(cut_as.get(found.names[0], "whole")))
        rows.append((found, tuple(cells), False))
    heads = [Column("shape"), Column("dtype"), Column("bytes", "right")]
    if sharding is not None:
        heads.insert(2, Column("cut as"))
    parts: list[Part] = [
        _title(catalog, list(catalog.entries), sharding),
        _table(heads, rows),
        *_more(folds, limit),
    ]
    if len(catalog.files) > 1:
        parts.append(_files(catalog))
    if catalog.metadata:
        lines = [shorten(f"{key}: {value}", 120) for key, value in catalog.metadata.items()]
        text = "\n".join(lines[:_MOST_NAMES] + ["…"] * (len(lines) > _MOST_NAMES))
        parts.append(Details("what its index says of the whole", Text(text)))
    return VStack(tuple(parts))


def _title(catalog: Catalog, names: Sequence[str], sharding: Sharding | None = None) -> Line:
    shown = [catalog.entries[name] for name in names]
    total = sum(entry.stored_bytes for entry in shown)
    of_all = "" if len(shown) == len(catalog.entries) else f" of {len(catalog.entries)}"
    words = f" · {catalog.format} · {_count(len(shown), 'parameter')}{of_all}, "
    words += f"{format_bytes(total)} in {_count(len(catalog.files), 'file')}"
    if sharding is not None:
        words += f", cut for {_count(sharding.workers.count, 'worker')}"
    return Line(
        (
            Text(os.path.basename(os.path.abspath(catalog.path)) or catalog.path, "title"),
            Text(words),
        )
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


_Rows = list[tuple[Fold, tuple[str, ...], bool]]


def _parameters(cuts: Cuts, dtype: torch.dtype | None, limit: int | None) -> Part:
    resolved = cuts.resolved
    unmatched = set(resolved.unmatched)
    kinds: dict[str, Hashable] = {}
    for name, layout in resolved.layouts.items():
        entry = resolved.catalog.entries[name]
        kinds[name] = (entry.shape, entry.dtype, entry.stored, layout, name in unmatched)
    folds = fold(kinds)
    rows: _Rows = []
    for found in folds[:limit]:
        name = found.names[0]
        entry, layout = resolved.catalog.entries[name], resolved.layouts[name]
        sizes = [size * len(found.names) for size in cuts.memory(name, dtype)]
        cells = (
            format_shape(entry.shape),
            _dtype(entry, dtype),
            str(layout),
            _shards(cuts.of(name)),
            "–".join(map(format_bytes, sorted({min(sizes), max(sizes)}))),
        )
        rows.append((found, cells, not layout.cuts))
    heads = (
        Column("shape"),
        Column("dtype"),
        Column("layout"),
        Column("on each worker"),
        Column("bytes per worker", "right"),
    )
    return VStack((_table(heads, rows), *_more(folds, limit)))


def _table(heads: Sequence[Column], rows: _Rows) -> Table:
    """A row for parameters that are alike, and how many they are where any are."""
    counted = any(len(found.names) > 1 for found, _, _ in rows)
    made = []
    for found, cells, quiet in rows:
        count = f"×{len(found.names)}" if len(found.names) > 1 else ""
        first = [Text(shorten(found.label, _NAME_LIMIT)), *([Text(count)] if counted else [])]
        role = [
            Text(
                cell,
                "muted" if quiet and heads[i].title in ("layout", "on each worker") else "plain",
            )
            for i, cell in enumerate(cells)
        ]
        made.append(Row((*first, *role)))
    count_column = (Column("", "right"),) if counted else ()
    return Table((Column("parameter"), *count_column, *heads), tuple(made))


def _more(folds: Sequence[Fold], limit: int | None) -> tuple[Part, ...]:
    left = [] if limit is None else folds[limit:]
    if not left:
        return ()
    count = sum(len(found.names) for found in left)
    return (
        Text(f"and {_count(count, 'more parameter')} (ask for some: params='*.mlp.*')", "muted"),
    )


def _dtype(entry: Entry, dtype: torch.dtype | None) -> str:
    words = _name(entry.dtype)
    if entry.stored != entry.dtype:
        words += f" (stored as {_name(entry.stored)})"
    loaded = entry.loaded_as(dtype)
    return words if loaded == entry.dtype else f"{words} → {_name(loaded)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shards(cuts: Sequence[Cut | None]) -> str:
    """The shapes that workers hold, and who where they differ."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, part in enumerate(cuts):
        if part is not None:
            ranks.setdefault(part.shape, []).append(rank)
    padded = ", padded" if any(part is not None and part.padded for part in cuts) else ""
    if len(ranks) == 1 and all(part is not None for part in cuts):
        return format_shape(next(iter(ranks))) + padded
    words = [f"{format_shape(shape)} on {format_ranks(who)}" for shape, who in ranks.items()]
    if len(words) > 3:
        words[2:-1] = ["…"]
    return ", ".join(words) + padded


def _memory(cuts: Cuts, dtype: torch.dtype | None) -> list[Part]:
    """What the workers hold and read: in a line if that is the same for all."""
    resolved, workers = cuts.resolved, cuts.workers
    memory, read, held = [0] * workers.count, [0] * workers.count, [0] * workers.count
    whole = 0
    for name in resolved.layouts:
        entry = resolved.catalog.entries[name]
        whole += entry.numel * entry.loaded_as(dtype).itemsize
        memory = [a + b for a, b in zip(memory, cuts.memory(name, dtype), strict=True)]
        read = [a + b for a, b in zip(read, cuts.read(name), strict=True)]
        held = [a + (part is not None) for a, part in zip(held, cuts.of(name), strict=True)]
    words = _count(workers.count, "worker")
    if workers.groups > 1:
        words += f" in {workers.groups} groups"
    if workers.sizes != Workers.of(workers.count, workers.groups).sizes:
        words += f" as a mesh of {' x '.join(map(str, workers.sizes))}"
    cast = f" · floating point cast to {_name(dtype)}" if dtype is not None else ""
    rows = [
        (format_bytes(memory[r]), _share(memory[r], whole), format_bytes(read[r]), str(held[r]))
        for r in range(workers.count)
    ]
    if len(set(rows)) == 1:
        bytes_, share, from_files, _ = rows[0]
        told = f" · each holds {bytes_}, {share} of the whole, and reads {from_files}"
        return [Line((Text(words, "title"), Text(told + cast)))]
    titles = ("memory", "of the whole", "read from files", "parameters")
    table = Table(
        tuple(Column(title, "right") for title in titles),
        tuple(Row(tuple(map(Text, row)), (rank,)) for rank, row in enumerate(rows)),
    )
    return [Line((Text(words, "title"), Text(cast))), table]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _not_matched(resolved: Resolved) -> list[Part]:
    """What the user may have forgotten or mistyped."""
    parts: list[Part] = []
    by_layout: dict[str, list[str]] = {}
    for name in resolved.unmatched:
        by_layout.setdefault(str(resolved.layouts[name]), []).append(name)
    for layout, names in by_layout.items():
        parts.append(_listed(f"{_count(len(names), 'parameter')} without a rule ({layout})", names))
    if resolved.unused:
        verb = "decides" if len(resolved.unused) == 1 else "decide"
        words = f"{_count(len(resolved.unused), 'rule')} that {verb} nothing"
        parts.append(_listed(words, resolved.unused, fold=False))
    return parts


def _listed(what: str, names: Sequence[str], fold: bool = True) -> Line:
    labels = fold_names(names) if fold else list(names)
    shown = ", ".join(shorten(label, _NAME_LIMIT) for label in labels[:_MOST_NAMES])
    more = f", and {len(labels) - _MOST_NAMES} more" if len(labels) > _MOST_NAMES else ""
    return Line((Text(what, "warning"), Text(f": {shown}{more}")))


def _files(catalog: Catalog) -> Part:
    rows = [
        Row(
            (Text(shorten(os.path.basename(file.path), _NAME_LIMIT)), Text(format_bytes(file.size)))
        )
        for file in catalog.files[:_MOST_FILES]
    ]
    table = Table((Column("file"), Column("bytes", "right")), tuple(rows))
    left = len(catalog.files) - len(rows)
    more = (Text(f"and {_count(left, 'more file')}", "muted"),) if left else ()
    return Details(_count(len(catalog.files), "file"), VStack((table, *more)))


# -- how a parameter is cut ------------------------------------------------------------------------


_MOST_TILES = 64
_THINNEST = 12  # parts of the whole: so high is a box at least, that its label fits
_LONGEST = 2  # times the other side
_Runs = list[list[tuple[int, int]]]  # for each dimension begin and end of what a worker holds


def draw(entry: Entry, layout: Layout, workers: Workers) -> Part:
    """A parameter as a rectangle (a bar if it has one dimension), cut as the layout says.

    Parameters
    ----------
    entry
        Of any number of dimensions: those that are cut are drawn, then the last ones.

    Returns
    -------
    Part
        A `Grid`; words where there is nothing to draw, or more than can be seen.

    Raises
    ------
    ArgumentError
        If the layout does not fit the parameter.
    """
    dtype = str(entry.dtype).removeprefix("torch.")
    caption = f"{entry.name}: {dtype}{format_shape(entry.shape)}, {layout}"
    held = {
        rank: runs
        for rank in range(workers.count)
        if (runs := _runs(entry, layout, workers, rank)) is not None
    }
    if not entry.shape or not entry.numel:
        return Text(caption)
    edges = [
        sorted({0, size, *(end for runs in held.values() for run in runs[dim] for end in run)})
        for dim, size in enumerate(entry.shape)
    ]
    cut_dims = [dim for dim, found in enumerate(edges) if len(found) > 2]
    rest = [dim for dim in reversed(range(len(edges))) if dim not in cut_dims]
    dims = sorted([*cut_dims, *rest][:2])
    if len(edges) > 2:
        caption += f"; dimensions {dims[0]} and {dims[1]} drawn"
    rows = list(pairwise(edges[dims[0]])) if len(dims) == 2 else [(0, 0)]
    columns = list(pairwise(edges[dims[-1]]))
    if len(rows) * len(columns) > _MOST_TILES:
        return Text(f"{caption}: {len(rows) * len(columns)} boxes, too many to draw", "muted")
    tiles = []
    for row in rows:
        line = []
        for column in columns:
            where = {dims[-1]: column} | ({dims[0]: row} if len(dims) == 2 else {})
            owners = tuple(rank for rank, runs in held.items() if _holds(runs, where))
            line.append(Tile(_tile_label(entry, where), owners))
        tiles.append(tuple(line))
    if not all(tile.owners for line in tiles for tile in line):
        return Text(f"{caption}: some of it is on no worker", "warning")
    heights, thick = _thicker(rows)
    widths, wide = _thicker(columns)
    if thick or wide:
        caption += " (not to scale)"
    return Grid(caption, *_squarer(heights, widths), tuple(tiles))


def _thicker(spans: list[tuple[int, int]]) -> tuple[list[int], bool]:
    """Sizes to draw, in elements, and whether any had to be made larger for its label to fit."""
    sizes = [end - begin for begin, end in spans]
    seen = [max(size, sum(sizes) // _THINNEST) for size in sizes]
    return seen, seen != sizes


def _squarer(heights: list[int], widths: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same, the whole being made less long and thin."""
    tall, wide = sum(heights), sum(widths)
    if tall > _LONGEST * wide:
        widths = [n * tall // (_LONGEST * wide) for n in widths]
    elif 0 < tall * _LONGEST < wide:
        heights = [n * wide // (_LONGEST * tall) for n in heights]
    return tuple(heights), tuple(widths)


def _runs(entry: Entry, layout: Layout, workers: Workers, rank: int) -> _Runs | None:
    """What a worker holds along each dimension, padding included; None: nothing."""
    found = cut(layout, entry.shape, workers, rank)
    if found is None:
        return None
    runs = [
        sorted({(box.start[dim], box.start[dim] + box.shape[dim]) for box in found.boxes})
        for dim in range(len(entry.shape))
    ]
    if layout.pad_to:
        dims = (None,) * (len(workers.sizes) - len(layout.dims)) + layout.dims
        axis = next(i for i, dim in enumerate(dims) if dim is not None)
        dim = (dims[axis] or 0) % len(entry.shape)
        full = -(-entry.shape[dim] // layout.pad_to) * layout.pad_to
        first, length = chunk(full, workers.sizes[axis], workers.coordinate(rank)[axis])
        runs = [[(0, size)] for size in entry.shape]
        runs[dim] = [(first, first + length)] if length else []
    return runs if all(runs) else None


def _holds(runs: _Runs, where: dict[int, tuple[int, int]]) -> bool:
    """Whether a worker holds the box: edges are those of all workers, so it has all or nothing."""
    for dim, (begin, _) in where.items():
        place = bisect_right(runs[dim], (begin, 1 << 62)) - 1
        if place < 0 or runs[dim][place][1] <= begin:
            return False
    return True


def _tile_label(entry: Entry, where: dict[int, tuple[int, int]]) -> str:
    words = []
    padding = False
    for dim, size in enumerate(entry.shape):
        begin, end = where.get(dim, (0, size))
        words.append(":" if (begin, end) == (0, size) else f"{begin}:{end}")
        padding |= begin >= size
    return f"[{', '.join(words)}]" + (" padding" if padding else "")
