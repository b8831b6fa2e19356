"""The lines below a table: what could not be read, what failed, who is still busy.

Pure. Workers that say the same are joined; long messages are cut, and all but their first line
goes into a collapsed section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats import cut, format_ranks
from ..parts import Details, Part, Role, Text
from .compare import grouped

#: Kinds of record that stand for a worker without a value.
BAD = {
    "failure": "failed",
    "dead": "died",
    "pending": "still busy",
    "missing": "gave no answer",
}

_LINE_LIMIT = 300
_MESSAGE_LIMIT = 4000
_MOST_NOTES = 12


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
    found = []
    tensors = [record for record in records.values() if record.get("kind") == "tensor"]
    stats = [record["stats"] for record in tensors if isinstance(record.get("stats"), Mapping)]
    if any(entry.get("of") == "magnitude" for entry in stats):
        found.append("statistics are of magnitudes")
    if any(entry.get("nonfinite") for entry in stats):
        found.append("mean, std, min and max are of the finite values")
    if any("head" in record and "digest" not in record for record in tensors):
        found.append(f"large: no statistics or comparison unless asked for: {ask}")
    for record in tensors:
        if "placements" in record and not drawn:
            found.append(f"{record['type']} {record['placements']} of {record['logical_shape']}")
    return list(dict.fromkeys(found))


def problem_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Say what failed on which worker, and who is still busy with what."""
    parts: list[Part] = []
    for kind in BAD:
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
                parts.append(Details(f"[{ranks}] traceback", Text(trace)))
            elif rest.strip():
                parts.append(Details(f"[{ranks}] whole message", Text(text)))
    return _limited(parts)


def role_of(kind: str) -> Role:
    """How serious a kind of `BAD` is."""
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
