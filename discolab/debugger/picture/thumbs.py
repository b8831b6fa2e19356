"""Small thumbnails of tensors, for cells of a table: those of a row are on one scale. Pure."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from ...views.facts.thumbnails import Scale, shared_scale
from ...views.parts import Heat

_SIDE = 12  # cells at most along each side
_NOT_FINITE = 255

Key = TypeVar("Key", bound=Hashable)


def small_heats(records: Mapping[Key, Mapping[str, Any]]) -> dict[Key, Heat]:
    """Thumbnails of those records that have one; none where all values are alike."""
    scale = shared_scale(records.values())
    if scale is None or scale.flat:
        return {}
    return {
        key: _small(record["thumbnail"], scale)
        for key, record in records.items()
        if isinstance(record.get("thumbnail"), Mapping)
    }


def _small(thumb: Mapping[str, Any], scale: Scale) -> Heat:
    cells, rows, columns = b64decode(thumb["cells"]), thumb["rows"], thumb["columns"]
    levels = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    levels = _means(levels, _parts(rows), _parts(columns))
    low, high = (scale.level(thumb[end] or 0.0) for end in ("low", "high"))
    step = (high - low) / 254
    table = bytes([*(round(low + level * step) for level in range(255)), _NOT_FINITE])
    kind = "values" if thumb["of"] == "values" and max(rows, columns) <= _SIDE else "means"
    alt = f"{len(levels)} x {len(levels[0])} {kind}"
    return Heat(tuple(line.translate(table) for line in levels), alt, scale.diverging)


def _parts(size: int) -> list[tuple[int, int]]:
    """Cut a side in at most as many pieces as are drawn."""
    count = min(size, _SIDE)
    return [(place * size // count, (place + 1) * size // count) for place in range(count)]


def _means(
    levels: list[bytes], rows: list[tuple[int, int]], columns: list[tuple[int, int]]
) -> list[bytes]:
    """The mean of each block; one that has a cell that is not finite shows that."""
    if len(rows) == len(levels) and len(columns) == len(levels[0]):
        return levels
    found = []
    for top, bottom in rows:
        blocks = [b"".join(line[a:b] for line in levels[top:bottom]) for a, b in columns]
        found.append(bytes(map(_mean, blocks)))
    return found


def _mean(block: bytes) -> int:
    return _NOT_FINITE if _NOT_FINITE in block else sum(block) // len(block)
