"""The tables of the DRef view: one row per worker, and one row per child of a container.

Pure. A column in which no worker has anything to say is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..formats import format_bytes, format_number, format_shape
from ..parts import Badge, Cell, Column, Heat, Role, Row, Table, Text
from ..summary import head_words, summarize
from .compare import odd_ranks
from .notes import BAD, role_of

_NOTHING = Text("")
_RIGHT = {"bytes", "mean", "std", "min", "max", "nonfinite", "parameters"}
_COLUMNS = (
    "state",
    "type",
    "value",
    "dtype",
    "device",
    "shape",
    "bytes",
    "mean",
    "std",
    "min",
    "max",
    "nonfinite",
    "digest",
    "values",
    "picture",
)


def rank_table(
    records: Mapping[int, Mapping[str, Any]],
    classes: Mapping[int, str] | None,
    agreeing: Sequence[Sequence[Sequence[int]]],
    heats: Mapping[int, Heat] | None = None,
) -> Table:
    """Draw one row per worker.

    Parameters
    ----------
    records : mapping of rank to record
        Failed and busy workers included.
    classes : mapping of rank to letter, or None
        Which contents are equal, if known.
    agreeing : sequence of sequences of sets of ranks
        Which workers must agree, for each logical tensor; if that is not known, two or more of a
        class make the rest odd.
    heats : mapping of rank to Heat, optional
        Thumbnails that are not seen elsewhere.
    """
    odd = _odd(classes or {}, agreeing)
    rows = {}
    for rank in sorted(records):
        cells = _cells(records[rank])
        if classes is not None and rank in classes:
            cells["digest"] = Badge(classes[rank], rank in odd)
        if heats and rank in heats:
            cells["picture"] = heats[rank]
        rows[rank] = cells
    tensors = [record for record in records.values() if record.get("kind") == "tensor"]
    idle = {"dtype"} if len({record.get("dtype") for record in tensors}) < 2 else set()
    if len({cells.get("type", _NOTHING) for cells in rows.values()} - {_NOTHING}) < 2:
        idle.add("type")
    used = [
        title
        for title in _COLUMNS
        if title not in idle
        and any(cells.get(title, _NOTHING) != _NOTHING for cells in rows.values())
    ]
    return Table(
        tuple(_column(title) for title in used),
        tuple(
            Row(tuple(cells.get(title, _NOTHING) for title in used), (rank,))
            for rank, cells in rows.items()
        ),
    )


def _odd(classes: Mapping[int, str], agreeing: Sequence[Sequence[Sequence[int]]]) -> set[int]:
    if agreeing:
        return {r for sets in agreeing for ranks in sets for r in odd_ranks(classes, ranks)}
    kinds = len(set(classes.values()))
    return set(odd_ranks(classes, sorted(classes))) if kinds < len(classes) else set()


def _column(title: str) -> Column:
    return Column(title, "right" if title in _RIGHT else "left")


def _cells(record: Mapping[str, Any]) -> dict[str, Cell]:
    kind = record.get("kind")
    if kind in BAD:
        return {"state": Text(BAD[str(kind)], role_of(str(kind)))}
    if kind != "tensor":
        return {"type": Text(str(record.get("type", ""))), "value": Text(summarize(record))}
    found = record.get("stats")
    stats: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    cells: dict[str, Cell] = {
        name: Text(format_number(stats.get(name))) for name in ("mean", "std", "min", "max")
    }
    role: Role = "warning" if stats.get("nonfinite") else "plain"
    return cells | {
        "dtype": Text(str(record.get("dtype", "?"))),
        "device": Text(str(record.get("device", ""))),
        "shape": Text(format_shape(record.get("shape"))),
        "bytes": Text(format_bytes(record.get("nbytes"))),
        "nonfinite": Text(format_number(stats.get("nonfinite")), role),
        "values": Text(head_words(record)),
    }
