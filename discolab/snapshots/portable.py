"""What of a snapshot can be restored on another number of workers, and what it is there.

A bundle can if all workers have saved it, as the same pickle, and each of its memories is either a
part of a tensor whose layout is known, which is then cut anew, or the same on all of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..layouts.join import Misfit, whole_shape
from ..layouts.layout import Layout, Workers, check
from ..layouts.text import parse_layout
from ..loader.catalog import Catalog, Entry
from ..loader.errors import CheckpointError
from ..loader.loading import workers_of
from ..loader.presharded import Sharding, joined
from ..loader.read import BLOCK
from ..runtime.arguments import Pickled
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import current_worker
from .manifest import Bundle, Manifest, Memory, Shard, TorchMesh, memory_name

RANDOM = "(random states)"
_UNKNOWN = "nothing says how it is laid out"


@dataclass(frozen=True)
class CutAnew:
    """A tensor of which each worker of the new session gets another part."""

    entry: Entry
    layout: Layout
    workers: Workers


@dataclass(frozen=True)
class Portable:
    """What is the same for any worker, by the numbers of worker 0.

    Attributes
    ----------
    bundles
        Those that can be restored.
    cuts
        Memories that are cut anew.
    meshes
        What each of the manifest's meshes becomes; None: nothing.
    left_out
        Why a variable can't be restored, by name.
    """

    bundles: tuple[int, ...]
    cuts: Mapping[int, CutAnew]
    meshes: tuple[TorchMesh | None, ...]
    left_out: Mapping[str, str]


class _NotPortable(Exception):
    """Why a bundle can't be restored."""


def portable(session: Session, catalog: Catalog, manifest: Manifest) -> Portable:
    """Find out; workers of the session compare what they would have to share."""
    meshes = tuple(_new_mesh(session, manifest, mesh) for mesh in manifest.meshes)
    first = manifest.workers[0]
    cuts: dict[int, CutAnew] = {}
    left_out: dict[str, str] = {}
    to_compare: dict[int, list[int]] = {}  # by bundle, numbers of memories at its workers
    pairs: list[list[str]] = []
    good: list[int] = []
    for number, bundle in enumerate(first.bundles):
        try:
            if any(meshes[mesh] is None for mesh in bundle.meshes):
                raise _NotPortable(_mesh_text(manifest.meshes[bundle.meshes[0]], session))
            bundles = _counterparts(manifest, bundle)
            found, same = _memories(session, catalog, manifest, bundles)
        except _NotPortable as exc:
            left_out.update(dict.fromkeys(bundle.names or (RANDOM,), str(exc)))
            continue
        good.append(number)
        cuts.update(found)
        to_compare[number] = list(range(len(pairs), len(pairs) + len(same)))
        pairs += same
    equal = _compare(session, catalog, pairs)
    for number in tuple(good):
        if not all(equal[at] for at in to_compare[number]):
            good.remove(number)
            names = first.bundles[number].names or (RANDOM,)
            text = f"its values differ between workers, and {_UNKNOWN}"
            left_out.update(dict.fromkeys(names, text))
    here = {name for number in good for name in first.bundles[number].names}
    for rank, saved in enumerate(manifest.workers):
        for name in (name for bundle in saved.bundles for name in bundle.names):
            if name not in here:
                left_out.setdefault(name, f"worker {rank} has it and worker 0 has not")
    return Portable(tuple(good), cuts, meshes, left_out)


def _counterparts(manifest: Manifest, bundle: Bundle) -> list[Bundle]:
    """The same bundle of each worker."""
    found = []
    for rank, saved in enumerate(manifest.workers):
        same = [
            b for b in saved.bundles if (b.variables, b.refs) == (bundle.variables, bundle.refs)
        ]
        if not same:
            raise _NotPortable(
                f"worker {rank} has not the same variables that share objects with it"
                if len(bundle.names) > 1
                else f"worker 0 has it and worker {rank} has not"
            )
        other = same[0]
        if (other.digest, other.meshes) != (bundle.digest, bundle.meshes):
            raise _NotPortable(f"workers 0 and {rank} have different values, and {_UNKNOWN}")
        if len(other.memories) != len(bundle.memories):
            raise _NotPortable(f"workers 0 and {rank} have different tensors, and {_UNKNOWN}")
        found.append(other)
    return found


