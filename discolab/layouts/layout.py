"""How a tensor lies over workers, and which boxes of it each worker holds. Pure.

A `Layout` has a placement of torch for each axis of a mesh of workers, and what torch has no word
for: segments of a fused weight, heads that stay whole, padding, the stage that holds it. It is a
recipe: rules of a plan give it before anybody knows the workers. On a mesh (`Workers`) it is a
`ShardLayout`, which says for a tensor of any shape what each worker holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from ..runtime.errors import ArgumentError

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a tensor go.

    Attributes
    ----------
    dims
        For each mesh axis, the outermost first, the dimension that it splits, or None if it holds
        copies. Fewer than there are axes: these are the last ones, copies along the others.
    segments
        The sizes of the parts of a fused parameter along the dimension that is split, as q, k and
        v: each is split by itself, and a worker's pieces follow each other. Empty: one part. With
        one number only, that many equal parts.
    heads
        How many heads each segment has. A head is never split; with fewer heads than workers,
        several workers hold the same one. Empty: each element is its own.
    pad_to
        The dimension is filled up with zeros to a multiple of this before it is split; 0: it is
        not.
    stage
        The group of workers (pipeline stage) that holds it; None: every one.
    partial
        For each axis of `dims` the operation that makes the value of what the workers along it
        hold, as ``"sum"``, or "". Empty: they hold parts or copies. A parameter never is partial.
    """

    dims: tuple[int | None, ...] = (None,)
    segments: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    pad_to: int = 0
    stage: int | None = None
    partial: tuple[str, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether any axis splits it."""
        return any(dim is not None for dim in self.dims)

    def __str__(self) -> str:
        more = [
            f"{name}={_in_words(name, value)}"
            for name, value in (
                ("segments", self.segments), ("heads", self.heads),
                ("pad_to", self.pad_to or None), ("stage", self.stage),
            )
            if value not in ((), None)
        ]  # fmt: skip
        words = [
            f"partial({op})" if op
            else "replicate" if dim is None
            else f"shard({', '.join([str(dim), *more])})"
            for dim, op in zip(self.dims, _operations(self, len(self.dims)), strict=True)
        ]  # fmt: skip
        if not self.cuts and more:
            words[-1] = f"replicate({', '.join(more)})"
        return words[0] if len(words) == 1 else f"[{', '.join(words)}]"

    def placements(self, axes: int) -> tuple[Any, ...] | None:
        """The same in torch's words, for a mesh of so many axes; None where it has none."""
        from torch.distributed.tensor import Replicate, Shard

        special = self.segments or self.heads or self.pad_to or self.partial
        if special or self.stage is not None:
            return None
        dims = _for_axes(self, axes)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)

    def words(self, axes: int) -> str:
        """The same as a text, with more where torch has no word: ``Shard(0, segments=3)``."""
        more = ""
        for name, value in (
            ("segments", self.segments), ("heads", self.heads), ("pad_to", self.pad_to or None),
        ):  # fmt: skip
            if value not in ((), None):
                more += f", {name}={_in_words(name, value)}"
        words = []
        for dim, op in zip(_for_axes(self, axes), _operations(self, axes), strict=True):
            if op:
                words.append(f"Partial({op})")
            else:
                words.append("Replicate()" if dim is None else f"Shard({dim}{more})")
        return ", ".join(words)


def _in_words(name: str, value: tuple[int, ...] | int | None) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if name == "segments" and len(value) == 1 else str(list(value))


