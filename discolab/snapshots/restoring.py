"""Restore a snapshot: each worker reads its variables, and has all of them or none.

The controller reads and checks the manifest, and decides what each worker gets. Workers read, and
unpickle into a value of their own; only when all of them have done so their variables change.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from ..layouts.layout import cut
from ..layouts.text import parse_layout
from ..loader.catalog import Catalog
from ..loader.errors import CheckpointError
from ..loader.loading import run
from ..loader.progress import Board, Meter, Preparation
from ..loader.read import Files, read_entry
from ..runtime import accelerators
from ..runtime.arguments import Pickled, Shared
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import Worker, current_worker
from .collecting import reason_of
from .listing import by_name, name_list, read_manifest
from .manifest import Bundle, Manifest, TorchMesh, memory_name, pickle_name
from .portable import RANDOM, CutAnew, portable
from .rebuilding import Piece, Unpickler


class Restored(dict[str, DRef]):
    """What a restore gave: the DRefs that were in the snapshot, by name.

    Attributes
    ----------
    variables
        Those of the workers that are there again, on one worker at least.
    left_out
        Why others are not, by name; also why a snapshot did not have them.
    """

    def __init__(
        self, refs: Mapping[str, DRef], variables: list[str], left_out: dict[str, str]
    ) -> None:
        super().__init__(refs)
        self.variables = variables
        self.left_out = left_out

    def __repr__(self) -> str:
        head = f"restored {name_list(self.variables)}"
        if self:
            head += f"; DRefs {name_list(self)}"
        return "\n".join([head, *(f"  left out  {n}: {why}" for n, why in self.left_out.items())])


@dataclass(frozen=True)
class Job(Shared):
    """What workers are asked to restore; the same for all.

    Attributes
    ----------
    bundles
        By number, of each worker that saved; of worker 0 alone, if others than those restore.
    cuts
        Memories of worker 0 that are cut anew.
    meshes
        Torch's meshes to make, by the manifest's numbers; None: not needed, or impossible.
    token
        Of this restore.
    """

    catalog: Catalog
    manifest: Manifest
    bundles: tuple[tuple[int, ...], ...]
    cuts: Mapping[int, CutAnew]
    meshes: tuple[TorchMesh | None, ...]
    token: str
    board: int

    def source(self, rank: int) -> int:
        """The worker whose variables a worker gets."""
        return rank if len(self.bundles) > 1 or rank == 0 else 0


def restore(
    session: Session,
    path: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    progress: bool = True,
    timeout: float | None = None,
) -> Restored:
    """Give workers the variables of a snapshot; those of other names stay.

    On as many workers as were saved each gets its own. On another number of workers each gets what
    all of them had alike, and its own part of tensors whose layout is known; the rest is left out,
    and named in what is returned. A snapshot is code, as any pickle: restore your own only.

    Parameters
    ----------
    path
        The folder.
    names
        Variables and DRefs to restore; None: all.
    progress, timeout
        As for `loader.load`.

    Returns
    -------
    Restored
        The DRefs of the snapshot by name.

    Raises
    ------
    CheckpointError
        If it is no snapshot, or not whole. No variable has changed then.
    ArgumentError
        If it has none of `names`.
    """
    with Preparation("restoring", progress):
        catalog, manifest = read_manifest(path)
        chosen = None if names is None else _chosen(manifest, names)
        same = session.num_workers == len(manifest.workers)
        left_out = by_name(saved.left_out for saved in manifest.workers)
        cuts: Mapping[int, CutAnew] = {}
        meshes: tuple[TorchMesh | None, ...] = manifest.meshes
        if same:
            if manifest.mesh and session.current_mesh is None:
                session.mesh(**manifest.mesh)
            bundles = [range(len(saved.bundles)) for saved in manifest.workers]
        else:
            plan = portable(session, catalog, manifest)
            left_out.update(plan.left_out)
            cuts, meshes, bundles = plan.cuts, plan.meshes, [plan.bundles]  # type: ignore[list-item]
        numbers = tuple(
            tuple(n for n in given if _is_chosen(manifest.workers[rank].bundles[n], chosen))
            for rank, given in enumerate(bundles)
        )
        used = {
            mesh
            for rank, given in enumerate(numbers)
            for n in given
            for mesh in manifest.workers[rank].bundles[n].meshes
        }
        needed = tuple(mesh if n in used else None for n, mesh in enumerate(meshes))
        totals = [
            sum(_nbytes(manifest, rank if same else 0, n) for n in numbers[rank if same else 0])
            for rank in range(session.num_workers)
        ]
    with Board("restoring", totals, progress) as board:
        token = uuid.uuid4().hex
        job = Job(catalog, manifest, numbers, cuts, needed, token, board.number)
        restored = session.call_packed(_restore_here, Pickled(job))
        try:
            run(session, restored, board, f"the restore of {catalog.path}", timeout)
        except BaseException:
            del restored  # or a traceback that somebody keeps would keep the values
            raise
    with Preparation("restoring", progress):
        bound = session.call_packed(_bind, restored, chosen)
        outcomes = session.fetch(bound, None, timeout, Preparation.waiting("naming the values"))
    left_out.update(by_name(outcome.left_out for outcome in outcomes))
    if chosen is not None:
        left_out = {name: why for name, why in left_out.items() if name in chosen}
    everywhere = set.intersection(*(set(outcome.refs) for outcome in outcomes))
    refs = {}
    for name, layout in manifest.refs.items():
        if name in everywhere and (chosen is None or name in chosen):
            refs[name] = ref = session.call_packed(_ref_of, restored, name)
            ref.name = name
            if layout is not None:
                ref.placements = _placements(session, layout)
    variables = sorted({name for outcome in outcomes for name in outcome.variables})
    return Restored(refs, variables, left_out)


def _chosen(manifest: Manifest, names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise ArgumentError(f"names= is a list of names: [{names!r}]")
    chosen, there = list(names), [*manifest.variables, *manifest.refs]
    missing = [name for name in chosen if name not in there]
    if missing:
        raise ArgumentError(
            f"the snapshot has no {', '.join(map(repr, missing))}; it has {name_list(there)}"
        )
    return chosen


def _is_chosen(bundle: Bundle, chosen: Sequence[str] | None) -> bool:
    return chosen is None or any(name in chosen for name in bundle.names)


def _nbytes(manifest: Manifest, rank: int, number: int) -> int:
    saved = manifest.workers[rank]
    bundle = saved.bundles[number]
    return bundle.nbytes + sum(saved.memories[at].nbytes for at in bundle.memories)


def _placements(session: Session, text: str) -> tuple[Any, ...] | None:
    mesh = session.current_mesh
    return parse_layout(text).placements(1 if mesh is None else len(mesh.sizes))


# -- on a worker -----------------------------------------------------------------------------


@dataclass
class _Values:
    """What a worker has read, by name; it is not bound yet."""

    variables: dict[str, Any] = field(default_factory=dict)
    refs: dict[str, Any] = field(default_factory=dict)
    random: Any = None
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Outcome:
    """The names of these; plain, for the controller."""

    variables: tuple[str, ...]
    refs: tuple[str, ...]
    left_out: Mapping[str, str]


@worker_function("restoring a snapshot")
def _restore_here(job: Job) -> _Values:
    worker = current_worker()
    source = job.source(worker.worker_id)
    saved = job.manifest.workers[source]
    meshes = [_mesh_maker(worker, mesh) for mesh in job.meshes]
    values = _Values()
    builtins = worker.namespace.get("__builtins__")
    with Files(job.catalog.files, True, Meter(job.board, worker), fresh=True) as files:
        memories = _Memories(job, files, worker, source)
        try:
            for number in job.bundles[source]:
                bundle = saved.bundles[number]
                pieces = [memories.get(at) for at in bundle.memories]
                try:
                    opened = Unpickler(
                        io.BytesIO(_pickle(job.catalog, files, source, number, bundle)),
                        worker,
                        pieces,
                        [
                            piece.array.numpy()
                            for piece, at in zip(pieces, bundle.memories, strict=True)
                            if saved.memories[at].of_array
                        ],
                        [meshes[at] for at in bundle.meshes],
                        f"{job.token} {worker.worker_id}",
                    ).load()
                except CheckpointError:
                    raise
                except Exception as exc:  # whatever a user's class raises
                    names = bundle.names or (RANDOM,)
                    values.left_out.update(dict.fromkeys(names, _why_not(exc)))
                    continue
                _sort_in(values, bundle, opened)
            files.finish()
        finally:
            # opening functions of cells puts Python's own there, and cells look for it
            if builtins is None:
                worker.namespace.pop("__builtins__", None)
            else:
                worker.namespace["__builtins__"] = builtins
    return values


def _why_not(exc: Exception) -> str:
    if isinstance(exc, ImportError | AttributeError):
        return f"its code is not here: {type(exc).__name__}: {exc}"
    return f"can't be made again: {reason_of(exc)}"


def _sort_in(values: _Values, bundle: Bundle, opened: list[Any]) -> None:
    if not bundle.names:
        values.random = opened
        return
    count = len(bundle.variables)
    values.variables.update(zip(bundle.variables, opened[:count], strict=True))
    values.refs.update(zip(bundle.refs, opened[count:], strict=True))


class _Memories:
    """The memories of one worker, each read once."""

    def __init__(self, job: Job, files: Files, worker: Worker, source: int) -> None:
        self._job, self._files, self._worker, self._source = job, files, worker, source
        self._read: dict[int, Piece] = {}

    def get(self, number: int) -> Piece:
        if number not in self._read:
            self._read[number] = self._piece(number)
        return self._read[number]

    def _piece(self, number: int) -> Piece:
        job, worker = self._job, self._worker
        memory = job.manifest.workers[self._source].memories[number]
        device = worker.device if memory.on_device else torch.device("cpu")
        anew = job.cuts.get(number)
        if anew is None:
            entry = job.catalog.entries[memory_name(self._source, number)]
            tensor = read_entry(self._files, entry, device=device)
        else:
            part = cut(anew.layout, anew.entry.shape, anew.workers, worker.worker_id)
            assert part is not None, "a stage that holds none of it has no pickle like this"
            tensor = read_entry(self._files, anew.entry, part, device=device)
        if memory.shard is None:
            return Piece(tensor)
        return Piece(tensor, tuple(tensor.shape), tensor.dtype, anew is not None)


def _pickle(catalog: Catalog, files: Files, source: int, number: int, bundle: Bundle) -> bytes:
    """The pickle of a bundle, if it is the one of the manifest."""
    entry = catalog.entries[pickle_name(source, number)]
    data = read_entry(files, entry).numpy().tobytes()
    if hashlib.sha256(data).hexdigest() != bundle.digest:
        raise CheckpointError(
            catalog.file_of(entry), "has changed since the snapshot was taken", entry.name
        )
    return data


def _mesh_maker(worker: Worker, mesh: TorchMesh | None) -> Any:
    """Make one of torch's meshes, on all workers in the same order; gives what gives it."""
    if mesh is None:
        return lambda: None
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.tensor(mesh.ranks, dtype=torch.int).reshape(mesh.sizes)
    device = "cpu" if mesh.device == "cpu" else worker.device.type
    made = DeviceMesh(device, grid, mesh_dim_names=mesh.axes)
    return lambda: made


@worker_function("naming what was restored")
def _bind(values: _Values, chosen: list[str] | None) -> _Outcome:
    worker = current_worker()
    taken = {n: v for n, v in values.variables.items() if chosen is None or n in chosen}
    worker.namespace.update(taken)
    if values.random is not None:
        of_torch, of_python, of_numpy, of_gpu = values.random
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        if of_gpu is not None and accelerators.on_accelerator(worker.device):
            accelerators.module_of(worker.device).set_rng_state(of_gpu, worker.device)
    return _Outcome(tuple(taken), tuple(values.refs), values.left_out)


@worker_function("naming what was restored")
def _ref_of(values: _Values, name: str) -> Any:
    return values.refs[name]
