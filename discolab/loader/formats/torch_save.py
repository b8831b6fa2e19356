"""Files of torch.save, read in place; what isn't a tensor in them is left out.

They are zip archives (`read_archive`), of which is found where each record's bytes are, without
reading them.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..catalog import Catalog, Piece, Shape, c_strides
from ..errors import CheckpointError
from .checks import (
    MAX_DEPTH,
    PLAIN,
    Builder,
    inside,
    member,
    name_ok,
    open_file,
    parse_json,
    read_at,
    read_index,
    resolved,
    said,
    shape_of,
    short,
    whole,
)
from .pickles import Opaque, TensorRef, load

_HEADER: Final = struct.Struct("<4s22xHH")
FIX: Final = "load it with torch.load and save it again with torch.save"


@dataclass(frozen=True)
class Record:
    """Bytes of a file."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Archive:
    """What a file of torch.save has in it.

    Attributes
    ----------
    content
        What was saved, with a `TensorRef` for each tensor.
    storages
        By key.
    """

    content: Any
    storages: Mapping[str, Record]


def read_archive(file: io.FileIO, path: Path, begin: int, end: int) -> Archive:
    """The archive that lies in bytes `begin` to `end` of a file.

    Raises
    ------
    CheckpointError
        If there is none, or one that torch.save has not written so that it can be read in place.
    """
    try:
        with zipfile.ZipFile(_Window(file, path, begin, end)) as found:
            infos = found.infolist()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # zipfile has no one error for what it can't read
        raise CheckpointError(
            path, f"is truncated or no file of torch.save: {said(error)}"
        ) from None
    records: dict[str, Record] = {}
    for info in infos:
        # all are in one folder, whose name is free
        name = info.filename.partition("/")[2]
        if name in records:
            raise CheckpointError(path, f"has the record {short(name)} twice")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(
                path, f"its record {short(name)} is compressed or encrypted; {FIX}"
            )
        records[name] = _record(file, path, begin, end, info)
    if "constants.pkl" in records:
        raise CheckpointError(
            path, "is a TorchScript program; expected the state_dict of one, saved by torch.save"
        )
    if "data.pkl" not in records:
        raise CheckpointError(path, "has no data.pkl: it is a zip that torch.save has not written")
    order = records.get("byteorder")
    if order is not None and read_at(file, order.offset, min(order.nbytes, 8), path) != b"little":
        raise CheckpointError(
            path, f"is not in little-endian order; {FIX} on a machine that is (x86, ARM)"
        )
    pickled = records["data.pkl"]
    content = load(read_at(file, pickled.offset, pickled.nbytes, path), path)
    prefix = "data/"
    return Archive(
        content,
        {name[len(prefix) :]: found for name, found in records.items() if name.startswith(prefix)},
    )


def locate(
    made: Builder,
    path: Path,
    file: int,
    archive: Archive,
    ref: TensorRef,
    name: str,
    claimed: set[tuple[int, int]],
) -> tuple[Shape, Piece]:
    """The shape of a tensor and where it is, as a piece that starts at the origin.

    Parameters
    ----------
    claimed
        Storages that were claimed before, as (file, offset): tensors may share one.

    Raises
    ------
    CheckpointError
        If it is not what its storage holds.
    """
    if ref.dtype not in PLAIN:
        raise CheckpointError(path, f"dtype {ref.dtype} can't be read as plain bytes", name)
    shape = shape_of(ref.shape, ref.dtype, path, name)
    record = archive.storages.get(ref.storage.key)
    if record is None:
        raise CheckpointError(path, f"has no record {short('data/' + ref.storage.key)}", name)
    unit = 1 if ref.storage.dtype is None else ref.storage.dtype.itemsize
    nbytes = whole(ref.storage.numel, "its storage's size", path, name) * unit
    if nbytes != record.nbytes:
        raise CheckpointError(
            path, f"its storage has {record.nbytes} bytes; expected {nbytes}", name
        )
    if not isinstance(ref.strides, list | tuple) or len(ref.strides) != len(shape):
        raise CheckpointError(
            path, f"strides {short(ref.strides)} do not fit shape {list(shape)}", name
        )
    strides = tuple(whole(step, "a stride", path, name) for step in ref.strides)
    offset = whole(ref.offset, "its offset in the storage", path, name)
    numel = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    size = nbytes // ref.dtype.itemsize
    if numel and last >= size:
        raise CheckpointError(
            path, f"reaches element {last} of a storage of {size} {str(ref.dtype)[6:]}", name
        )
    if numel > size:
        raise CheckpointError(
            path,
            f"shape {list(shape)} with strides {list(strides)} has {numel} elements, and its "
            f"storage {size}: it was expanded; save it with .contiguous()",
            name,
        )
    if (file, record.offset) not in claimed:
        claimed.add((file, record.offset))
        made.claim(file, record.offset, record.nbytes, name)
    begin = record.offset + (offset * ref.dtype.itemsize if numel else 0)
    plain = not numel or all(
        n == 1 or a == b for n, a, b in zip(shape, strides, c_strides(shape), strict=True)
    )
    return shape, Piece(file, begin, (0,) * len(shape), shape, None if plain else strides)


def _record(file: io.FileIO, path: Path, begin: int, end: int, info: zipfile.ZipInfo) -> Record:
    """Where a record's bytes are: right after its local header, which has a length of its own."""
    header = begin + info.header_offset
    if not begin <= header <= end - _HEADER.size:
        raise CheckpointError(path, f"a record's header at {header} is outside of the archive")
    magic, name, extra = _HEADER.unpack(read_at(file, header, _HEADER.size, path))
    offset = header + _HEADER.size + name + extra
    if magic != b"PK\x03\x04" or info.file_size != info.compress_size:
        raise CheckpointError(path, f"the record {short(info.filename)} is damaged at {header}")
    if info.file_size < 0 or offset + info.file_size > end:
        raise CheckpointError(
            path,
            f"ends at {end}; expected {info.file_size} bytes of {short(info.filename)} at {offset}",
        )
    return Record(offset, info.file_size)


