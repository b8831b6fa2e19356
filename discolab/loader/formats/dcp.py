"""Folders of torch.distributed.checkpoint: `.metadata` beside files of chunks.

`.metadata` is a pickle, read as data here. Each chunk is a whole file of torch.save within a larger
one; only its index is read.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from ..catalog import Catalog, Piece
from ..errors import CheckpointError
from .checks import (
    PLAIN,
    Builder,
    inside,
    name_ok,
    open_file,
    read_index,
    resolved,
    shape_of,
    short,
    whole,
)
from .pickles import Opaque, TensorRef, load
from .torch_save import locate, read_archive

METADATA: Final = ".metadata"

Shape = tuple[int, ...]


def read(path: str | os.PathLike[str]) -> Catalog:
    """The catalog of a DCP folder, from its `.metadata` file.

    What isn't a tensor is left out, and counted in the metadata as ``"non_tensors"``.

    Raises
    ------
    CheckpointError
        If `.metadata` or a data file is not as it should be, or chunks are compressed.
    """
    index = Path(os.path.abspath(path))
    data = read_index(index)
    root = _fields(load(data, index), "Metadata", index)
    tensors = _dict(root, "state_dict_metadata", index)
    stored = dict(_stored(_dict(root, "storage_data", index), index))
    made = Builder(Path(path), "dcp", index)
    left_out = count = 0
    with ExitStack() as stack:
        chunks = _Chunks(made, resolved(index.parent), stack)
        for name, about in tensors.items():
            name_ok(name, index)
            if getattr(about, "name", "").endswith(".BytesStorageMetadata"):
                left_out += 1
                continue
            fields = _fields(about, "TensorStorageMetadata", index, name)
            count += _add(made, chunks, name, fields, stored)
            if count > len(data):  # a pickle may hold one list many times over
                raise CheckpointError(index, f"has {count} chunks or more in {len(data)} bytes")
    return made.done({"non_tensors": left_out})


class _Chunks:
    """Finds the tensor in each chunk; holds the data files open while it does."""

    def __init__(self, made: Builder, folder: Path, stack: ExitStack) -> None:
        self._made, self._folder, self._stack = made, folder, stack
        self._files: dict[Path, tuple[io.FileIO, int]] = {}
        self._claimed: set[tuple[int, int]] = set()

    def find(self, info: Any, name: str, dtype: torch.dtype, shape: Shape) -> Piece:
        """The piece that a `_StorageInfo` tells of, as one that starts at the origin."""
        index = self._made.index
        fields = _fields(info, "_StorageInfo", index, name)
        if fields.get("transform_descriptors"):
            raise CheckpointError(
                index,
                f"its bytes were transformed by {short(fields['transform_descriptors'])}; expected "
                "plain ones: save again without _extensions",
                name,
            )
        path = inside(self._folder, fields.get("relative_path"), index, name)
        file, size = self._open(path, name)
        begin = whole(fields.get("offset"), "offset", index, name)
        end = begin + whole(fields.get("length"), "length", index, name)
        if end > size:
            raise CheckpointError(
                path, f"has {size} bytes; expected a chunk from {begin} to {end}", name
            )
        try:
            archive = read_archive(file, path, begin, end)
        except CheckpointError as error:
            text = f"the chunk at {begin}: {error.text}"
            raise CheckpointError(path, text, name) from None
        ref = archive.content
        if not isinstance(ref, TensorRef):
            raise CheckpointError(
                path, f"the chunk at {begin} holds {short(ref)}; expected a tensor", name
            )
        number = self._made.file(path, size)
        found, piece = locate(self._made, path, number, archive, ref, name, self._claimed)
        if found != shape or ref.dtype != dtype:
            raise CheckpointError(
                path,
                f"the chunk at {begin} is {str(ref.dtype)[6:]} {list(found)}; expected "
                f"{str(dtype)[6:]} {list(shape)}",
                name,
            )
        return piece

    def _open(self, path: Path, name: str) -> tuple[io.FileIO, int]:
        if path not in self._files:
            file = self._stack.enter_context(open_file(path, name))
            self._files[path] = file, os.fstat(file.fileno()).st_size
        return self._files[path]


def _add(
    made: Builder,
    chunks: _Chunks,
    name: str,
    about: dict[str, Any],
    stored: dict[tuple[str, Shape], Any],
) -> int:
    """Add a tensor; returns how many chunks it has."""
    index = made.index
    properties = about.get("properties")
    state = properties.state if isinstance(properties, Opaque) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or dtype not in PLAIN:
        raise CheckpointError(index, f"dtype {short(dtype)} is not known", name)
    shape = shape_of(about.get("size"), dtype, index, name)
    found = about.get("chunks")
    if not isinstance(found, list):
        raise CheckpointError(index, f"chunks is {short(found)}; expected a list", name)
    pieces = []
    for chunk in found:
        fields = _fields(chunk, "ChunkStorageMetadata", index, name)
        sizes = shape_of(fields.get("sizes"), dtype, index, name, "a chunk's sizes")
        start = shape_of(fields.get("offsets"), dtype, index, name, "a chunk's offsets")
        if math.prod(shape) and not math.prod(sizes):  # of a process that holds nothing of it
            continue
        info = stored.get((name, start))
        if info is None:
            raise CheckpointError(
                index, f"has no place for the chunk that starts at {list(start)}", name
            )
        pieces.append(replace(chunks.find(info, name, dtype, sizes), start=start))
    made.entry(name, shape, dtype, pieces)
    return len(found)


def _stored(data: dict[Any, Any], index: Path) -> Iterator[tuple[tuple[str, Shape], Any]]:
    """The storage of each tensor's chunk, by name and start."""
    seen = set()
    for key, info in data.items():
        fields = _fields(key, "MetadataIndex", index)
        name = name_ok(fields.get("fqn"), index)
        start = fields.get("offset")
        if start is None:  # not a tensor
            continue
        place = name, shape_of(start, torch.uint8, index, name, "a chunk's offset")
        if place in seen:
            raise CheckpointError(index, f"has two places for the chunk at {place[1]}", name)
        seen.add(place)
        yield place, info


def _fields(value: Any, kind: str, index: Path, name: str | None = None) -> dict[str, Any]:
    """The fields of a pickled dataclass of torch."""
    if not isinstance(value, Opaque) or value.name.rpartition(".")[2] != kind:
        raise CheckpointError(index, f"holds {short(value)}; expected a {kind}", name)
    if not isinstance(value.state, dict):
        raise CheckpointError(
            index, f"a {kind} has {short(value.state)}; expected its fields", name
        )
    return value.state


def _dict(fields: dict[str, Any], key: str, index: Path) -> dict[Any, Any]:
    found = fields.get(key)
    if not isinstance(found, dict):
        raise CheckpointError(index, f"{key} is {short(found)}; expected a dict")
    return found
