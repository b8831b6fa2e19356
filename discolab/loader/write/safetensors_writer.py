"""safetensors: how tensors are spread over files, a file's header, and the index. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..formats.dtypes import SAFETENSORS_NAMES
from .records import Arranged, NewFile, Record, Slot

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
