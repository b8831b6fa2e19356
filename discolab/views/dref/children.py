"""What a value that is not one tensor holds: parameters of modules, items of containers.

Pure: made from the records of all workers. Each row says how the workers compare in it; a row in
which one differs is never left out for want of room, and never hidden in a closed section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..formats import cut, format_bytes, format_shape, format_workers
from ..parts import Column, Details, Part, Row, Table, Text
from ..summary import summarize
from .child_rows import byte_words, few_distinct, same_words, section_parts, verdict_of
from .compare import content_key, row_verdict
from .plain_values import by_key, plain_parts

_Records: TypeAlias = Mapping[int, Mapping[str, Any]]
_Cells: TypeAlias = Callable[[str, str, Text], tuple[Text, ...]]
_CONTAINERS = ("list", "tuple", "dict", "dataclass")
_MOST_NESTED = 6
_EMPTY = Text("")
_VERDICT = 5  # its place among the cells of a parameter


@dataclass(frozen=True)
class Children:
    """What stands below the title line, and how the workers compare; None: nothing to add."""

    parts: tuple[Part, ...] = ()
    verdict: Text | None = None


def draw_children(
    records: _Records, num_groups: int = 1, ask: str = "stats=True"
) -> Children | None:
    """Draw what the values hold.

    Parameters
    ----------
    records : mapping of rank to record
        Of the workers that have a value.
    num_groups : int
        Equal groups of neighbouring ranks.
    ask : str
        The call that has large modules compared.

    Returns
    -------
    Children or None
        None if a row for each worker says it better; no parts if the title line has said it all.
    """
    kinds = {record.get("kind") for record in records.values()}
    if kinds and kinds <= {"module", "none"} and kinds != {"none"}:
        return _modules(records, num_groups, ask)
    if len(kinds) != 1 or kinds.pop() not in _CONTAINERS:
        return None
    if not all(isinstance(record.get("items"), list) for record in records.values()):
        return None
    if any(_holds_tensor(record) for record in records.values()):
        return _items(records, num_groups)
    plain = plain_parts(records)
    return None if plain is None else Children(tuple(plain))


def differing_tensors(
    records: _Records, num_groups: int = 1
) -> list[tuple[str, dict[int, object], list[list[int]] | None]]:
    """The parameters or items in which a worker is the odd one.

    Returns
    -------
    list of tuple
        Name; by rank something that is equal if the contents are; the sets of ranks that must
        agree, None if nothing says which.
    """
    found: list[tuple[str, dict[int, object], list[list[int]] | None]] = []
    kinds = {str(record.get("kind")) for record in records.values()}
    if kinds == {"module"}:
        if not _alike(records):
            return []
        found = _compared_parameters(records)
    elif len(kinds) == 1 and kinds <= set(_CONTAINERS):
        for name, held in by_key(records).items():
            if {record.get("kind") for record in held.values()} == {"tensor"}:
                keys = {rank: content_key(record) for rank, record in held.items()}
                found.append((name, keys, _replicas(held[min(held)].get("sharding"))))
    verdicts = [row_verdict(keys, num_groups, sets) for _, keys, sets in found]
    rare = few_distinct(verdicts) if kinds == {"module"} else set()
    return [
        (name, keys, [sorted(keys)] if place in rare else sets)
        for place, (name, keys, sets) in enumerate(found)
        if place in rare or verdicts[place].role == "warning"
    ]


def _compared_parameters(
    records: _Records,
) -> list[tuple[str, dict[int, object], list[list[int]] | None]]:
    """Name, contents by rank and sets that must agree, of each parameter and buffer."""
    found: list[tuple[str, dict[int, object], list[list[int]] | None]] = []
    layouts = {rank: record.get("layouts") or [] for rank, record in records.items()}
    for column in zip(*map(_rows_of, records.values()), strict=False):
        held = dict(zip(records, column, strict=True))
        digests: dict[int, object] = {rank: row.get("digest") for rank, row in held.items()}
        sets = _replicas(_sharding(held[min(held)], layouts[min(held)]))
        found.append((str(held[min(held)].get("name")), digests, sets))
    for lines in zip(*(record.get("brief") or [] for record in records.values()), strict=False):
        digests = {rank: line[2] for rank, line in zip(records, lines, strict=True)}
        found.append((str(lines[0][0]), digests, None))
    return found


# -- modules --------------------------------------------------------------------------------------


def _modules(records: _Records, num_groups: int, ask: str) -> Children:
    if not _alike(records):
        return Children((_stages(records),), Text("each has parameters of its own", "muted"))
    layouts = {rank: record.get("layouts") or [] for rank, record in records.items()}
    rows = []
    for number in range(len(_rows_of(next(iter(records.values()))))):
        held = {rank: _rows_of(record)[number] for rank, record in records.items()}
        rows.append(_parameter(held, layouts, num_groups))
    first = next(iter(records.values()))
    rows += _brief(records, num_groups, _parameter_line)
    for place in few_distinct([row[_VERDICT] for row in rows]):
        rows[place] = (*rows[place][:_VERDICT], Text("≠ distinct", "warning"), rows[place][-1])
    left = len(_rows_of(first)) + int(first.get("more") or 0) - len(rows)
    titles = ("name", "shape", "dtype", "layout", "bytes", "workers", "")
    words = "parameters and buffers" if _has_buffer(first) else "parameters"
    parts = section_parts(words, titles, rows, left) + _not_compared(records, ask)
    return Children(tuple(parts), verdict_of(words, titles, rows))


def _alike(records: _Records) -> bool:
    """Whether all modules have parameters of the same names, as far as these are told."""
    names = {
        (record.get("more"), *(row.get("name") for row in _rows_of(record)))
        for record in records.values()
    }
    return len(names) == 1


def _rows_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = record.get("params")
    return rows if isinstance(rows, list) else []


def _has_buffer(record: Mapping[str, Any]) -> bool:
    return any(row.get("buffer") for row in _rows_of(record))


def _not_compared(records: _Records, ask: str) -> list[Part]:
    bare = any(row.get("digest") is None for rec in records.values() for row in _rows_of(rec))
    if len(records) < 2 or not bare:
        return []
    return [Text(f"large: parameters are not compared unless asked for: {ask}", "muted")]


def _parameter(
    held: _Records, layouts: Mapping[int, Sequence[Any]], num_groups: int
) -> tuple[Text, ...]:
    """One parameter or buffer on all workers."""
    first = next(iter(held.values()))
    sharding = _sharding(first, next(iter(layouts.values())))
    marks = [word for word in ("buffer", "frozen", "grad") if first.get(word)]
    keys = {rank: row.get("digest") for rank, row in held.items()}
    return (
        Text(str(first.get("name"))),
        same_words(held, lambda row: format_shape(row.get("shape"))),
        same_words(held, lambda row: str(row.get("dtype", ""))),
        Text(_layout_words(sharding), "muted"),
        byte_words(row.get("nbytes") for row in held.values()),
        row_verdict(keys, num_groups, _replicas(sharding)),
        Text(", ".join(marks), "muted"),
    )


def _brief(records: _Records, num_groups: int, cells: _Cells) -> list[tuple[Text, ...]]:
    """What is told in a line each, after what is told in full; `cells` makes a row of a line."""
    held = {rank: record.get("brief") or [] for rank, record in records.items()}
    first = next(iter(held.values()))
    names = {tuple(name for name, *_ in brief) for brief in held.values()}
    if len(names) > 1:
        return []
    rows: list[tuple[Text, ...]] = []
    for number, (name, words, _) in enumerate(first):
        keys = {rank: brief[number][2] and tuple(brief[number][1:]) for rank, brief in held.items()}
        rows.append(cells(str(name), str(words), row_verdict(keys, num_groups)))
    return rows


def _parameter_line(name: str, words: str, verdict: Text) -> tuple[Text, ...]:
    dtype, _, shape = words.partition("[")
    return (Text(name), Text(f"[{shape}"), Text(dtype), _EMPTY, _EMPTY, verdict, _EMPTY)


def _item_line(key: str, words: str, verdict: Text) -> tuple[Text, ...]:
    return (Text(key), Text(words), _EMPTY, _EMPTY, _EMPTY, verdict)


def _sharding(row: Mapping[str, Any], layouts: Sequence[Any]) -> Mapping[str, Any] | None:
    number = row.get("layout")
    known = isinstance(number, int) and 0 <= number < len(layouts)
    return layouts[number] if known and isinstance(layouts[number], Mapping) else None  # type: ignore[index]


def _layout_words(sharding: Mapping[str, Any] | None) -> str:
    if sharding is None:
        return ""
    return ", ".join(f"{kind}({detail})" for kind, detail in sharding["placements"])


def _replicas(sharding: Mapping[str, Any] | None) -> list[list[int]] | None:
    """The sets of workers that must hold the same shard; None if nothing is known of that."""
    if sharding is None:
        return None
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, rank in enumerate(sharding["ranks"]):
        place, rest = [], number
        for size, (kind, _) in zip(
            reversed(sharding["mesh"]), reversed(sharding["placements"]), strict=True
        ):
            rest, index = divmod(rest, size)
            place.append(index if kind != "Replicate" else 0)
        sets.setdefault(tuple(place), []).append(rank)
    return list(sets.values())


def _stages(records: _Records) -> Table:
    """A row for each worker, where modules have not the same parameters: stages of a pipeline."""
    rows = []
    for rank, record in sorted(records.items()):
        layers = record.get("layers")
        count = record.get("parameters")
        words = ", ".join(map(str, layers)) if isinstance(layers, list) else ""
        cells = (
            Text(str(record.get("type", ""))) if count is not None else Text("None", "muted"),
            Text(cut(words, 160)),
            Text(f"{count:,}" if isinstance(count, int) else ""),
            Text(format_bytes(record.get("nbytes"))),
        )
        rows.append(Row(cells, (rank,)))
    right = ("parameters", "bytes")
    titles = ("type", "layers", *right)
    return Table(
        tuple(Column(title, "right" if title in right else "left") for title in titles),
        tuple(rows),
    )


# -- containers -----------------------------------------------------------------------------------


def _holds_tensor(record: Mapping[str, Any]) -> bool:
    items = record.get("items")
    return isinstance(items, list) and any(
        item["value"].get("kind") in ("tensor", "module") or _holds_tensor(item["value"])
        for item in items
    )


def _items(records: _Records, num_groups: int) -> Children:
    items = by_key(records)
    rows, nested = [], []
    for key, held in items.items():
        kinds = {record.get("kind") for record in held.values()}
        if kinds <= set(_CONTAINERS) and any(map(_holds_tensor, held.values())):
            nested.append((key, held))
        rows.append(_item(key, held, records, num_groups))
    lines = _brief(records, num_groups, _item_line)
    rows += lines
    left = max(int(record.get("more") or 0) for record in records.values()) - len(lines)
    titles = ("key", "value", "layout", "device", "bytes", "workers")
    parts = section_parts("items", titles, rows, left)
    for key, held in nested[:_MOST_NESTED]:
        if all(isinstance(record.get("items"), list) for record in held.values()):
            parts += [Details(f"in {key}", part) for part in _inner(held, num_groups)]
    if len(nested) > _MOST_NESTED:
        parts.append(Text(f"and {len(nested) - _MOST_NESTED} more with tensors in them", "muted"))
    return Children(tuple(parts), verdict_of("items", titles, rows))


def _inner(held: _Records, num_groups: int) -> list[Part]:
    """The table of a container in a container, without a second section around it."""
    return [
        part.body if isinstance(part, Details) and part.summary.startswith("items") else part
        for part in _items(held, num_groups).parts
    ]


def _item(key: str, held: _Records, records: _Records, num_groups: int) -> tuple[Text, ...]:
    lacking = sorted(set(records) - set(held))
    first = next(iter(held.values()))
    if lacking:
        verdict = Text(f"only on {format_workers(sorted(held))}", "warning")
    else:
        keys = {rank: content_key(record) for rank, record in held.items()}
        verdict = row_verdict(keys, num_groups, _replicas(first.get("sharding")))
    return (
        Text(key),
        same_words(held, lambda record: summarize(record, 80)),
        same_words(
            held, lambda record: str(record.get("placements") or record.get("layout") or "")
        ),
        same_words(held, lambda record: str(record.get("device", ""))),
        byte_words(record.get("nbytes") for record in held.values()),
        verdict,
    )
