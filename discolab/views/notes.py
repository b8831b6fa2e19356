"""The lines below a table: what could not be read, what failed, who is still busy.

Pure. Workers that say the same are joined; long messages are cut, and all but their first line
goes into a collapsed section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .compare import grouped
from .formats import cut
from .parts import Details, Part, Role, Text

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


def note_parts(records: Mapping[int, Mapping[str, Any]], *, drawn: bool = False) -> list[Part]:
    """Say what the records want noted about values that are there; `drawn`: their layout is."""
    parts: list[Part] = []
    roles: tuple[tuple[str, Role], ...] = (("note", "muted"), ("error", "warning"))
    for key, role in roles:
        words = {rank: str(record[key]) for rank, record in records.items() if record.get(key)}
        for text, ranks in grouped(words):
            place = "" if len(words) == len(records) and "," not in ranks else f"[{ranks}] "
            parts.append(Text(f"{place}{cut(text, _LINE_LIMIT)}", role))
    parts += [Text(text, "muted") for text in _about_values(records, drawn)]
    return _limited(parts)


def _about_values(records: Mapping[int, Mapping[str, Any]], drawn: bool) -> list[str]:
    found = []
    tensors = [record for record in records.values() if record.get("kind") == "tensor"]
    stats = [record["stats"] for record in tensors if isinstance(record.get("stats"), Mapping)]
    if any(entry.get("of") == "magnitude" for entry in stats):
        found.append("statistics are of magnitudes")
    if any(entry.get("nonfinite") for entry in stats):
        found.append("mean, std, min and max are of the finite values")
    if any("head" in record and "digest" not in record for record in tensors):
        found.append("large: no statistics or comparison unless asked for (stats=True)")
    for record in tensors:
        if "placements" in record and not drawn:
            found.append(f"{record['type']} {record['placements']} of {record['logical_shape']}")
    return list(dict.fromkeys(found))


def problem_parts(records: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Say what failed on which worker, and who is still busy with what."""
    parts: list[Part] = []
    states = {rank: (str(rec.get("kind")), _message(rec)) for rank, rec in records.items()}
    for kind in BAD:
        words = {rank: text for rank, (which, text) in states.items() if which == kind and text}
        for text, ranks in grouped(words):
            first, _, rest = text.partition("\n")
            role: Role = role_of(kind)
            parts.append(Text(f"[{ranks}] {cut(first, _LINE_LIMIT)}", role))
            if rest.strip():
                parts.append(Details(f"[{ranks}] whole message", Text(text)))
    return _limited(parts)


def role_of(kind: str) -> Role:
    """How serious a kind of `BAD` is."""
    return "error" if kind in ("failure", "dead") else "warning"


def _message(record: Mapping[str, Any]) -> str:
    text = str(record.get("message") or "").strip()
    if len(text) <= _MESSAGE_LIMIT:
        return text
    half = _MESSAGE_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _limited(parts: list[Part]) -> list[Part]:
    if len(parts) <= _MOST_NOTES:
        return parts
    more = Text(f"and {len(parts) - _MOST_NOTES} more notes", "muted")
    return [*parts[:_MOST_NOTES], more]