REPLICATE = Layout()


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a parameter that lands in a box of a worker's tensor.

    Attributes
    ----------
    start, shape
        Within the whole parameter, in elements.
    at
        Where it begins in the worker's tensor.
    """

    start: Shape
    shape: Shape
    at: Shape


@dataclass(frozen=True, slots=True)
class Cut:
    """What one worker holds of a parameter.

    Attributes
    ----------
    shape
        Of the worker's tensor.
    boxes
        Where its elements come from; what they leave out is zero.
    """

    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """Elements of the worker's tensor."""
        return math.prod(self.shape)

    @property
    def padded(self) -> bool:
        """Whether some of it comes from nowhere."""
        return sum(math.prod(box.shape) for box in self.boxes) < self.numel


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers that hold a checkpoint, as a mesh.

    Attributes
    ----------
    sizes
        Of the mesh's axes; the last one runs fastest with the rank.
    groups
        Pipeline stages: equal runs of ranks.
    """

    sizes: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.groups < 1 or self.count % self.groups:
            raise ArgumentError(
                f"{' × '.join(map(str, self.sizes)) or 'no'} workers can't be split into "
                f"{self.groups} equal groups; give at least one worker, and groups that divide them"
            )

    @classmethod
    def of(cls, num_workers: int, num_groups: int = 1) -> Workers:
        """Workers without a mesh of their own: in groups, if there are several."""
        alone = cls((num_workers,), num_groups)  # refuses groups that do not divide them
        if num_groups == 1:
            return alone
        return cls((num_groups, num_workers // num_groups), num_groups)

    @classmethod
    def given(cls, workers: Any, groups: Any = 1) -> Workers:
        """`of` what somebody has typed; workers on a mesh stay what they are.

        Raises
        ------
        ArgumentError
            If it is no such number, or does not fit the groups.
        """
        if isinstance(workers, Workers):
            return workers
        for what, value in (("workers", workers), ("groups", groups)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{what}= is a number from 1 on, got {value!r}")
        return cls.of(workers, groups)

    @property
    def count(self) -> int:
        """How many workers there are."""
        return math.prod(self.sizes)

    def span(self, axis: int) -> int:
        """Ranks that follow each other while the places on the axes further out stay the same."""
        return math.prod(self.sizes[axis:])

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The place of a worker in the mesh.

        Raises
        ------
        ArgumentError
            If there is no such worker.
        """
        if not 0 <= rank < self.count:
            raise ArgumentError(f"no worker {rank}: there are {self.count}, numbered from 0")
        found = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            found.append(index)
        return tuple(reversed(found))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The worker at a place in the mesh."""
        rank = 0
        for index, size in zip(coordinate, self.sizes, strict=True):
            rank = rank * size + index
        return rank

    def group(self, rank: int) -> int:
        """The pipeline stage of a worker."""
        return rank // (self.count // self.groups)


def cut(layout: Layout, shape: Shape, workers: Workers, rank: int) -> Cut | None:
    """What worker `rank` holds of a tensor; None if its stage does not hold it.

    Parts are as even as `torch.chunk` makes them: the first ones are equal, later ones may be
    smaller or empty.

    Raises
    ------
    ArgumentError
        If the layout does not fit the shape, or there is no such worker.
    """
    check(layout, shape, workers)
    place = workers.coordinate(rank)
    if layout.stage is not None and workers.group(rank) != layout.stage:
        return None
    dims = _for_axes(layout, len(workers.sizes))
    runs = [[(0, size)] for size in shape]
    for axis, dim in enumerate(dims):
        if dim is None:
            continue
        dim %= len(shape)
        parts, index = workers.sizes[axis], place[axis]
        if layout.segments or layout.heads:
            runs[dim] = _cut_segments(layout, shape[dim], parts, index)
        else:
            ((start, size),) = runs[dim]
            full = _padded(size, layout.pad_to)
            first, length = chunk(full, parts, index)
            runs[dim] = [(start + first, length)]
    local = tuple(sum(length for _, length in found) for found in runs)
    return Cut(local, _boxes(runs, shape))


# The layers of a model are alike, and so are the cuts of their parameters.
cached_cut = lru_cache(maxsize=16_384)(cut)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index`, as `torch.chunk` cuts."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def check(layout: Layout, shape: Shape, workers: Workers) -> None:
    """Whether a layout fits a tensor and workers.

    Raises
    ------
    ArgumentError
        What does not fit, and what would.
    """
    if len(layout.dims) > len(workers.sizes):
        raise ArgumentError(
            f"{layout} has a placement for each of {len(layout.dims)} mesh axes, and the workers "
            f"have {len(workers.sizes)}: make a mesh (sess.mesh(dp=2, tp=2)) or give fewer"
        )
    cutting = [dim for dim in layout.dims if dim is not None]
    for dim in cutting:
        if not -len(shape) <= dim < len(shape):
            raise ArgumentError(
                f"{layout} splits dimension {dim}, and the shape {tuple(shape)} has "
                f"{len(shape) or 'none'}"
            )
    if layout.stage is not None and not 0 <= layout.stage < workers.groups:
        raise ArgumentError(
            f"{layout} is for stage {layout.stage}, and the workers are in {workers.groups} "
            f"group{'s' if workers.groups > 1 else ''}, numbered from 0 (num_groups= of a session)"
        )
    if layout.stage is not None:
        for axis, cut_there in enumerate(_for_axes(layout, len(workers.sizes))):
            # a stage that has only some places of this axis would leave the other parts to nobody
            if cut_there is not None and workers.count // workers.groups % workers.span(axis):
                raise ArgumentError(
                    f"{layout} is for one of {workers.groups} groups of workers, and splits along "
                    f"an axis of {workers.sizes[axis]} workers that are of several groups; "
                    f"split along an axis within a group of {workers.count // workers.groups}"
                )
    if layout.segments or layout.heads or layout.pad_to:
        _check_parts(layout, shape, workers, cutting)


def _check_parts(layout: Layout, shape: Shape, workers: Workers, cutting: Sequence[int]) -> None:
    if min(layout.segments, default=1) < 1 or layout.pad_to < 0:
        raise ArgumentError(f"{layout}: segments and padding are sizes, of 1 at least")
    if len(cutting) != 1:
        raise ArgumentError(f"{layout}: segments, heads and padding need one axis that splits")
    if layout.pad_to and (layout.segments or layout.heads):
        raise ArgumentError(f"{layout}: a dimension with segments or heads can't be padded")
    size = shape[cutting[0]]
    segments = _segments(layout, size)
    if sum(segments) != size:
        raise ArgumentError(
            f"{layout}: the segments add up to {sum(segments)}, and dimension {cutting[0]} of "
            f"{tuple(shape)} has {size}"
        )
    if not layout.heads:
        return
    if len(layout.heads) != len(segments):
        raise ArgumentError(
            f"{layout}: {len(layout.heads)} numbers of heads for {len(segments)} segments"
        )
    parts = workers.sizes[_cutting_axis(layout, len(workers.sizes))]
    for length, heads in zip(segments, layout.heads, strict=True):
        if heads < 1 or length % heads:
            raise ArgumentError(f"{layout}: a segment of {length} is not {heads} equal heads")
        if heads < parts and parts % heads:
            raise ArgumentError(
                f"{layout}: {heads} heads for {parts} workers; with fewer heads than workers "
                "each head goes to equally many workers"
            )


def _for_axes(layout: Layout, axes: int) -> tuple[int | None, ...]:
    return (None,) * (axes - len(layout.dims)) + layout.dims


def _operations(layout: Layout, axes: int) -> tuple[str, ...]:
    return ("",) * (axes - len(layout.partial)) + layout.partial


def _cutting_axis(layout: Layout, axes: int) -> int:
    return next(i for i, dim in enumerate(_for_axes(layout, axes)) if dim is not None)


def _segments(layout: Layout, size: int) -> Sequence[int]:
    if len(layout.segments) == 1:
        count = layout.segments[0]
        if size % count:
            raise ArgumentError(f"{layout}: a dimension of {size} is not {count} equal segments")
        return (size // count,) * count
    return layout.segments or (size,)


def _padded(size: int, pad_to: int) -> int:
    return -(-size // pad_to) * pad_to if pad_to else size


def _cut_segments(layout: Layout, size: int, parts: int, index: int) -> list[tuple[int, int]]:
    runs = []
    begin = 0
    segments = _segments(layout, size)
    for number, length in enumerate(segments):
        heads = layout.heads[number] if layout.heads else length
        each = length // heads if heads else 0
        if layout.heads and heads < parts:
            first, count = index // (parts // heads), 1
        else:
            first, count = chunk(heads, parts, index)
        runs.append((begin + first * each, count * each))
        begin += length
    return runs


def _boxes(runs: Sequence[Sequence[tuple[int, int]]], shape: Shape) -> tuple[Box, ...]:
    """The boxes that runs (start, length) along each dimension make up together."""
    # what lies beyond the parameter itself is padding
    inside = [
        [(start, max(0, min(length, size - start)), length) for start, length in found]
        for found, size in zip(runs, shape, strict=True)
    ]
    steps = [[0, *itertools.accumulate(length for _, _, length in found)] for found in inside]
    boxes = []
    for picks in itertools.product(*(range(len(found)) for found in inside)):
        chosen = [found[i] for found, i in zip(inside, picks, strict=True)]
        box = Box(
            tuple(start for start, _, _ in chosen),
            tuple(there for _, there, _ in chosen),
            tuple(step[i] for step, i in zip(steps, picks, strict=True)),
        )
        if math.prod(box.shape):
            boxes.append(box)
    return tuple(boxes)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A layout on a mesh of workers: what each of them holds of a tensor.

    Attributes
    ----------
    layout
        What is cut, and what is partial, along the axes of the mesh.
    workers
        The mesh.
    source
        Who says so: ``given`` by the user, a ``DTensor``, or ``inferred`` from shapes.
    order
        A dimension, how its rows are dealt in words, and the whole's rows in the order in which
        they are cut. None: as they are.
    """

    layout: Layout
    workers: Workers
    source: str = "inferred"
    order: tuple[int, str, tuple[int, ...]] | None = None

    @property
    def dims(self) -> tuple[int | None, ...]:
        """For each axis of the mesh the dimension that it cuts."""
        return _for_axes(self.layout, len(self.workers.sizes))

    @property
    def partial(self) -> tuple[str, ...]:
        """For each axis of the mesh the operation that makes a value of its terms, or ""."""
        return _operations(self.layout, len(self.workers.sizes))

    @property
    def is_partial(self) -> bool:
        """Whether the value is the sum (or mean) of what workers hold."""
        return any(self.layout.partial)

    @property
    def words(self) -> str:
        """In torch's words where it has one: ``Shard(1)``."""
        words = self.layout.words(len(self.workers.sizes))
        return words if self.order is None else f"{words}, {self.order[1]}"

    @property
    def plain(self) -> tuple[Any, ...]:
        """The same as plain values, which may be arguments of a command; see `of_plain`."""
        layout = self.layout
        how = (layout.dims, layout.segments, layout.heads, layout.pad_to, layout.partial)
        return how, self.workers.sizes, self.order

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> ShardLayout:
        """The layout that `plain` is of, without its stage and its source."""
        (dims, segments, heads, pad_to, partial), sizes, order = plain
        layout = Layout(tuple(dims), tuple(segments), tuple(heads), pad_to, None, tuple(partial))
        return cls(layout, Workers(tuple(sizes)), order=order)

    def cut(self, shape: Shape, rank: int) -> Cut | None:
        """What a worker holds of a value of that shape.

        Raises
        ------
        ArgumentError
            If the layout does not fit the shape.
        """
        return cached_cut(self.layout, shape, self.workers, rank)

    def fits(self, shape: Shape, shapes: Mapping[int, Shape]) -> bool:
        """Whether workers with values of these shapes may hold one of `shape` this way."""
        try:
            cuts = {rank: self.cut(shape, rank) for rank in shapes}
        except ArgumentError:
            return False
        return all(part is not None and part.shape == shapes[r] for r, part in cuts.items())

    def teams(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Those of `ranks` whose terms make one value, for each such value."""
        teams: dict[Shape, list[int]] = {}
        for rank in ranks:
            place = zip(self.workers.coordinate(rank), self.partial, strict=True)
            teams.setdefault(tuple(at for at, op in place if not op), []).append(rank)
        return [tuple(team) for team in teams.values()]

    def part_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What worker `rank` should hold of a tensor: a view if it lies in one piece.

        Raises
        ------
        ArgumentError
            If the layout does not fit the tensor.
        """
        if self.order is not None:
            dim, _, rows = self.order
            tensor = tensor.index_select(dim, torch.tensor(rows, device=tensor.device))
        part = self.cut(tuple(tensor.shape), rank)
        assert part is not None
        if part.shape == tuple(tensor.shape) and len(part.boxes) <= 1:
            return tensor
        pieces = [(box, tensor[_slices(box.start, box.shape)]) for box in part.boxes]
        if len(pieces) == 1 and pieces[0][0].shape == part.shape:
            return pieces[0][1]
        made = tensor.new_zeros(part.shape)
        for box, piece in pieces:
            made[_slices(box.at, box.shape)] = piece
        return made

    def padding(self, shape: Shape, rank: int) -> torch.Tensor | None:
        """Which elements of a worker's part come from nowhere, as a mask; None: none do."""
        part = self.cut(shape, rank)
        if part is None or not part.padded:
            return None
        mask = torch.ones(part.shape, dtype=torch.bool)
        for box in part.boxes:
            mask[_slices(box.at, box.shape)] = False
        return mask


def _slices(start: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
