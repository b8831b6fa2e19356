"""What stands in a snapshot, said in plain JSON: the manifest. Pure.

A snapshot is a safetensors checkpoint in a folder of its own, one data file for each worker, whose
metadata has this manifest. Every byte that a worker saved is an entry of the checkpoint: the
*memories* (storages of tensors, buffers of arrays) and one pickle for each *bundle*, which is a set
of variables that share objects with each other. So the loader writes it, puts it in place and
checks its index, and nothing is unpickled before all of that and the manifest are found right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..loader.catalog import Catalog
from ..loader.errors import CheckpointError

KEY = "discolab_snapshot"  # in the metadata of the checkpoint
VERSION = 1


def memory_name(rank: int, number: int) -> str:
    """The entry that holds a memory of a worker."""
    return f"worker {rank} memory {number}"


def pickle_name(rank: int, number: int) -> str:
    """The entry that holds the pickle of a bundle of a worker."""
    return f"worker {rank} pickle {number}"


@dataclass(frozen=True)
class Shard:
    """What is known of a memory that holds one worker's part of a tensor, and nothing else.

    Attributes
    ----------
    dtype
        Its name in torch.
    shape
        Of the part.
    layout
        As text, see `layouts.text`.
    whole
        The shape of the whole tensor; None: what the parts of all workers make up.
    sizes, groups
        The mesh of workers that `layout` is on, as of `layouts.Workers`.
    axes
        Of a DTensor, the names of the axes of its mesh; None: it is the session's workers.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    whole: tuple[int, ...] | None
    sizes: tuple[int, ...]
    groups: int = 1
    axes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes that tensors or an array lie in.

    Attributes
    ----------
    of_array
        Whether no tensor lies in it: the buffer of an array.
    on_device
        Whether it was on the worker's accelerator.
    """

    nbytes: int
    of_array: bool = False
    on_device: bool = False
    shard: Shard | None = None


@dataclass(frozen=True)
class Bundle:
    """Variables that share objects, in one pickle.

    Attributes
    ----------
    variables, refs
        Names of the worker's variables, and of DRefs; the pickle is a list of their values. Both
        are empty for the random states.
    nbytes, digest
        Of the pickle.
    memories
        Those that it uses, as it numbers them.
    meshes
        Torch's meshes that it uses, as numbers in `Manifest.meshes`.
    """

    variables: tuple[str, ...]
    refs: tuple[str, ...]
    nbytes: int
    digest: str
    memories: tuple[int, ...]
    meshes: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """For messages."""
        return (*self.variables, *(name for name in self.refs if name not in self.variables))


@dataclass(frozen=True)
class Saved:
    """What one worker has saved.

    Attributes
    ----------
    node
        The machine's name.
    left_out
        Why a variable was not saved, by its name.
    notes
        What of a variable was not, by its name.
    """

    node: str
    memories: tuple[Memory, ...]
    bundles: tuple[Bundle, ...]
    left_out: Mapping[str, str]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class TorchMesh:
    """A `DeviceMesh`: device type, ranks row by row, sizes, names of its axes."""

    device: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[str, ...] | None


@dataclass(frozen=True)
class Manifest:
    """All of a snapshot but its bytes.

    Attributes
    ----------
    workers
        What each worker has saved, by rank.
    mesh
        The session's: sizes by axis, in order.
    refs
        DRefs by name, with their layouts as text if known.
    date
        Seconds since 1970.
    made_by
        Versions: of discolab, torch, Python.
    """

    workers: tuple[Saved, ...]
    groups: int
    engine: str
    mesh: Mapping[str, int] | None
    meshes: tuple[TorchMesh, ...]
    refs: Mapping[str, str | None]
    date: float
    made_by: Mapping[str, str]

    @property
    def variables(self) -> list[str]:
        """The names of all variables that any worker has saved."""
        return sorted({n for w in self.workers for bundle in w.bundles for n in bundle.variables})

    def to_json(self) -> str:
        """As it stands in the metadata."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))


def manifest_of(catalog: Catalog) -> Manifest:
    """The manifest of a snapshot, checked against the index of its files.

    Raises
    ------
    CheckpointError
        If the checkpoint is no snapshot, one of another version, or not as its manifest says.
    """
    text = catalog.metadata.get(KEY)
    if text is None:
        raise CheckpointError(
            catalog.path, "is a checkpoint and no snapshot: load it with sess.load (%disco_load)"
        )
    try:
        given = json.loads(text)
        version = given["version"]
        if version != VERSION:
            raise CheckpointError(
                catalog.path,
                f"is a snapshot of version {version!r}, and this discolab reads {VERSION}: take "
                f"the discolab that made it ({given.get('made_by', {}).get('discolab', '?')})",
            )
        manifest: Manifest = _reader(Manifest)(given)
        _check(catalog, manifest)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise CheckpointError(
            catalog.path, f"its manifest is not one of a snapshot: {type(exc).__name__}: {exc}"
        ) from None
    return manifest


# -- JSON, not believed ------------------------------------------------------------------------


@lru_cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value of this type of what JSON gives."""
    origin, args = get_origin(kind), get_args(kind)
    make: Callable[..., Any] = {str: _text, int: _size}.get(kind, kind)
    if is_dataclass(kind):
        parts = {name: _reader(part) for name, part in get_type_hints(kind).items()}
        return lambda given: make(**{name: part(given[name]) for name, part in parts.items()})
    if isinstance(kind, UnionType):
        read = _reader(args[0])
        return lambda given: None if given is None else read(given)
    if origin is tuple:
        read = _reader(args[0])
        return lambda given: tuple(map(read, _list(given)))
    if origin is Mapping:
        read = _reader(args[1])
        return lambda given: {_text(name): read(value) for name, value in given.items()}
    return make


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a list is needed, got a {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a text is needed, got a {type(value).__name__}")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"a size is needed, got {value!r:.40}")
    return value


def _check(catalog: Catalog, manifest: Manifest) -> None:
    if not manifest.workers:
        raise ValueError("it is of no workers")
    for rank, saved in enumerate(manifest.workers):
        for number, memory in enumerate(saved.memories):
            entry = catalog.entries[memory_name(rank, number)]
            if entry.stored_bytes != memory.nbytes:
                raise ValueError(f"{entry.name!r} has {entry.stored_bytes} bytes")
            shard = memory.shard
            if shard is not None and (entry.shape, str(entry.dtype)) != (shard.shape, shard.dtype):
                raise ValueError(f"{entry.name!r} is {entry.dtype} of {entry.shape}")
        for number, bundle in enumerate(saved.bundles):
            entry = catalog.entries[pickle_name(rank, number)]
            if entry.stored_bytes != bundle.nbytes:
                raise ValueError(f"{entry.name!r} has {entry.stored_bytes} bytes")
            if any(at >= len(saved.memories) for at in bundle.memories):
                raise ValueError(f"{entry.name!r} uses memories that are not there")
            if any(at >= len(manifest.meshes) for at in bundle.meshes):
                raise ValueError(f"{entry.name!r} uses meshes that are not there")
