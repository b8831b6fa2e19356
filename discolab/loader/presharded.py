"""Checkpoints that hold a parameter as one tensor for each worker, read as whole parameters. Pure.

The names are TVM's, ``X_shard-1-of-4``, or MLC's, ``X_shard-0``; a parameter that was not cut may
have its own name. How they were cut stands in the metadata if discolab has written them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..layouts.join import Misfit, whole_shape
from ..layouts.layout import REPLICATE, Box, Cut, Layout, Workers, cut
from ..runtime.errors import ArgumentError
from .catalog import Catalog, Entry, Piece, Shape, c_strides, copies
from .errors import CheckpointError

if TYPE_CHECKING:
    from .plan import Plan

KEY = "discolab"  # in the metadata of a checkpoint
VERSION = 1
_NAME = re.compile(r"(?s)(.+)_shard-(\d{1,9})(?:-of-(\d{1,9}))?")
_MOST_WORKERS = 1 << 16


@dataclass(frozen=True)
class Sharding:
    """How a presharded checkpoint was cut.

    Attributes
    ----------
    workers
        For which it was cut.
    layouts, shapes
        Of whole parameters, by name.
    """

    workers: Workers
    layouts: Mapping[str, Layout]
    shapes: Mapping[str, Shape]

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the metadata: plain JSON."""
        return {
            "version": VERSION,
            "workers": list(self.workers.sizes),
            "groups": self.workers.groups,
            "layouts": {name: str(layout) for name, layout in self.layouts.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }


def shard_name(name: str, rank: int, count: int) -> str:
    """What the tensor of one worker is called."""
    return f"{name}_shard-{rank + 1}-of-{count}"


def part_of(name: str) -> tuple[str, int, int | None] | None:
    """Of the name of a shard: the parameter's, whose shard it is, of how many if it says so.

    ``x_shard-1-of-2`` counts from 1 (TVM), ``x_shard-0`` from 0 (MLC). None: it is no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match[3] is None:
        return match[1], int(match[2]), None
    return match[1], int(match[2]) - 1, int(match[3])


def check_name(name: Any) -> None:
    """Whether a parameter of this name can be saved and found again.

    Raises
    ------
    ArgumentError
        If it is no string, no text, or that of a shard.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"a parameter has the name {name!r}: names are strings")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"a parameter has the name {name!r}, which is no text") from None
    if part_of(name):
        raise ArgumentError(
            f"a parameter has the name {name!r}, as shards of another one have: give it another"
        )


def is_presharded(catalog: Catalog) -> bool:
    """Whether any tensor in it has the name of a shard."""
    return any(map(part_of, catalog.entries))


def logical(catalog: Catalog, plan: Plan | None = None) -> Catalog:
    """A checkpoint of shards as one of whole parameters, each with several pieces.

    Parameters
    ----------
    catalog
        Without names of shards it is given back as it is.
    plan
        How it was cut, for checkpoints that do not say so themselves.

    Raises
    ------
    CheckpointError
        If shards are missing, or not what the layouts make of a parameter.
    ArgumentError
        If nothing says how it was cut.
    """
    if not is_presharded(catalog):
        return catalog
    sharding = _written(catalog)
    shards = _gather(catalog, sharding)
    if sharding is None:
        if plan is None:
            name, found = next(iter(shards.items()))
            raise ArgumentError(
                f"{catalog.path} holds shards ({found[min(found)]!r}) and does not say how "
                f"{name!r} was cut: give a plan= with the layouts that it was cut by, such as "
                '{"*": "shard(0)"}'
            )
        sharding = _by_plan(catalog, shards, plan)
    entries: dict[str, Entry] = {}
    owner = {tensor: name for name, found in shards.items() for tensor in found.values()}
    for tensor, entry in catalog.entries.items():  # in the order of the index
        whole = owner.get(tensor)
        if whole is None:
            entries[tensor] = entry
        elif whole not in entries:
            entries[whole] = joined(catalog, whole, shards[whole], sharding)
    metadata = {key: value for key, value in catalog.metadata.items() if key != KEY}
    return replace(catalog, entries=entries, metadata=metadata)


