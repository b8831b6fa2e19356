"""Save tensors of the workers as a checkpoint: each worker writes its own shards itself.

The controller arranges the files and puts them in place; no tensor comes to it.
Each byte of the checkpoint is written by one worker: see `shares`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..layouts.join import Misfit, check_shards, whole_shape
from ..layouts.layout import Layout, Workers, cut
from ..runtime.arguments import Pickled, Shared
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import current_worker
from .arrangement import Slot
from .catalog import Catalog, Shape
from .errors import CheckpointError
from .files import Sink, md5_of
from .formats.checks import MAX_DIMS
from .loading import run, workers_of
from .plan import Plan, parse_layout
from .presharded import Sharding, check_name, shard_name
from .progress import Board, Meter, Preparation
from .target import Target
from .weights import Weights

ONE_MACHINE = ("threads", "processes")  # engines whose workers share one page cache

Fact = tuple[Shape, torch.dtype] | str | None
"""What a worker has: a tensor's shape and dtype, None, or the name of another type."""


@dataclass(frozen=True)
class Job(Shared):
    """What workers are asked to write; the same for all."""

    paths: tuple[str, ...]
    slots: Mapping[str, Slot]
    sharding: Sharding
    presharded: bool
    mapped: bool
    board: int


def save(
    session: Session,
    path: str | os.PathLike[str],
    weights: Mapping[str, DRef],
    plan: Any = None,
    *,
    format: str = "safetensors",
    presharded: bool = False,
    max_file_bytes: int | None = None,
    bf16_as: str = "raw",
    metadata: Mapping[str, Any] | None = None,
    progress: bool = True,
    timeout: float | None = None,
) -> Catalog:
    """Save tensors of the workers as a checkpoint, in place of the one that the folder has.

    The old one stays whole until the new one is: a save that fails or is killed changes nothing.

    Parameters
    ----------
    path
        A folder, made if need be; on several machines, one that all of them share.
    weights
        Parameters by name: what `load` gave, or any DRefs.
    plan
        How they are laid out over the workers, see `Plan.of`; None: as `load` did it, or else by
        the DRefs' `placements`.
    format
        ``"safetensors"`` or ``"tensor-cache"`` (TVM, MLC).
    presharded
        Whether each worker writes its shards as they are (``name_shard-1-of-4``), to be loaded by
        as many workers in one run each; any number of workers can load either.
    max_file_bytes
        Of tensors in a file; None: 5 GB of safetensors, 32 MiB of a tensor-cache.
    bf16_as
        ``"f32-to-bf16"`` has a tensor-cache say that bfloat16 is to be loaded as float32.
    metadata
        For the index.
    progress, timeout
        As in `load`.

    Returns
    -------
    Catalog
        What was written.

    Raises
    ------
    CheckpointError
        If it can't be written; names the file.
    ArgumentError
        If the tensors and the layouts do not fit each other; names the parameter.
    WorkerError
        If a worker does not have a value.
    """
    target = Target(format, presharded, max_file_bytes, bf16_as, metadata)
    _check_weights(weights)
    with Preparation("saving", progress):
        asked = session.call_packed(_facts, list(weights.values()))
        facts = session.fetch(asked, None, timeout, Preparation.waiting("what the workers hold"))
        sharding = _sharding(session, weights, plan, facts)
        kinds = {
            name: target.kind(name, _dtype(name, [mine[number] for mine in facts]))
            for number, name in enumerate(weights)
        }

    def fill(paths: Sequence[str], slots: Mapping[str, Slot]) -> None:
        totals = [
            sum(share.nbytes for share in shares(slots, sharding, presharded, rank))
            for rank in range(session.num_workers)
        ]
        mapped = session.engine in ONE_MACHINE
        with Board("saving", totals, progress) as board:
            job = Job(tuple(paths), slots, sharding, presharded, mapped, board.number)
            saved = session.call_packed(_save_here, Pickled(job), dict(weights))
            run(session, saved, board, f"the save to {os.path.realpath(path)}", timeout)

    def checksums(paths: Sequence[str]) -> list[str]:
        return _checksums(session, list(paths), progress, timeout)

    with Preparation("saving", progress):
        return target.write(path, kinds, sharding, fill, checksums)


