"""The tensor-cache of TVM and MLC: how tensors are packed into files, and its index. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..formats.dtypes import TENSOR_CACHE_NAMES
from .records import Arranged, NewFile, Record, Slot

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
