"""What the records of modules say of each parameter: its contents by rank, and who must agree.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

_Records: TypeAlias = Mapping[int, Mapping[str, Any]]


def compared_parameters(
    records: _Records,
) -> list[tuple[str, dict[int, object], list[list[int]] | None]]:
    """Name, contents by rank and sets that must agree, of each parameter and buffer."""
    found: list[tuple[str, dict[int, object], list[list[int]] | None]] = []
    layouts = {rank: record.get("layouts") or [] for rank, record in records.items()}
    for name, held in by_name(records).items():
        digests: dict[int, object] = {rank: row.get("digest") for rank, row in held.items()}
        found.append((name, digests, must_agree(held, layouts)))
    return found


def by_name(records: _Records) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The parameters and buffers of all workers by name, those too that are told in a line."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        for row in rows_of(record):
            found.setdefault(str(row.get("name")), {})[rank] = row
        for name, words, digest in record.get("brief") or []:
            dtype, _, shape = str(words).partition("[")
            line = {"name": name, "dtype": dtype, "size": f"[{shape}", "digest": digest}
            found.setdefault(str(name), {})[rank] = line
    return found


def must_agree(held: _Records, layouts: Mapping[int, Sequence[Any]]) -> list[list[int]] | None:
    """The workers that must hold the same, by the meshes of all that hold it; None if unknown."""
    sets: list[list[int]] = []
    for rank, row in held.items():
        told = replicas(sharding(row, layouts[rank]))
        if told is None:
            return None
        sets += [ranks for ranks in told if ranks not in sets]
    return sets


def sharding(row: Mapping[str, Any], layouts: Sequence[Any]) -> Mapping[str, Any] | None:
    """How a parameter is laid out, if it is a DTensor."""
    number = row.get("layout")
    known = isinstance(number, int) and 0 <= number < len(layouts)
    return layouts[number] if known and isinstance(layouts[number], Mapping) else None  # type: ignore[index]


def replicas(layout: Mapping[str, Any] | None) -> list[list[int]] | None:
    """The sets of workers that must hold the same shard; None if nothing is known of that."""
    if layout is None:
        return None
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, rank in enumerate(layout["ranks"]):
        place, rest = [], number
        for size, (kind, _) in zip(
            reversed(layout["mesh"]), reversed(layout["placements"]), strict=True
        ):
            rest, index = divmod(rest, size)
            place.append(index if kind != "Replicate" else 0)
        sets.setdefault(tuple(place), []).append(rank)
    return list(sets.values())


def layout_words(layout: Mapping[str, Any] | None) -> str:
    """The placements in torch's words."""
    if layout is None:
        return ""
    return ", ".join(f"{kind}({detail})" for kind, detail in layout["placements"])


def rows_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameters that are told in full."""
    rows = record.get("params")
    return rows if isinstance(rows, list) else []


def not_none(records: _Records) -> dict[int, Mapping[str, Any]]:
    """The records of workers that hold more than None."""
    return {rank: record for rank, record in records.items() if record.get("kind") != "none"}