def sharding_of(catalog: Catalog) -> Sharding | None:
    """How discolab has cut a checkpoint; None if it has not."""
    return _written(catalog) if is_presharded(catalog) else None


# -- which there are -------------------------------------------------------------------------


def _gather(catalog: Catalog, sharding: Sharding | None) -> dict[str, dict[int, str]]:
    """The names of shards by parameter and rank; all are there."""
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int | None] = {}
    for tensor in catalog.entries:
        part = part_of(tensor)
        if part is None:
            continue
        name, rank, of = part
        ranks = found.setdefault(name, {})
        if counts.setdefault(name, of) != of:
            raise _error(catalog, name, f"{tensor!r} is of another number of shards than others")
        if rank in ranks or rank < 0 or (of is not None and rank >= of):
            raise _error(catalog, name, f"{tensor!r}: shards are numbered from 1 to {of}, once")
        ranks[rank] = tensor
    for name, ranks in found.items():
        if name in catalog.entries:
            raise _error(catalog, name, "is there whole and as shards")
        count = counts[name] or max(ranks) + 1
        _check_all_there(catalog, name, ranks, count, counts[name] is None, sharding)
    if sharding is not None:
        for name in sharding.layouts:
            if name not in found:
                raise _error(catalog, name, "all of its shards are missing")
    return found


def _check_all_there(
    catalog: Catalog,
    name: str,
    ranks: Mapping[int, str],
    count: int,
    from_zero: bool,
    sharding: Sharding | None,
) -> None:
    expected = range(count)
    if sharding is not None:
        workers = sharding.workers
        if workers.count != count:
            raise _error(
                catalog, name,
                f"has shards of {count} workers, and the metadata says {workers.count}",
            )  # fmt: skip
        if name not in sharding.layouts:
            raise _error(catalog, name, "has no layout in the metadata")
        stage = sharding.layouts[name].stage
        if stage is not None:
            each = count // workers.groups
            expected = range(stage * each, (stage + 1) * each)
    if len(ranks) == len(expected) and all(rank in expected for rank in ranks):
        return
    if len(ranks) > len(expected) or any(rank not in expected for rank in ranks):
        rank = next(rank for rank in ranks if rank not in expected)
        raise _error(catalog, name, f"{ranks[rank]!r} is there, and that worker holds none of it")
    first = next(rank for rank in expected if rank not in ranks)
    missing = f"{name}_shard-{first}" if from_zero else shard_name(name, first, count)
    raise _error(
        catalog, name,
        f"{missing!r} is missing: {len(ranks)} of its {len(expected)} shards are there",
    )  # fmt: skip


# -- how they were cut -----------------------------------------------------------------------


def _written(catalog: Catalog) -> Sharding | None:
    """What the metadata says; None: nothing."""
    from .plan import parse_layout

    given = catalog.metadata.get(KEY)
    if given is None:
        return None
    try:
        if isinstance(given, str):  # metadata of safetensors are strings
            given = json.loads(given)
        if given["version"] != VERSION:
            raise CheckpointError(
                catalog.path,
                f"its shards were written by another version of discolab: format "
                f"{given['version']!r}, and this one reads {VERSION}",
            )
        sizes, groups = tuple(map(_positive, given["workers"])), _positive(given["groups"])
        if not sizes or math.prod(sizes) > _MOST_WORKERS or math.prod(sizes) % groups:
            raise ValueError(f"no workers: sizes {sizes} in {groups} groups")
        layouts = {name: parse_layout(text) for name, text in given["layouts"].items()}
        shapes = {name: tuple(map(_size, shape)) for name, shape in given["shapes"].items()}
        if layouts.keys() != shapes.keys():
            raise ValueError("layouts and shapes are of other names")
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise CheckpointError(
            catalog.path, f"its metadata {KEY!r} does not say how it was cut: {exc}"
        ) from None
    return Sharding(Workers(sizes, groups), layouts, shapes)