def _memories(
    session: Session, catalog: Catalog, manifest: Manifest, bundles: Sequence[Bundle]
) -> tuple[dict[int, CutAnew], list[list[str]]]:
    """What is cut anew; and the entries that must have the same bytes."""
    cuts: dict[int, CutAnew] = {}
    same: list[list[str]] = []
    for numbers in zip(*(bundle.memories for bundle in bundles), strict=True):
        memories = [
            saved.memories[number] for saved, number in zip(manifest.workers, numbers, strict=True)
        ]
        entries = [memory_name(rank, number) for rank, number in enumerate(numbers)]
        shards = [memory.shard for memory in memories]
        if all(shard is not None for shard in shards):
            cuts[numbers[0]] = _cut_anew(session, catalog, entries, [s for s in shards if s])
        elif len({_kind(memory) for memory in memories}) > 1:
            raise _NotPortable(f"its tensors have different sizes on workers, and {_UNKNOWN}")
        elif memories[0].nbytes:
            same.append(entries)
    return cuts, same


def _kind(memory: Memory) -> tuple[int, bool]:
    return memory.nbytes, memory.of_array


def _cut_anew(
    session: Session, catalog: Catalog, entries: Sequence[str], shards: Sequence[Shard]
) -> CutAnew:
    first = shards[0]
    for shard in shards:
        if _laid(shard) != _laid(first):
            raise _NotPortable("workers say different things of how it is laid out")
    try:
        layout, old = parse_layout(first.layout), Workers(first.sizes, first.groups)
        whole = first.whole
        if whole is None:
            whole = whole_shape(layout, [shard.shape for shard in shards], old)
        new = _new_workers(session, first)
        check(layout, whole, new)
        sharding = Sharding(old, {entries[0]: layout}, {entries[0]: whole})
        entry = joined(catalog, entries[0], dict(enumerate(entries)), sharding)
    except (ArgumentError, Misfit, CheckpointError) as exc:
        text = exc.text if isinstance(exc, CheckpointError) else str(exc)
        raise _NotPortable(f"{first.layout} does not fit: {text}") from None
    return CutAnew(entry, layout, new)


def _laid(shard: Shard) -> tuple[object, ...]:
    return (*(shard.dtype, shard.layout, shard.whole, shard.sizes, shard.groups, shard.axes),)


def _new_workers(session: Session, shard: Shard) -> Workers:
    """The mesh of the new session that takes the place of that of a shard."""
    if shard.axes is None:
        return workers_of(session)
    sizes = _new_sizes(session, shard.sizes, shard.axes)
    if sizes is None:
        raise ArgumentError(f"the session needs a mesh of the axes {', '.join(shard.axes) or '?'}")
    return Workers(sizes)


def _new_sizes(
    session: Session, sizes: Sequence[int], axes: Sequence[str] | None
) -> tuple[int, ...] | None:
    mesh = session.current_mesh
    if mesh is not None and axes and tuple(axes) == mesh.axes:
        return mesh.sizes
    return (session.num_workers,) if len(sizes) == 1 else None


def _new_mesh(session: Session, manifest: Manifest, mesh: TorchMesh) -> TorchMesh | None:
    sizes = _new_sizes(session, mesh.sizes, mesh.axes)
    if sizes is None or mesh.ranks != tuple(range(len(manifest.workers))):
        return None
    return TorchMesh(mesh.device, tuple(range(session.num_workers)), sizes, mesh.axes)


def _mesh_text(mesh: TorchMesh, session: Session) -> str:
    axes = mesh.axes or ("?",) * len(mesh.sizes)
    words = ", ".join(f"{axis}={size}" for axis, size in zip(axes, mesh.sizes, strict=True))
    return (
        f"it is on a mesh {words} of workers {', '.join(map(str, mesh.ranks))}: give the session "
        f"of {session.num_workers} a mesh of the same axes first"
    )


# -- are these the same? -----------------------------------------------------------------------


def _compare(session: Session, catalog: Catalog, pairs: list[list[str]]) -> list[bool]:
    """Whether each list of entries has the same bytes; workers share the reading."""
    if not pairs:
        return []
    answers = session.call_packed(_same_bytes, Pickled((catalog, pairs))).debug_get_from_all()
    return [answers[at % len(answers)][at // len(answers)] for at in range(len(pairs))]


@worker_function("comparing what workers saved")
def _same_bytes(job: tuple[Catalog, list[list[str]]]) -> list[bool]:
    catalog, pairs = job
    worker = current_worker()
    return [
        len({_digest(catalog, catalog.entries[name]) for name in names}) == 1
        for names in pairs[worker.worker_id :: worker.num_workers]
    ]


def _digest(catalog: Catalog, entry: Entry) -> str:
    found = hashlib.sha256()
    for piece in entry.pieces:
        path, left = catalog.files[piece.file].path, entry.stored_bytes
        with open(path, "rb") as file:
            offset = piece.offset
            while left:
                block = os.pread(file.fileno(), min(left, BLOCK), offset)
                if not block:
                    raise CheckpointError(path, f"ends at byte {offset:,}, too early", entry.name)
                found.update(block)
                left, offset = left - len(block), offset + len(block)
    return found.hexdigest()
