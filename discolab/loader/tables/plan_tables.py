"""Tables of a checkpoint and of a plan's result, as parts that text and HTML are made of. Pure.

Layers of a model that are alike share a row, so a model of hundreds of parameters fits on a page.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from ...layouts.layout import Cut, Workers
from ...views.formats import cut as shorten
from ...views.formats import format_bytes, format_ranks, format_shape
from ...views.parts import Column, Details, Line, Part, Row, Table, Text, VStack
from ..catalog import Catalog, Entry
from .drawing import draw
from .folding import Fold, fold, fold_names
from .memory import Cuts

if TYPE_CHECKING:
    from ..plans.plan import Resolved
    from ..presharded import Sharding

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
        per_worker = max(cuts.memory(name, dtype)) * len(found.names)
        cells = (
            format_shape(entry.shape),
            _dtype(entry, dtype),
            str(layout),
            _shards(cuts.of(name)),
            format_bytes(per_worker),
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
