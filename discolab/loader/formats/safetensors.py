"""safetensors: one file that begins with a JSON header, or several with an index beside them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..catalog import Catalog
from ..errors import CheckpointError
from .builder import Builder
from .checks import member, name_ok, parse_json, shape_of, short, whole
from .dtypes import SAFETENSORS, dtype_of
from .paths import MAX_INDEX_BYTES, inside, open_file, read_at, read_index, resolved

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
_PART: Final = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Stored:
    """A tensor as a header has it; `offset` in bytes from the file's begin."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What one file says of itself; `size` of the whole file in bytes."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    size: int


def read(path: str | os.PathLike[str]) -> Catalog:
    """The catalog of a safetensors file, or of the index of several.

    Raises
    ------
    CheckpointError
        If the index, or a file or its header, is not as it should be.
    """
    given = Path(path)
    return _read_index(given) if given.name.endswith(".json") else _read_file(given)


def read_header(path: Path, parameter: str | None = None) -> Header:
    """The header of one file, checked against the file's size.

    Raises
    ------
    CheckpointError
        If it is not a header, or the tensors are not the rest of the file without gaps.
    """
    with open_file(path, parameter) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(
                path, f"has {size} bytes; a safetensors file has at least 8", parameter
            )
        length = int.from_bytes(read_at(file, 0, 8, path), "little")
        if length > min(size - 8, MAX_INDEX_BYTES):
            raise CheckpointError(
                path,
                f"says that its header has {length} bytes; expected at most "
                f"{min(size - 8, MAX_INDEX_BYTES)}: it is truncated, or no safetensors file",
                parameter,
            )
        root = parse_json(read_at(file, 8, length, path), path)
    metadata = root.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise CheckpointError(
            path, f"__metadata__ is {short(metadata)}; expected an object of strings"
        )
    if _PART in (metadata or {}) and path.name.startswith("shard-"):
        # without an index nothing says how many there are: one could be missing unseen
        raise CheckpointError(
            path,
            "is one process's part of a DCP checkpoint; expected a whole one: save it with "
            "HuggingFaceStorageWriter(enable_consolidation=True)",
        )
    begin = 8 + length
    tensors = {
        name_ok(name, path): _stored(about, path, name, begin) for name, about in root.items()
    }
    _check_gapless(tensors, path, begin, size)
    return Header(tensors, metadata or {}, size)


def _stored(about: Any, path: Path, name: str, begin: int) -> Stored:
    dtype = dtype_of(SAFETENSORS, member(about, "dtype", str, path, name), path, name)
    shape = shape_of(member(about, "shape", list, path, name), dtype, path, name)
    offsets = member(about, "data_offsets", list, path, name)
    if len(offsets) != 2:
        raise CheckpointError(
            path, f"data_offsets is {short(offsets)}; expected its begin and its end", name
        )
    first, last = (whole(offset, "an offset in data_offsets", path, name) for offset in offsets)
    expected = math.prod(shape) * dtype.itemsize
    if last - first != expected:
        raise CheckpointError(
            path,
            f"data_offsets {offsets} hold {last - first} bytes; shape {list(shape)} of "
            f"{str(dtype)[6:]} has {expected}",
            name,
        )
    return Stored(shape, dtype, begin + first, expected)


def _check_gapless(tensors: Mapping[str, Stored], path: Path, begin: int, size: int) -> None:
    end, before = begin, "the header"
    for name, found in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if found.offset != end:
            how = "overlap" if found.offset < end else "leave a gap"
            raise CheckpointError(
                path,
                f"begins at byte {found.offset - begin} of the data, and {before} ends at "
                f"{end - begin}: they {how}; expected one right after the other",
                name,
            )
        end, before = found.offset + found.nbytes, repr(name)
        if end > size:
            raise CheckpointError(
                path, f"has {size} bytes; expected {end} for what its header says", name
            )
    if end != size:
        raise CheckpointError(
            path, f"has {size} bytes; expected {end} for what its header says: is it another's end?"
        )


def _read_file(path: Path) -> Catalog:
    file = resolved(path)
    header = read_header(file)
    made = Builder(path, "safetensors", file)
    number = made.file(file, header.size)
    for name, found in header.tensors.items():
        made.whole(name, found.shape, found.dtype, number, found.offset)
    return made.done(header.metadata)


def _read_index(path: Path) -> Catalog:
    index = Path(os.path.abspath(path))
    folder = resolved(index.parent)
    root = parse_json(read_index(index), index)
    made = Builder(path, "safetensors", index)
    where: dict[str, Path] = {}
    headers: dict[Path, Header] = {}
    for name, data_path in member(root, "weight_map", dict, index).items():
        file = where[name_ok(name, index)] = inside(folder, data_path, index, name)
        if file not in headers:
            headers[file] = read_header(file, name)
            made.file(file, headers[file].size)
        if name not in headers[file].tensors:
            raise CheckpointError(
                file, f"does not have it; expected it here, as {index.name} says", name
            )
    metadata: dict[str, Any] = {}
    for file, header in headers.items():
        metadata.update(header.metadata)
        for name in header.tensors:
            # a name that the index leaves out is loaded nevertheless: it is nowhere else
            if where.setdefault(name, file) != file and name not in root["weight_map"]:
                raise CheckpointError(
                    file, f"is in {where[name].name} too, and {index.name} says nothing", name
                )
    for name, file in where.items():
        found = headers[file].tensors[name]
        made.whole(name, found.shape, found.dtype, made.file(file), found.offset)
    about = root.get("metadata")
    if not isinstance(about, dict | None):
        raise CheckpointError(index, f"metadata is {short(about)}; expected an object")
    return made.done(metadata | (about or {}))
