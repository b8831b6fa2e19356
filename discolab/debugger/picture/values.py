"""A row of values side by side: what workers hold under one name, equal ones as one. Pure.

Values are equal if their records vouch for it: by a digest, or a repr that is whole. Where they
do not, as for large tensors, what is alike is joined and said not to be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...views.dref.contents import content_key
from ...views.formats import cut, format_number
from ...views.parts import ComparisonRow, Heat, Role, Span, Text
from ...views.summary import format_module, format_tensor, format_values, summarize
from .thumbs import Key, small_heats

Record = Mapping[str, Any]

_NARROW, _WIDE = 32, 72  # characters of a value in one column, and of one that all have
_MOST_HEATS = 8  # in a row
_UNBOUND = Text("–", "muted")
_OPAQUE = ("function", "type", "module", "method", "builtin_function_or_method")


def row_of(
    name: str,
    held: Mapping[int, Record],
    ranks: Sequence[int],
    *,
    changed: bool = False,
    heats: Mapping[int, Heat] | None = None,
    common: str | None = None,
) -> ComparisonRow:
    """Put the values of workers side by side.

    Parameters
    ----------
    name
        What stands in front.
    held
        A record for each worker that has a value.
    ranks
        The workers that are shown; those without a record have none.
    changed
        Whether the row is marked so.
    heats
        Thumbnails of tensors by rank; None: they are made here, on a scale of their own.
    common
        Type and shape if they are told elsewhere, "" if each value is to tell its own; None: the
        row tells them in front, if they are the same on all workers.
    """
    classes = _classes(held)
    about = _about(held, len(classes)) if common is None else common
    if heats is None:
        firsts = {members[0]: held[members[0]] for members in classes[:_MOST_HEATS]}
        heats = small_heats(pictured(firsts))
    means = common is None and bool(about) and _only_means(held, classes)
    spans = _spans(held, classes, about, means)
    for number in _odd(classes, len(held)):
        if spans[number].words.role == "plain":
            loud = Text(spans[number].words.text, "warning")
            spans[number] = replace(spans[number], words=loud)
    spans = [replace(span, heat=heats.get(span.ranks[0])) for span in spans]
    missing = tuple(rank for rank in ranks if rank not in held)
    if missing:
        spans.append(Span(missing, _UNBOUND))
        spans.sort(key=lambda span: span.ranks)
    about = about if common is None else ""
    if about and means:
        about += " means"
    return ComparisonRow(name, about, tuple(spans), differ(held, ranks), changed)


def _only_means(held: Mapping[int, Record], classes: Sequence[Sequence[int]]) -> bool:
    """Whether there are several tensors, each told by its mean: then the word is said once."""
    tensors = all(record.get("kind") == "tensor" for record in held.values())
    return tensors and len(classes) > 1 and not any(map(_told_whole, held.values()))


def _spans(
    held: Mapping[int, Record], classes: Sequence[Sequence[int]], about: str, means: bool
) -> list[Span]:
    """What each class of equal values is in words; a letter tells apart those that read alike."""
    words = [_words(held[members[0]], about, len(classes) == 1, means) for members in classes]
    twice = Counter(text.text for text in words)
    spans = []
    for number, (members, text) in enumerate(zip(classes, words, strict=True)):
        record = held[members[0]]
        notes = [_note(record, len(members) > 1)]
        if twice[text.text] > 1 and _known(record):
            notes.append(f"digest {chr(ord('A') + number % 26)}")
        note = " · ".join(filter(None, notes))
        if not text.text:
            text, note = Text(note), ""
        spans.append(Span(tuple(members), text, None, note))
    return spans


def has_changed(before: Record, now: Record) -> bool:
    """Whether a value is certainly not what it was."""
    return differ({0: before, 1: now}, (0, 1))


def differ(held: Mapping[int, Record], ranks: Sequence[int]) -> bool:
    """Whether workers have certainly not the same: also if some have none."""
    if not held:
        return False
    known = {key for record in held.values() if (key := content_key(record)) is not None}
    return (
        len(known) > 1
        or len(held) < len(ranks)
        or len({_surface(record) for record in held.values()}) > 1
    )


def _known(record: Record) -> bool:
    return content_key(record) is not None


def _surface(record: Record) -> object:
    """What can be told without all of the contents; of what differs in it the contents differ."""
    if record.get("kind") == "tensor":
        return format_tensor(record), str(record.get("head"))
    if record.get("cut") and str(record.get("repr", "")).startswith("<"):
        return record.get("type")  # addresses and the like: nothing of what is in it
    return record.get("type"), summarize(record)


def _classes(held: Mapping[int, Record]) -> list[list[int]]:
    """Join workers with equal values, as far as that is known, in order of rank."""
    found: dict[object, list[int]] = {}
    for rank in sorted(held):
        key = content_key(held[rank])
        identity = ("?", _surface(held[rank])) if key is None else ("=", key)
        found.setdefault(identity, []).append(rank)
    return list(found.values())


def _odd(classes: Sequence[Sequence[int]], count: int) -> set[int]:
    """The numbers of the classes outside a majority, if there is one."""
    sizes = [len(members) for members in classes]
    most = max(sizes, default=0)
    if len(classes) < 2 or 2 * most <= count or most < 2:
        return set()
    return {number for number, size in enumerate(sizes) if size != most}


def _about(held: Mapping[int, Record], classes: int) -> str:
    """What all values are in the words of their type; of modules if there is more to tell."""
    modules = {
        format_module(record) if record.get("kind") == "module" else "" for record in held.values()
    }
    if classes > 1 and len(modules) == 1 and (words := modules.pop()):
        return words
    return about_of(held.values())


def about_of(records: Iterable[Record]) -> str:
    """Type and shape, if all are tensors of the same; else ""."""
    words = {format_tensor(record) if record.get("kind") == "tensor" else "" for record in records}
    return words.pop() if len(words) == 1 else ""


def pictured(records: Mapping[Key, Record]) -> dict[Key, Record]:
    """Those that are too large to be told in words."""
    return {key: record for key, record in records.items() if not format_values(record)}


def _told_whole(record: Record) -> bool:
    """Whether a tensor is told by other words than its mean."""
    found = record.get("stats")
    return bool(format_values(record)) or not isinstance(found, Mapping) or _constant(found)


def _constant(stats: Mapping[str, Any]) -> bool:
    alike = stats.get("min") is not None and stats.get("min") == stats.get("max")
    return alike and not stats.get("nonfinite")


def _words(record: Record, about: str, wide: bool, means: bool = False) -> Text:
    limit = _WIDE if wide else _NARROW
    if record.get("kind") == "module" and about:
        return Text("" if _known(record) else "…")
    if record.get("kind") != "tensor":
        return Text(summarize(record, limit), "warning" if "error" in record else "plain")
    role: Role = "plain"
    found = record.get("stats")
    stats: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    words = [] if about else [format_tensor(record)]
    if values := format_values(record):
        words.append(values)
    elif _constant(stats):
        words.append(f"constant {format_number(stats['min'])}")
    elif stats.get("mean") is not None:
        words.append(f"{'' if means else 'mean '}{format_number(stats['mean'])}")
    elif first := record.get("head"):
        words.append(f"[{', '.join(map(format_number, first[:3]))}, …]")
    if stats.get("nonfinite"):
        role = "warning"
        if not values:
            words.append(_nonfinite(record, stats["nonfinite"]))
    if note := record.get("note"):
        words.append(str(note))
    return Text(cut(" · ".join(words) or "…", max(limit, 48)), role)


def _nonfinite(record: Record, count: int) -> str:
    """How many are not finite, by their kind if they are all of one."""
    places = record.get("places")
    kinds = {str(kind) for kind, _ in places} if isinstance(places, list) else set()
    one = kinds.pop() if len(kinds) == 1 and len(places or ()) == count else "not finite"
    return f"{format_number(count)} {one}"


def _note(record: Record, several: bool) -> str:
    if "error" in record:
        return cut(str(record["error"]), 60)
    if several and not _known(record) and record.get("type") not in _OPAQUE:
        return "not compared"
    return ""


def heats_in(row: ComparisonRow) -> list[Heat]:
    """The thumbnails of a row."""
    return [span.heat for span in row.spans if span.heat is not None]
