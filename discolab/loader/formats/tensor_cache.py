"""TVM's and MLC's tensor-cache: a JSON index beside files of packed records.

Records are in C order, little endian and packed without alignment, so a float32 may begin at an odd
byte. A float32 whose format is ``f32-to-bf16`` is stored as bfloat16. Read, and arranged to be
written: how tensors are packed into files, and the index.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..arrangement import Arranged, NewFile, Record, Slot
from ..catalog import Catalog
from ..errors import CheckpointError
from .checks import (
    TENSOR_CACHE,
    TENSOR_CACHE_NAMES,
    Builder,
    dtype_of,
    file_size,
    inside,
    member,
    name_ok,
    parse_json,
    read_index,
    resolved,
    shape_of,
    short,
    whole,
)

INDEX_NAMES: Final = ("tensor-cache.json", "ndarray-cache.json")
FORMATS: Final = ("raw", "f32-to-bf16")


def read(path: str | os.PathLike[str]) -> Catalog:
    """The catalog of a tensor-cache, from its index file.

    Raises
    ------
    CheckpointError
        If the index or a data file is not as it should be.
    """
    return _read(Path(path), read_index(Path(path)), missing_ok=False)


def read_text(path: str | os.PathLike[str], text: str, *, missing_ok: bool = False) -> Catalog:
    """The same from the index's text, for one who has it from elsewhere.

    Parameters
    ----------
    path
        Where the index would be: data files are in its folder.
    missing_ok
        Let data files pass that are not there, as on a node that will not read them.

    Raises
    ------
    CheckpointError
        As for `read`.
    """
    return _read(Path(path), text.encode("utf-8", "surrogatepass"), missing_ok)


def _read(path: Path, data: bytes, missing_ok: bool) -> Catalog:
    index = Path(os.path.abspath(path))
    folder = resolved(index.parent)
    root = parse_json(data, index)
    made = Builder(path, "tensor-cache", index)
    seen: set[Path] = set()
    for about in member(root, "records", list, index):
        data_path = member(about, "dataPath", str, index)
        first = _first_name(about)
        form = member(about, "format", str, index)
        if form != "raw-shard":
            raise CheckpointError(
                index, f"{short(data_path)} has format {short(form)}; expected 'raw-shard'", first
            )
        file = inside(folder, data_path, index, first)
        if file in seen:
            raise CheckpointError(index, f"data path {short(data_path)} is there twice", first)
        seen.add(file)
        nbytes = whole(about.get("nbytes"), f"nbytes of {short(data_path)}", index, first)
        if not (missing_ok and not os.path.lexists(file)):
            found = file_size(file, first)
            if found != nbytes:
                raise CheckpointError(file, f"has {found} bytes; {index.name} says {nbytes}", first)
        number = made.file(file, nbytes, _md5(about, index, data_path))
        for record in member(about, "records", list, index):
            _add(made, record, number)
    metadata = root.get("metadata")
    if not isinstance(metadata, dict | None):
        raise CheckpointError(index, f"metadata is {short(metadata)}; expected an object")
    return made.done(metadata)


def _add(made: Builder, record: Any, file: int) -> None:
    index = made.index
    name = name_ok(member(record, "name", str, index), index)
    dtype = dtype_of(TENSOR_CACHE, record.get("dtype"), index, name)
    form = record.get("format")
    if form not in FORMATS:
        raise CheckpointError(
            index, f"format {short(form)} is not known; expected one of {', '.join(FORMATS)}", name
        )
    shape = shape_of(record.get("shape"), dtype, index, name)
    # only a float32 is encoded; what else is marked so is stored as it is
    encoded = form == "f32-to-bf16" and dtype == torch.float32
    stored = torch.bfloat16 if encoded else dtype
    nbytes = whole(record.get("nbytes"), "nbytes", index, name)
    expected = math.prod(shape) * stored.itemsize
    if nbytes != expected:
        raise CheckpointError(
            index,
            f"nbytes is {nbytes}; shape {list(shape)} of {str(stored)[6:]} has {expected}",
            name,
        )
    offset = whole(record.get("byteOffset"), "byteOffset", index, name)
    made.whole(name, shape, dtype, file, offset, stored)


def _md5(about: dict[str, Any], index: Path, data_path: str) -> str | None:
    found = about.get("md5sum")
    if found is None:
        return None
    if not isinstance(found, str) or not re.fullmatch("[0-9a-fA-F]{32}", found):
        raise CheckpointError(
            index, f"md5sum of {short(data_path)} is {short(found)}; expected 32 hexadecimal digits"
        )
    return found.lower()


def _first_name(about: dict[str, Any]) -> str | None:
    """The first parameter that would be in a file, for messages about the file."""
    records = about.get("records")
    first = records[0] if isinstance(records, list) and records else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


# -- to be written ---------------------------------------------------------------------------------


INDEX = "tensor-cache.json"
CAP = 32 << 20  # bytes of a file; TVM's default


def arrange(
    parts: Iterable[Sequence[Record]], cap: int = CAP, tag: str = "", in_order: bool = False
) -> Arranged:
    """Pack tensors into files, without alignment, as TVM does.

    A tensor of half the cap or more that does not fit goes into a file of its own. TVM writes that
    one before what is pending, so that the order of the index is not that of the tensors.

    Parameters
    ----------
    parts
        Tensors that share files: one part, or one for each worker.
    cap
        Bytes; a file has fewer, unless one tensor has more.
    tag
        In the files' names.
    in_order
        Keep the order, which TVM's ``ShardLoaderLoadPresharded`` counts on.
    """
    packing = _Packing(cap)
    for records in parts:
        for record in records:
            packing.add(record, in_order)
        packing.flush()
    files = tuple(
        NewFile(f"params_shard_{number}{tag}.bin", sum(record.nbytes for record in found))
        for number, found in enumerate(packing.files)
    )
    slots = []
    for number, found in enumerate(packing.files):
        offset = 0
        for record in found:
            slots.append(Slot(record, number, offset))
            offset += record.nbytes
    return Arranged(files, tuple(slots))


class _Packing:
    def __init__(self, cap: int) -> None:
        self.files: list[list[Record]] = []
        self._cap = cap
        self._pending: list[Record] = []
        self._bytes = 0

    def add(self, record: Record, in_order: bool) -> None:
        if self._bytes + record.nbytes >= self._cap:
            if record.nbytes * 2 >= self._cap:
                if in_order:
                    self.flush()
                self.files.append([record])
                return
            self.flush()
        self._pending.append(record)
        self._bytes += record.nbytes

    def flush(self) -> None:
        if self._pending:
            self.files.append(self._pending)
            self._pending, self._bytes = [], 0


def index(arranged: Arranged, md5: Sequence[str], metadata: Mapping[str, Any]) -> bytes:
    """The index file's content, given the checksum of each file."""
    records = []
    for file, slots, checksum in zip(arranged.files, arranged.by_file(), md5, strict=True):
        inside = [
            {
                "name": slot.record.name,
                "shape": list(slot.record.shape),
                "dtype": TENSOR_CACHE_NAMES[slot.record.dtype],
                "format": "raw" if slot.record.stored == slot.record.dtype else "f32-to-bf16",
                "nbytes": slot.record.nbytes,
                "byteOffset": slot.offset,
            }
            for slot in slots
        ]
        records.append(
            {
                "dataPath": file.name,
                "format": "raw-shard",
                "nbytes": file.size,
                "records": inside,
                "md5sum": checksum,
            }
        )
    return json.dumps({"metadata": dict(metadata), "records": records}, indent=4).encode()
