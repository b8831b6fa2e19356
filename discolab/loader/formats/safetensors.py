"""safetensors: one file that begins with a JSON header, or several with an index beside them.

Read, and arranged to be written: how tensors are spread over files, a file's header, the index.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..arrangement import Arranged, NewFile, Record, Slot
from ..catalog import Catalog
from ..errors import CheckpointError
from ..progress import Preparation
from .checks import (
    MAX_INDEX_BYTES,
    SAFETENSORS,
    SAFETENSORS_NAMES,
    Builder,
    dtype_of,
    inside,
    member,
    name_ok,
    open_file,
    parse_json,
    read_at,
    read_index,
    resolved,
    shape_of,
    short,
    whole,
)

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
    Preparation.count("reading the index, tensor")
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


# -- to be written ---------------------------------------------------------------------------------


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CAP = 5_000_000_000  # bytes of a file; what Hugging Face's libraries take too
_ALIGN = 8


def arrange(
    parts: Iterable[Sequence[Record]],
    cap: int = CAP,
    tag: str = "",
    metadata: Mapping[str, Any] | None = None,
    single: bool = True,
) -> Arranged:
    """Spread tensors over files, in their order.

    Parameters
    ----------
    parts
        Tensors that share files: one part, or one for each worker.
    cap
        Bytes of tensors in a file, unless one tensor has more.
    tag
        In the files' names.
    metadata
        For the header, if all is in one file; several have it in their index.
    single
        Whether one file is called ``model.safetensors``; it needs no index then.
    """
    groups: list[list[Record]] = []
    for records in parts:
        pending: list[Record] = []
        nbytes = 0
        for record in records:
            if pending and nbytes + record.nbytes > cap:
                groups.append(pending)
                pending, nbytes = [], 0
            pending.append(record)
            nbytes += record.nbytes
        if pending:
            groups.append(pending)
    groups = groups or [[]]
    count = len(groups)
    files, places = [], {}
    header = (metadata or {}) if count == 1 else {}
    for number, group in enumerate(groups):
        head, offsets, size = _head(group, header)
        name = f"model-{number + 1:05}-of-{count:05}{tag}.safetensors"
        files.append(NewFile(SINGLE if single and count == 1 else name, size, head))
        for record in group:
            places[record.name] = Slot(record, number, offsets[record.name])
    return Arranged(tuple(files), tuple(places[r.name] for group in groups for r in group))


def _head(
    records: Sequence[Record], metadata: Mapping[str, Any]
) -> tuple[bytes, dict[str, int], int]:
    """The header with its length, where each tensor begins in the file, and the file's size."""
    # the widest elements first: each tensor then begins at a multiple of its element's size
    ordered = sorted(records, key=lambda record: -record.stored.itemsize)
    described = {"format": "pt", **{key: text(value) for key, value in metadata.items()}}
    entries: dict[str, Any] = {"__metadata__": described}
    begin = 0
    for record in ordered:
        Preparation.count("finding room for tensor")
        end = begin + record.nbytes
        entries[record.name] = {
            "dtype": SAFETENSORS_NAMES[record.dtype],
            "shape": list(record.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _ALIGN)
    head = len(body).to_bytes(8, "little") + body
    offsets = {
        record.name: len(head) + entries[record.name]["data_offsets"][0] for record in ordered
    }
    return head, offsets, len(head) + begin


def index(arranged: Arranged, metadata: Mapping[str, Any]) -> bytes:
    """The index file's content."""
    total = sum(slot.record.nbytes for slot in arranged.slots)
    where = {slot.record.name: arranged.files[slot.file].name for slot in arranged.slots}
    described = {key: text(value) for key, value in metadata.items() if key != "total_size"}
    found = {"metadata": {"total_size": total, **described}, "weight_map": where}
    return json.dumps(found, indent=2).encode()


def text(value: Any) -> str:
    """A value of the metadata as the header takes it: strings only."""
    return value if isinstance(value, str) else json.dumps(value)