def _positive(value: Any) -> int:
    if _size(value) < 1:
        raise ValueError(f"a positive number is needed, got {value!r}")
    return int(value)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"a size is needed, got {value!r}")
    return value


def _by_plan(catalog: Catalog, shards: Mapping[str, Mapping[int, str]], plan: Plan) -> Sharding:
    """How a checkpoint of others was cut, if `plan` is what it was cut by."""
    counts = {name: len(found) for name, found in shards.items()}
    most = max(counts.values())
    layouts: dict[str, Layout] = {}
    shapes: dict[str, Shape] = {}
    for name, found in shards.items():
        if counts[name] != most:
            raise _error(catalog, name, f"has {counts[name]} shards, and others have {most}")
        given = [catalog.entries[found[rank]].shape for rank in range(most)]
        layout = replace(plan.layout(name, given[0]), stage=None)
        try:
            shapes[name] = whole_shape(layout, given, Workers((most,)))
        except Misfit as exc:
            raise _error(
                catalog, name,
                f"its {most} shards have the shapes {_shapes(given)}, and the plan says {layout}: "
                f"{exc}",
            ) from None  # fmt: skip
        layouts[name] = layout
    return Sharding(Workers((most,)), layouts, shapes)


def _shapes(given: Sequence[Shape]) -> str:
    """Shapes for a message; what is equal once."""
    return ", ".join(map(str, dict.fromkeys(given)))


# -- put together ----------------------------------------------------------------------------


def joined(catalog: Catalog, name: str, shards: Mapping[int, str], sharding: Sharding) -> Entry:
    """The whole parameter, with a piece for each box of a shard.

    Parameters
    ----------
    shards
        The tensors that hold its parts, by rank.

    Raises
    ------
    CheckpointError
        If they are not what its layout makes of it.
    """
    layout, shape = sharding.layouts.get(name, REPLICATE), sharding.shapes[name]
    first = catalog.entries[shards[min(shards)]]
    pieces: dict[tuple[Shape, Shape], list[Piece]] = {}
    for rank, tensor in sorted(shards.items()):
        entry = catalog.entries[tensor]
        if (entry.dtype, entry.stored) != (first.dtype, first.stored):
            raise _error(
                catalog, name, f"{tensor!r} is of {entry.dtype}, {first.name!r} of {first.dtype}"
            )
        try:
            made = cut(layout, shape, sharding.workers, rank)
        except ArgumentError as exc:
            raise _error(catalog, name, str(exc)) from None
        assert made is not None, "a stage that does not hold it has no shard"
        if entry.shape != made.shape:
            raise _error(
                catalog, name,
                f"{tensor!r} has the shape {entry.shape}; {layout} of {shape} over "
                f"{sharding.workers.count} workers makes {made.shape}",
            )  # fmt: skip
        for box in made.boxes:
            # several workers may hold the same: one of them is read
            if (box.start, box.shape) not in pieces:
                pieces[box.start, box.shape] = list(_pieces(entry, box))
    flat = tuple(piece for found in pieces.values() for piece in found)
    return Entry(name, shape, first.dtype, first.stored, flat)


def _pieces(entry: Entry, box: Box) -> Iterable[Piece]:
    """Where a box of the whole parameter lies, given the shard that has it."""
    part = Cut(box.shape, (Box(box.at, box.shape, (0,) * len(box.shape)),))
    for copy in copies(entry, part):
        start = tuple(a + s for a, s in zip(copy.at, box.start, strict=True))
        strides = None if copy.strides == c_strides(copy.shape) else copy.strides
        yield Piece(copy.file, copy.offset, start, copy.shape, strides)


def _error(catalog: Catalog, name: str, text: str) -> CheckpointError:
    return CheckpointError(catalog.path, text, name)
