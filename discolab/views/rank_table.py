"""The tables of the DRef view: one row per worker, and one row per child of a container.

Pure. A column in which no worker has anything to say is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .compare import odd_ranks
from .formats import format_bytes, format_number, format_shape
from .layout import Plan
from .notes import BAD, role_of
from .parts import Column, Details, Part, Role, Row, Table, Text
from .summary import head_words, summarize

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
)


def rank_table(
    records: Mapping[int, Mapping[str, Any]],
    classes: Mapping[int, str] | None,
    plans: Sequence[Plan],
) -> Table:
    """Draw one row per worker.

    Parameters
    ----------
    records : mapping of rank to record
        Failed and busy workers included.
    classes : mapping of rank to letter, or None
        Which contents are equal, if known.
    plans : sequence of Plan
        Tell which workers must agree; without plans, two or more of a class make the rest odd.
    """
    odd = _odd(classes or {}, plans)
    rows = {}
    for rank in sorted(records):
        cells = _cells(records[rank])
        letter = (classes or {}).get(rank, "")
        cells["digest"] = Text(letter, "warning" if rank in odd else "plain")
        rows[rank] = cells
    tensors = [record for record in records.values() if record.get("kind") == "tensor"]
    idle = {"dtype"} if len({record.get("dtype") for record in tensors}) < 2 else set()
    if len({cells.get("type", Text("")).text for cells in rows.values()} - {""}) < 2:
        idle.add("type")
    used = [
        title
        for title in _COLUMNS
        if title not in idle and any(cells.get(title, Text("")).text for cells in rows.values())
    ]
    return Table(
        tuple(_column(title) for title in used),
        tuple(
            Row(tuple(cells.get(title, Text("")) for title in used), (rank,))
            for rank, cells in rows.items()
        ),
    )


def _odd(classes: Mapping[int, str], plans: Sequence[Plan]) -> set[int]:
    if plans:
        return {r for plan in plans for ranks in plan.replicas for r in odd_ranks(classes, ranks)}
    kinds = len(set(classes.values()))
    return set(odd_ranks(classes, sorted(classes))) if kinds < len(classes) else set()


def _column(title: str) -> Column:
    return Column(title, "right" if title in _RIGHT else "left")


def _cells(record: Mapping[str, Any]) -> dict[str, Text]:
    kind = record.get("kind")
    if kind in BAD:
        return {"state": Text(BAD[str(kind)], role_of(str(kind)))}
    if kind != "tensor":
        return {"type": Text(str(record.get("type", ""))), "value": Text(summarize(record))}
    found = record.get("stats")
    stats: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    cells = {name: Text(format_number(stats.get(name))) for name in ("mean", "std", "min", "max")}
    role: Role = "warning" if stats.get("nonfinite") else "plain"
    return cells | {
        "dtype": Text(str(record.get("dtype", "?"))),
        "device": Text(str(record.get("device", ""))),
        "shape": Text(format_shape(record.get("shape"))),
        "bytes": Text(format_bytes(record.get("nbytes"))),
        "nonfinite": Text(format_number(stats.get("nonfinite")), role),
        "values": Text(head_words(record)),
    }


def children_parts(record: Mapping[str, Any]) -> list[Part]:
    """List the children of a container or the parameters of a module, in a collapsed section.

    Nothing for containers of plain values: the title line has said it all.
    """
    if record.get("kind") == "module":
        return _section(record, "parameters", _parameter_table(record.get("params")))
    if not _holds_tensor(record):
        return []
    rows = tuple(
        Row((Text(str(item["key"])), *_child_cells(item["value"]))) for item in record["items"]
    )
    columns = (Column("key"), Column("value"), Column("device"), Column("bytes", "right"))
    return _section(record, "items", Table(columns, rows))


def _holds_tensor(record: Mapping[str, Any]) -> bool:
    items = record.get("items")
    return isinstance(items, list) and any(
        item["value"].get("kind") in ("tensor", "module") or _holds_tensor(item["value"])
        for item in items
    )


def _child_cells(record: Mapping[str, Any]) -> tuple[Text, Text, Text]:
    return (
        Text(summarize(record)),
        Text(str(record.get("device", ""))),
        Text(format_bytes(record.get("nbytes"))),
    )


def _parameter_table(params: Any) -> Table:
    rows = tuple(
        Row(
            (
                Text(str(row.get("name"))),
                Text(format_shape(row.get("shape"))),
                Text(str(row.get("dtype", ""))),
            )
        )
        for row in (params if isinstance(params, list) else [])
    )
    return Table((Column("name"), Column("shape"), Column("dtype")), rows)


def _section(record: Mapping[str, Any], title: str, table: Table) -> list[Part]:
    if not table.rows:
        return []
    more = record.get("more")
    words = f"{title} (first {len(table.rows)}, {more} more)" if more else title
    return [Details(words, table)]