def _checksums(
    session: Session, paths: list[str], progress: bool, timeout: float | None
) -> list[str]:
    """Of each file; the workers share them."""
    count = session.num_workers
    totals = [sum(map(os.path.getsize, paths[rank::count])) for rank in range(count)]
    with Board("checksums", totals, progress) as board:
        sums = session.call_packed(_checksums_here, paths, board.number)
        run(session, sums, board, "the checksums", timeout)
        found = sums.debug_get_from_all(timeout)
    return [found[number % count][number // count] for number in range(len(paths))]


# -- which layouts ---------------------------------------------------------------------------


def _check_weights(weights: Any) -> None:
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            "weights= is a dict of DRefs by parameter name, such as what load gives; got a "
            f"{type(weights).__name__}"
        )
    for name, ref in weights.items():
        check_name(name)
        if not isinstance(ref, DRef):
            raise ArgumentError(f"weights[{name!r}] is to be a DRef, got a {type(ref).__name__}")


def _sharding(
    session: Session, weights: Mapping[str, DRef], plan: Any, facts: list[list[Fact]]
) -> Sharding:
    """The layout and the whole shape of each parameter."""
    loaded = weights.resolved if isinstance(weights, Weights) and plan is None else None
    workers = loaded.workers if loaded else workers_of(session)
    given = None if plan is None else Plan.of(plan)
    layouts: dict[str, Layout] = {}
    shapes: dict[str, Shape] = {}
    for number, (name, ref) in enumerate(weights.items()):
        Preparation.count("laying out tensor")
        local = _local_shapes(name, [mine[number] for mine in facts])
        known = None
        if given is not None:
            first = next(shape for shape in local if shape is not None)
            layouts[name] = given.layout(name, first)
        elif loaded is not None and name in loaded.layouts:
            layouts[name] = loaded.layouts[name]
            known = loaded.catalog.entries[name].shape
        else:
            layouts[name] = _placed(name, ref)
        shapes[name] = _shape(name, layouts[name], local, workers, known)
    return Sharding(workers, layouts, shapes)


def _placed(name: str, ref: DRef) -> Layout:
    if ref.placements is None:
        raise ArgumentError(
            f"how {name!r} is laid out over the workers is not known: give a plan=, such as "
            f'{{"{name}": "shard(0)"}}, or set the placements of its DRef'
        )
    try:
        return parse_layout(list(ref.placements))
    except ArgumentError as exc:
        raise ArgumentError(f"{name!r} can't be saved as it is laid out: {exc}") from None


def _shape(
    name: str,
    layout: Layout,
    local: list[Shape | None],
    workers: Workers,
    known: Shape | None,
) -> Shape:
    """Of the whole parameter: what was loaded, if the shards are still its."""
    try:
        if known is None:
            return whole_shape(layout, local, workers)
        check_shards(layout, known, local, workers)
        return known
    except Misfit as exc:
        of = f"{list(known)}, as they were loaded" if known is not None else "anything"
        raise ArgumentError(
            f"the shards of {name!r} are not {layout} of {of}: {exc}. Say with plan= what they are"
        ) from None


def _local_shapes(name: str, mine: list[Fact]) -> list[Shape | None]:
    for rank, fact in enumerate(mine):
        if isinstance(fact, str):
            raise ArgumentError(f"{name!r} is a {fact} on worker {rank}; save dense tensors")
    shapes = [fact[0] if isinstance(fact, tuple) else None for fact in mine]
    if any(shape is not None and len(shape) > MAX_DIMS for shape in shapes):
        raise ArgumentError(f"{name!r} has more than {MAX_DIMS} dimensions, which nobody can read")
    if all(shape is None for shape in shapes):
        raise ArgumentError(f"{name!r} is None on every worker")
    return shapes


def _dtype(name: str, mine: list[Fact]) -> torch.dtype:
    there = {fact[1]: rank for rank, fact in enumerate(mine) if isinstance(fact, tuple)}
    if len(there) > 1:
        some = ", ".join(f"{dtype} on worker {rank}" for dtype, rank in there.items())
        raise ArgumentError(f"{name!r} has several dtypes: {some}")
    return next(iter(there))


# -- on a worker -----------------------------------------------------------------------------


@worker_function("saving a checkpoint")
def _facts(tensors: list[Any]) -> list[Fact]:
    return [_fact(tensor) for tensor in tensors]


def _fact(value: Any) -> Fact:
    if value is None:
        return None
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        return tuple(value.shape), value.dtype
    return type(value).__name__


@worker_function("saving a checkpoint")
def _save_here(job: Job, tensors: dict[str, Any]) -> None:
    worker = current_worker()
    mine = shares(job.slots, job.sharding, job.presharded, worker.worker_id)
    with Sink(job.paths, job.mapped, Meter(job.board, worker)) as sink:
        for share in mine:
            tensor = tensors[share.name].detach()
            box = tuple(slice(a, a + n) for a, n in zip(share.at, share.shape, strict=True))
            sink.put(share.slot, tensor[box], share.start)


@worker_function("saving a checkpoint")
def _checksums_here(paths: list[str], board: int) -> list[str]:
    worker = current_worker()
    meter = Meter(board, worker)
    found = []
    for path in paths[worker.worker_id :: worker.num_workers]:
        try:
            found.append(md5_of(path))
            meter(os.path.getsize(path))
        except OSError as exc:
            raise CheckpointError(path, f"can't be read again: {exc.strerror}") from None
    return found


# -- who writes what -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """A box that a worker writes.

    Attributes
    ----------
    name
        The parameter.
    slot
        The tensor that it is a part of, in the files.
    start
        Where it begins in that tensor.
    at, shape
        The box in the worker's own tensor.
    """

    name: str
    slot: Slot
    start: Shape
    at: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.slot.record.stored.itemsize


def shares(
    slots: Mapping[str, Slot], sharding: Sharding, presharded: bool, rank: int
) -> list[Share]:
    """What a worker writes, in the order of the files.

    Parameters
    ----------
    slots
        By the name of the tensor in the files.
    """
    found = []
    workers = sharding.workers
    for number, (name, layout) in enumerate(sharding.layouts.items()):
        shape = sharding.shapes[name]
        Preparation.count("sharing out tensor")
        if presharded:
            slot = slots.get(shard_name(name, rank, workers.count))
            if slot is not None:
                mine = slot.record.shape
                zero = (0,) * len(mine)
                found.append(Share(name, slot, zero, zero, mine))
            continue
        for turn, (start, size, holders) in enumerate(_boxes(layout, shape, workers)):
            owner = (number + turn) % len(holders)  # in turn, for even work
            if holders[owner][0] == rank:
                found.append(Share(name, slots[name], start, holders[owner][1], size))
    return sorted(found, key=lambda share: (share.slot.file, share.slot.offset))


@lru_cache(maxsize=1024)  # layers of a model are alike
def _boxes(
    layout: Layout, shape: Shape, workers: Workers
) -> tuple[tuple[Shape, Shape, tuple[tuple[int, Shape], ...]], ...]:
    """The boxes of a parameter: begin, shape, and who holds it where in its tensor."""
    found: dict[tuple[Shape, Shape], list[tuple[int, Shape]]] = {}
    for rank in range(workers.count):
        made = cut(layout, shape, workers, rank)
        for box in made.boxes if made else ():
            found.setdefault((box.start, box.shape), []).append((rank, box.at))
    return tuple((*key, tuple(holders)) for key, holders in found.items())
