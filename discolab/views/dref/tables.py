"""The tables and lines of a DRef's picture: a row for each worker, and below it what is to be said.

Pure. A column in which no worker has anything to say is dropped. Workers that say the same are
joined; long messages are cut, and all but their first line goes into a collapsed section.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..formats import cut, format_bytes, format_number, format_ranks, format_shape
from ..parts import (
    Badge,
    Bars,
    Cell,
    Column,
    Details,
    Heat,
    Part,
    Role,
    Row,
    Table,
    Text,
    fold_rows,
)
from ..summary import format_values, summarize
from .contents import NO_VALUE, grouped, odd_ranks

_NOTHING = Text("")
_RIGHT = {"bytes", "mean", "std", "min", "max", "nonfinite", "parameters"}
_COLUMNS = (
    "digest",
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
    "values",
    "picture",
)
_LINE_LIMIT = 300
_MESSAGE_LIMIT = 4000
_MOST_NOTES = 12
_PLACES_TOLD = 3


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
    if kind in NO_VALUE:
        return {"state": Text(NO_VALUE[str(kind)], role_of(str(kind)))}
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
        "values": Text(format_values(record)),
    }


# -- below the table -------------------------------------------------------------------------------


def note_parts(
    records: Mapping[int, Mapping[str, Any]], *, drawn: bool = False, ask: str = "stats=True"
) -> list[Part]:
    """Say what the records want noted about values that are there.

    `drawn` says that their layout is drawn, `ask` is the call that takes statistics.
    """
    parts: list[Part] = []
    roles: tuple[tuple[str, Role], ...] = (("note", "muted"), ("error", "warning"))
    for key, role in roles:
        words = {rank: str(record[key]) for rank, record in records.items() if record.get(key)}
        for text, ranks in grouped(words):
            place = "" if len(words) == len(records) and "," not in ranks else f"[{ranks}] "
            parts.append(Text(f"{place}{cut(text, _LINE_LIMIT)}", role))
    grad = [rank for rank, record in records.items() if record.get("requires_grad")]
    if grad and len(grad) < sum(record.get("kind") == "tensor" for record in records.values()):
        parts.append(Text(f"[{format_ranks(sorted(grad))}] alone requires grad", "muted"))
    parts += [Text(text, "muted") for text in _about_values(records, drawn, ask)]
    return _limited(parts)


def _about_values(records: Mapping[int, Mapping[str, Any]], drawn: bool, ask: str) -> list[str]:
    notes = []
    tensors = [record for record in records.values() if record.get("kind") == "tensor"]
    stats = [record["stats"] for record in tensors if isinstance(record.get("stats"), Mapping)]
    if any(entry.get("of") == "magnitude" for entry in stats):
        notes.append("statistics are of magnitudes")
    if any(entry.get("nonfinite") for entry in stats):
        notes.append("mean, std, min and max are of the finite values")
    if any("head" in record and "digest" not in record for record in tensors):
        notes.append(f"large: no statistics or comparison unless asked for: {ask}")
    for record in tensors:
        if "placements" in record and not drawn:
            notes.append(f"{record['type']} {record['placements']} of {record['logical_shape']}")
    return list(dict.fromkeys(notes))


def problem_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Say what failed on which worker, and who is still busy with what."""
    parts: list[Part] = []
    for kind in NO_VALUE:
        said = {r: _said(record) for r, record in records.items() if record.get("kind") == kind}
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in sorted(said):
            groups.setdefault(said[rank], []).append(rank)
        for (text, trace), held in groups.items():
            if not text:
                continue
            ranks = format_ranks(held)
            first, _, rest = text.partition("\n")
            parts.append(Text(f"[{ranks}] {cut(first, _LINE_LIMIT)}", role_of(kind)))
            if trace:
                parts.append(Details(f"[{ranks}] traceback", Text(trace, "code")))
            elif rest.strip():
                parts.append(Details(f"[{ranks}] whole message", Text(text)))
    return _limited(parts)


def role_of(kind: str) -> Role:
    """How serious a kind of `NO_VALUE` is."""
    return "error" if kind in ("failure", "dead") else "warning"


def _said(record: Mapping[str, Any]) -> tuple[str, str]:
    """The message and the traceback of a record, cut."""
    return _bounded(record.get("message")), _bounded(record.get("traceback"))


def _bounded(words: object) -> str:
    text = str(words or "").strip("\n").rstrip()
    if len(text) <= _MESSAGE_LIMIT:
        return text
    half = _MESSAGE_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _limited(parts: list[Part]) -> list[Part]:
    if len(parts) <= _MOST_NOTES:
        return parts
    more = Text(f"and {len(parts) - _MOST_NOTES} more notes", "muted")
    return [*parts[:_MOST_NOTES], more]


def place_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Say where values are not finite: the first few of each worker."""
    words = {
        rank: told for rank, record in records.items() if (told := _places(record, _PLACES_TOLD))
    }
    return [Text(f"[{ranks}] {told}", "warning") for told, ranks in grouped(words)]


def detail_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """A collapsed table of first values, histograms, and where values are not finite."""
    rows = {rank: _row(record) for rank, record in records.items()}
    titles = [title for title in ("first values", "spread", "not finite") if _any(rows, title)]
    if not {"spread", "not finite"} & set(titles):
        return []
    table = Table(
        tuple(map(Column, titles)),
        fold_rows(
            tuple(
                Row(tuple(cells.get(title, Text("")) for title in titles), (rank,))
                for rank, cells in rows.items()
                if any(title in cells for title in titles)  # None has no values
            )
        ),
    )
    return [Details("values in more detail", table, extra=True)]


def _any(rows: Mapping[int, Mapping[str, Cell]], title: str) -> bool:
    return any(title in cells for cells in rows.values())


def _row(record: Mapping[str, Any]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    head = record.get("head")
    if isinstance(head, list) and head:
        more = ", …" if _count(record.get("shape")) > len(head) else ""
        cells["first values"] = Text(", ".join(map(format_number, head)) + more)
    counts, stats = record.get("histogram"), record.get("stats")
    if isinstance(counts, list) and isinstance(stats, Mapping) and max(counts, default=0) > 0:
        most = max(counts)
        ends = f"{format_number(stats.get('min'))} to {format_number(stats.get('max'))}"
        alt = f"{len(counts)} bins, {ends}: {', '.join(map(str, counts))}"
        cells["spread"] = Bars(tuple(count / most for count in counts), alt)
    places = _places(record, len(record.get("places") or ()))
    if places:
        cells["not finite"] = Text(places)
    return cells


def _places(record: Mapping[str, Any], most: int) -> str:
    places, stats = record.get("places"), record.get("stats")
    if not isinstance(places, list) or not isinstance(stats, Mapping) or not places:
        return ""
    told = ", ".join(f"{kind} at {format_shape(index)}" for kind, index in places[:most])
    more = stats.get("nonfinite", 0) - len(places[:most])
    return f"{told} and {more} more" if more > 0 else told


def _count(shape: object) -> int:
    if not isinstance(shape, Sequence) or not all(type(size) is int for size in shape):
        return 0
    return math.prod(shape)
