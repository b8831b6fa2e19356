"""Take a snapshot: each worker writes its own variables, the controller puts the files in place."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..layouts.layout import Layout
from ..loader.arrangement import Record, Slot
from ..loader.atomic import Replacement
from ..loader.catalog import Shape
from ..loader.errors import CheckpointError
from ..loader.files import BLOCK, Sink
from ..loader.formats import open_checkpoint, safetensors
from ..loader.formats.opening import SAVING
from ..loader.loading import run, workers_of
from ..loader.plan import Plan, parse_layout
from ..loader.progress import Board, Meter, Preparation
from ..loader.saving import ONE_MACHINE
from ..loader.weights import Weights
from ..runtime.arguments import Pickled, Shared
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import current_worker
from .collecting import Collected, Wanted, collect
from .listing import Snapshot
from .manifest import KEY, Manifest, Saved, TorchMesh, memory_name, pickle_name


@dataclass(frozen=True)
class Job(Shared):
    """What workers are asked to write; the same for all."""

    paths: tuple[str, ...]
    slots: Mapping[str, Slot]
    mapped: bool
    board: int


def snapshot(
    session: Session,
    path: str | os.PathLike[str],
    refs: Mapping[str, DRef | Mapping[str, DRef]] | None = None,
    *,
    names: Iterable[str] | None = None,
    plan: Any = None,
    weights: Mapping[str, Weights] | None = None,
    progress: bool = True,
    timeout: float | None = None,
) -> Snapshot:
    """Save the workers' variables in a folder, in place of the snapshot that it has.

    The old one stays whole until the new one is: a snapshot that fails, is stopped or killed
    changes nothing. Variables that can't be saved are left out, and named in what is returned.
    Each worker writes its own file; all of them need the folder under the same path.

    Parameters
    ----------
    path
        A folder, made if need be, that has no other checkpoint.
    refs
        DRefs whose values are saved too, by the names under which `restore` gives them back.
    names
        Variables to save; None: all that cells have made.
    plan
        Layouts of tensors by ``variable`` or ``variable.member``, see `loader.Plan`, for a restore
        on another number of workers. What no rule matches is not taken for replicated. DTensors,
        and DRefs with placements, say it themselves.
    weights
        What `load` gave, by the variable in which the workers have it: its layouts are known.
    progress, timeout
        As for `loader.save`.

    Returns
    -------
    Snapshot
        What was written, and what was left out.

    Raises
    ------
    CheckpointError
        If it can't be written; names the file.
    ArgumentError
        If the folder has a checkpoint that is no snapshot, or an argument does not fit.
    """
    refs = dict(refs or {})
    _check_arguments(refs, names)
    with (
        Preparation("saving a snapshot", progress),
        Replacement(path, "safetensors") as place,
    ):
        wanted = _wanted(session, refs, names, plan, weights or {})
        _refuse_other_checkpoints(place.folder)
        collected = session.call_packed(collect, Pickled(wanted), list(refs.values()))
        saved = session.fetch(
            session.call_packed(_saved, collected),
            None,
            timeout,
            Preparation.waiting("what the workers hold"),
        )
        manifest = _manifest(session, refs, wanted, saved)
        described = {KEY: manifest.to_json()}
        parts = [_records(rank, worker) for rank, worker in enumerate(manifest.workers)]
        arranged = safetensors.arrange(
            parts, tag=place.tag, metadata=described, single=place.single
        )
        paths = place.create(arranged)
        slots = {slot.record.name: slot for slot in arranged.slots}
        totals = [sum(record.nbytes for record in records) for records in parts]
        with Board("saving a snapshot", totals, progress) as board:
            job = Job(tuple(paths), slots, session.engine in ONE_MACHINE, board.number)
            written = session.call_packed(_save_here, Pickled(job), collected)
            del collected
            run(session, written, board, f"the snapshot to {place.folder}", timeout)
        place.commit(arranged, safetensors.index(arranged, described))
    return Snapshot(place.folder, manifest, sum(totals))


def _check_arguments(refs: Mapping[str, Any], names: Any) -> None:
    for name, ref in refs.items():
        parts = ref.values() if isinstance(ref, Mapping) else [ref]
        if not isinstance(name, str) or not all(isinstance(part, DRef) for part in parts):
            raise ArgumentError(
                f"refs= is a dict of DRefs by name, got a {type(ref).__name__} for {name!r}"
            )
    if isinstance(names, str):
        raise ArgumentError(f"names= is a list of names: [{names!r}]")


def _wanted(
    session: Session,
    refs: Mapping[str, DRef | Mapping[str, DRef]],
    names: Iterable[str] | None,
    plan: Any,
    weights: Mapping[str, Weights],
) -> Wanted:
    workers = workers_of(session)
    loaded = {**weights, **{n: ref for n, ref in refs.items() if isinstance(ref, Weights)}}
    known: dict[str, tuple[Layout, Shape | None]] = {}
    for variable, given in loaded.items():
        resolved = given.resolved
        if resolved.workers == workers:
            for name, layout in resolved.layouts.items():
                whole = resolved.catalog.entries[name].shape
                known[f"{variable}.{name}"] = (layout, whole)
    for name, ref in refs.items():
        layout_of_ref = _layout_of(ref)
        if layout_of_ref is not None:
            known[name] = (layout_of_ref, None)
    return Wanted(
        None if names is None else tuple(names),
        tuple(refs),
        None if plan is None else Plan.of(plan),
        known,
        workers.sizes,
        workers.groups,
    )


def _layout_of(ref: Any) -> Layout | None:
    """What a DRef says of its layout, if a plan could say it too."""
    if not isinstance(ref, DRef) or ref.placements is None:
        return None
    try:
        layout = parse_layout(list(ref.placements))
    except ArgumentError:
        return None
    return None if layout.partial else layout


def _refuse_other_checkpoints(folder: str) -> None:
    """A snapshot takes the place of a snapshot, and of nothing else."""
    there = [name for name in os.listdir(folder) if name != SAVING]
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in there):
        return
    try:
        found = KEY in open_checkpoint(folder).metadata
    except CheckpointError:  # damaged, or with files missing: its index may still say what it was
        found = _says_snapshot(os.path.join(folder, safetensors.INDEX))
    if not found:
        raise ArgumentError(
            f"{folder} has a checkpoint that is no snapshot: give a folder of its own"
        )


def _says_snapshot(index: str) -> bool:
    try:
        with open(index, "rb") as file:
            return KEY in json.load(file)["metadata"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _manifest(
    session: Session,
    refs: Mapping[str, Any],
    wanted: Wanted,
    saved: Sequence[tuple[Saved, tuple[TorchMesh, ...]]],
) -> Manifest:
    """One of all workers; meshes are numbered anew, the same for all."""
    meshes: list[TorchMesh] = []
    workers = []
    for worker, own in saved:
        meshes += [mesh for mesh in own if mesh not in meshes]
        bundles = tuple(
            replace(bundle, meshes=tuple(meshes.index(own[number]) for number in bundle.meshes))
            for bundle in worker.bundles
        )
        workers.append(replace(worker, bundles=bundles))
    mesh = session.current_mesh
    return Manifest(
        workers=tuple(workers),
        groups=session.num_groups,
        engine=session.engine,
        mesh=None if mesh is None else dict(zip(mesh.axes, mesh.sizes, strict=True)),
        meshes=tuple(meshes),
        refs={name: _text_of(wanted, name) for name in refs},
        date=time.time(),
        made_by={
            "discolab": sys.modules[__name__.partition(".")[0]].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def _text_of(wanted: Wanted, name: str) -> str | None:
    return str(wanted.known[name][0]) if name in wanted.known else None


def _records(rank: int, saved: Saved) -> list[Record]:
    """What a worker writes, in order."""
    records = []
    for number, memory in enumerate(saved.memories):
        Preparation.count("describing tensor")
        shard = memory.shard
        shape: Shape = (memory.nbytes,)
        dtype = torch.uint8
        if shard is not None:
            shape, dtype = shard.shape, getattr(torch, shard.dtype.removeprefix("torch."))
        records.append(Record(memory_name(rank, number), shape, dtype, dtype))
    for number, bundle in enumerate(saved.bundles):
        name = pickle_name(rank, number)
        records.append(Record(name, (bundle.nbytes,), torch.uint8, torch.uint8))
    return records


# -- on a worker -----------------------------------------------------------------------------


@worker_function("collecting variables for a snapshot")
def _saved(collected: Collected) -> tuple[Saved, tuple[TorchMesh, ...]]:
    return collected.saved, collected.meshes


@worker_function("saving a snapshot")
def _save_here(job: Job, collected: Collected) -> None:
    worker = current_worker()
    rank = worker.worker_id
    parts = [
        *((memory_name(rank, n), memory) for n, memory in enumerate(collected.memories)),
        *((pickle_name(rank, n), file.getbuffer()) for n, file in enumerate(collected.pickles)),
    ]
    try:
        with Sink(job.paths, job.mapped, Meter(job.board, worker)) as sink:
            for name, memory in parts:
                slot, bytes_of = job.slots[name], _bytes_of(memory)
                # the same bytes, whatever they are told to be in the index
                flat = replace(
                    slot, record=Record(name, (len(bytes_of),), torch.uint8, torch.uint8)
                )
                step = len(bytes_of) if bytes_of.is_cpu else BLOCK
                for start in range(0, len(bytes_of), max(1, step)):
                    sink.put(flat, bytes_of[start : start + step], (start,))
    except CheckpointError as exc:
        raise CheckpointError(exc.file, f"{exc.text}, on {platform.node()}") from None


def _bytes_of(memory: Any) -> torch.Tensor:
    """A memory as one row of bytes; no copy."""
    if isinstance(memory, torch.Tensor):  # contiguous
        return memory.reshape(-1).view(torch.uint8)
    if isinstance(memory, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    return torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else torch.empty(0).byte()