class _Window(io.RawIOBase):
    """A part of a file as a file of its own, which refuses to read very much at once."""

    def __init__(self, file: io.FileIO, path: Path, begin: int, end: int) -> None:
        self._file, self._path, self._begin, self._end = file, path, begin, end
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end - self._begin}
        at = base[whence] + offset
        if at < 0:
            raise OSError("before the begin")
        self._at = at
        return at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._end - self._begin - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = read_at(self._file, self._begin + self._at, count, self._path) if count else b""
        self._at += count
        return data


# -- files -----------------------------------------------------------------------------------------


SUFFIXES: Final = (".pt", ".pth", ".bin")
INDEX_SUFFIX: Final = ".bin.index.json"

# Together: a pickle may hold one dict many times over.
MAX_NAMES: Final = 64 * 2**20
MAX_LEAVES: Final = 2**20

_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def read(path: str | os.PathLike[str]) -> Catalog:
    """The catalog of a file of torch.save, or of the index of several (``*.bin.index.json``).

    Dicts and lists in it are flattened, with a dot between the keys. Other objects are left out,
    and counted in the metadata as ``"non_tensors"``. Their code is not run.

    Raises
    ------
    CheckpointError
        If it is no such file, one of before torch 1.6, or has tensors that are not plain ones.
    """
    given = Path(path)
    if given.name.endswith(".json"):
        return _read_index(given)
    file_path = resolved(given)
    made = Builder(given, "torch", file_path)
    return made.done({"non_tensors": _add_file(made, file_path)})


def indexed_by(root: dict[str, Any]) -> bool:
    """Whether an index with a ``weight_map`` is one of files of torch.save."""
    where = root.get("weight_map")
    files = where.values() if isinstance(where, dict) else ()
    return any(isinstance(name, str) and name.endswith(SUFFIXES) for name in files)


def _read_index(path: Path) -> Catalog:
    index = Path(os.path.abspath(path))
    folder = resolved(index.parent)
    where = member(parse_json(read_index(index), index), "weight_map", dict, index)
    made = Builder(path, "torch", index)
    left_out = 0
    seen: set[Path] = set()
    for name, data_path in where.items():
        file = inside(folder, data_path, index, name_ok(name, index))
        if file not in seen:
            seen.add(file)
            left_out += _add_file(made, file, name)
    for name in where:
        if name not in made.entries:
            raise CheckpointError(index, "none of its files has it", name)
    return made.done({"non_tensors": left_out})


def _add_file(made: Builder, path: Path, parameter: str | None = None) -> int:
    """Add the tensors of one file; returns how many other things it has."""
    with open_file(path, parameter) as file:
        size = os.fstat(file.fileno()).st_size
        begin = read_at(file, 0, min(size, 16), path)
        if not begin.startswith(b"PK"):
            raise CheckpointError(path, _what(begin), parameter)
        archive = read_archive(file, path, 0, size)
    return _add_all(made, path, made.file(path, size), archive)


def _add_all(made: Builder, path: Path, file: int, archive: Archive) -> int:
    claimed: set[tuple[int, int]] = set()
    left_out = 0
    for name, leaf in _leaves(archive.content, path):
        if isinstance(leaf, TensorRef):
            shape, piece = locate(made, path, file, archive, leaf, name, claimed)
            made.entry(name, shape, leaf.dtype, [piece])
        elif isinstance(leaf, Opaque) and "._rebuild_" in leaf.name:
            raise CheckpointError(
                path,
                f"is no plain dense tensor ({leaf!r}); save it as one: .to_dense(), "
                ".dequantize(), .resolve_conj(), .full_tensor()",
                name,
            )
        else:
            left_out += 1
    if not made.entries and isinstance(archive.content, Opaque):
        raise CheckpointError(
            path,
            f"holds a whole object of {archive.content!r}, whose code is not run; save "
            "its state_dict() instead",
        )
    return left_out


def _leaves(root: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Everything that isn't a dict or a list, with its name; in order, and never without end."""
    todo: list[tuple[str, Any, int]] = [("", root, 0)]
    letters = count = 0
    while todo:
        name, value, depth = todo.pop()
        items = _items(value)
        if items is None:
            yield name or "tensor", value
            continue
        if depth >= MAX_DEPTH:
            raise CheckpointError(path, f"is nested deeper than {MAX_DEPTH} levels")
        count += len(items)
        if count > MAX_LEAVES:
            raise CheckpointError(path, f"holds more than {MAX_LEAVES} things")
        inner = []
        for key, item in items:
            full = f"{name}.{key}" if name else str(key)
            letters += len(full)
            if letters > MAX_NAMES:
                raise CheckpointError(path, f"its names have more than {MAX_NAMES} letters")
            inner.append((full, item, depth + 1))
        todo += reversed(inner)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Opaque) and value.items:
        value = value.items
    if isinstance(value, dict):
        return [(key if isinstance(key, str) else short(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and value:
        return list(enumerate(value))
    return None


def _what(begin: bytes) -> str:
    if begin.startswith(_LEGACY[:13]):
        return f"was written by torch.save of before 1.6, or in its old format; {FIX}"
    if not begin:
        return "is empty; expected a file of torch.save"
    return f"begins with {begin[:8]!r}; expected the zip that torch.save writes"
