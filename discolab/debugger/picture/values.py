"""Tables of values: a row a name, a column a worker, equal values as one. Pure.

Values are equal if their records vouch for it: by a digest, or a repr that is whole. Where they
do not, as for large tensors, what is alike is joined and said not to be compared. Thumbnails of the
tensors of a row are on one scale.

Workers in one function share a table of variables, also where they stand at different lines of it.
Names stay in the order in which they came; what differs and what has changed is marked.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...views.dref.contents import content_key
from ...views.facts.thumbnails import Scale, shared_scale
from ...views.formats import cut, format_number, format_workers
from ...views.parts import (
    ComparisonRow,
    ComparisonTable,
    Details,
    Heat,
    Line,
    Part,
    Role,
    Span,
    Text,
    VStack,
)
from ...views.summary import format_module, format_tensor, format_values, summarize
from ..stops import Record, Stop

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
        if len({str(held[rank].get("repr")) for rank in members}) > 1:  # each has its own address
            text = Text(f"<{record.get('type')} object>")
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


# -- thumbnails ------------------------------------------------------------------------------------


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


# -- the variables of a stop -----------------------------------------------------------------------


MOST_NAMES = 30
_MOST_PICTURES = 24  # each is some 400 bytes of HTML
_MOST_ALONE = 8  # of rows with one more
_LONGEST = 98  # characters of names that are not shown
_HEADS = ("name", "")


@dataclass(frozen=True)
class VariableTable:
    """The variables of one function, the names that had no room, and how many more there are."""

    title: str
    whose: str
    table: ComparisonTable
    rest: ComparisonTable
    more: int = 0


def variable_parts(stop: Stop) -> list[Part]:
    """The tables as parts, and what their marks mean."""
    tables = variable_tables(stop)
    parts: list[Part] = []
    for one in tables:
        if not one.table.rows:
            parts.append(Text(f"no {one.title} yet{one.whose}", "muted"))
            continue
        parts += [Line((Text(one.title, "title"), Text(one.whose, "muted"))), one.table]
        if one.rest.rows:
            names = ", ".join(row.name for row in one.rest.rows)
            words = cut(f"and {len(one.rest.rows) + one.more:,} more: {names}", _LONGEST)
            first = f"the first {len(one.rest.rows)}"
            label = f"show {first if one.more else 'them'}"
            parts += [Text(words, "muted"), Details(label, one.rest, extra=True)]
    return [*parts, *_legend([one.table for one in tables])]


def variable_tables(stop: Stop) -> list[VariableTable]:
    """A table for each function in which there are workers whose variables are known.

    The first is that of the workers that advance next, the last that of those that wait.
    """
    places: dict[tuple[str, str], list[int]] = {}
    standing = [rank for group in stop.groups for rank in group]
    for worker in sorted(stop.workers, key=lambda worker: _turn(standing, worker.rank)):
        spot = stop.spot(worker.rank)
        if worker.variables is not None and spot is not None:
            places.setdefault((spot.file, spot.function), []).append(worker.rank)
    tables = []
    budget = [_MOST_ALONE, _MOST_PICTURES]
    for (_, function), ranks in places.items():
        title = "variables" if len(places) == 1 else f"variables of {function}"
        tables.append(_table(stop, sorted(ranks), title, budget))
    return tables


def _turn(standing: Sequence[int], rank: int) -> int:
    return standing.index(rank) if rank in standing else len(standing)


def _table(stop: Stop, ranks: Sequence[int], title: str, budget: list[int]) -> VariableTable:
    """The table of some workers; takes the thumbnails that it has from the budget."""
    held = by_name({rank: stop.workers[rank].variables or {} for rank in ranks})
    changed = set().union(*(stop.workers[rank].changed for rank in ranks))
    marked = {name for name, records in held.items() if differ(records, ranks)}
    # What differs is shown first if not all can be: the place of a row is that of its name.
    first = sorted(held, key=lambda name: (name not in marked) + (name not in changed))
    shown = set(first[:MOST_NAMES])
    rows: dict[str, ComparisonRow] = {}
    for name in first:
        several = name in marked and len(ranks) > 1
        heats: Mapping[int, Heat] | None = None if name in shown and budget[several] > 0 else {}
        rows[name] = row_of(name, held[name], ranks, changed=name in changed, heats=heats)
        budget[several] -= len(heats_in(rows[name]))
    kept, rest = (
        [rows[name] for name in held if (name in shown) is well] for well in (True, False)
    )
    return VariableTable(
        title,
        "" if len(ranks) == len(stop.workers) else f" on {format_workers(ranks)}",
        ComparisonTable(_HEADS, tuple(ranks), tuple(kept)),
        ComparisonTable(_HEADS, tuple(ranks), tuple(rest)),
        max(stop.workers[rank].more for rank in ranks),
    )


def by_name(variables: Mapping[int, Mapping[str, Record]]) -> dict[str, dict[int, Record]]:
    """What workers have under each name; a name that only some have stands where they have it."""
    order: list[str] = []
    for names in variables.values():
        place = 0
        for name in names:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return {
        name: {rank: names[name] for rank, names in variables.items() if name in names}
        for name in order
    }


def _legend(tables: Sequence[ComparisonTable]) -> list[Part]:
    """What the marks mean, of those that are used."""
    rows = [row for table in tables for row in table.rows]
    words = []
    if any(row.differs for row in rows):
        words.append("≠ differs between workers")
    if any(row.changed for row in rows):
        words.append("• changed since the last stop")
    if any(len(heats_in(row)) > 1 for row in rows):
        words.append("thumbnails of a row are on one scale")
    return [Text(" · ".join(words), "muted")] if words else []


# -- the value of an expression --------------------------------------------------------------------


def evaluated_parts(expression: str, results: Mapping[int, tuple[str, Any]]) -> Part:
    """Put the values of an expression side by side; what failed is told below.

    Parameters
    ----------
    expression
    results
        For each worker ``("value", record)`` or ``("error", words)``.
    """
    values = {rank: found for rank, (kind, found) in results.items() if kind == "value"}
    errors: dict[str, list[int]] = {}
    for rank, (kind, found) in sorted(results.items()):
        if kind != "value":
            errors.setdefault(str(found), []).append(rank)
    parts: list[Part] = []
    if values:
        table = evaluated_table(expression, values)
        parts.append(table)
        if table.rows[0].differs:
            parts.append(Text("≠ differs between workers", "muted"))
    else:
        parts.append(Text(cut(expression, 200), "title"))
    parts += [
        Line((Text(f"{format_workers(ranks)}: "), Text(words, "error")))
        for words, ranks in errors.items()
    ]
    return parts[0] if len(parts) == 1 else VStack(tuple(parts))


def evaluated_table(expression: str, values: Mapping[int, Mapping[str, Any]]) -> ComparisonTable:
    """One row, from the record of each worker."""
    ranks = sorted(values)
    return ComparisonTable(
        ("expression", ""), tuple(ranks), (row_of(cut(expression, 60), values, ranks),)
    )
