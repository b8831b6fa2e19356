"""What a value that is not one tensor holds: parameters of modules, items of containers.

Pure: made from the records of all workers. Each row says how the workers compare in it; a row in
which one differs is never left out for want of room, and never hidden in a closed section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..formats import cut, format_bytes, format_ranks, format_shape, format_workers
from ..parts import Align, Column, Details, Part, Role, Row, Table, Text, VStack
from ..summary import summarize
from .contents import content_classes, content_key, free_verdict, grouped, odd_ranks, row_verdict

_Records: TypeAlias = Mapping[int, Mapping[str, Any]]
_Cells: TypeAlias = Callable[[str, str, Text], tuple[Text, ...]]
_CONTAINERS = ("list", "tuple", "dict", "dataclass")
_MOST_NESTED = 6
_EMPTY = Text("")
_VERDICT = 5  # its place among the cells of a parameter
_MISSED = Text("≠ distinct", "warning")
_ALL_SAY = {
    "": Text("contents not compared", "muted"),
    "equal": Text("equal where several have a parameter", "muted"),
    "distinct": Text("parameters of the same name are distinct", "muted"),
}
_MOST_ROWS = 40
_MOST_OPEN = 12  # rows that are shown without being asked for
_RIGHT = {"bytes"}
_MOST_KEYS = 8  # columns
_MOST_SETTINGS = 6


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
    if "none" in kinds and len(kinds) == 2:
        some = not_none(records)
        return _items_of_some(some, len(records)) if len(some) > 1 else None
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
    tensors: list[tuple[str, dict[int, object], list[list[int]] | None]] = []
    some = not_none(records)
    records, num_groups = some, num_groups if len(some) == len(records) else 1
    kinds = {str(record.get("kind")) for record in records.values()}
    if kinds == {"module"}:
        tensors = compared_parameters(records)
    elif len(kinds) == 1 and kinds <= set(_CONTAINERS):
        for name, held in by_key(records).items():
            if {record.get("kind") for record in held.values()} == {"tensor"}:
                keys = {rank: content_key(record) for rank, record in held.items()}
                tensors.append((name, keys, replicas(held[min(held)].get("sharding"))))
    verdicts = [
        row_verdict(keys, num_groups if len(keys) == len(records) else 1, sets)
        for _, keys, sets in tensors
    ]
    rare = few_distinct(verdicts) if kinds == {"module"} else set()
    return [
        (name, keys, [sorted(keys)] if place in rare else sets)
        for place, (name, keys, sets) in enumerate(tensors)
        if place in rare or verdicts[place].role == "warning"
    ]


# -- modules --------------------------------------------------------------------------------------


def _modules(records: _Records, num_groups: int, ask: str) -> Children:
    if not _alike(records):
        return _unlike_modules(records, num_groups, ask)
    layouts = {rank: record.get("layouts") or [] for rank, record in records.items()}
    rows = []
    for number in range(len(rows_of(next(iter(records.values()))))):
        held = {rank: rows_of(record)[number] for rank, record in records.items()}
        rows.append(_parameter(held, layouts, num_groups))
    first = next(iter(records.values()))
    rows += _brief(records, num_groups, _parameter_line)
    for place in few_distinct([row[_VERDICT] for row in rows]):
        rows[place] = (*rows[place][:_VERDICT], _MISSED, rows[place][-1])
    left = len(rows_of(first)) + int(first.get("more") or 0) - len(rows)
    titles = ("name", "shape", "dtype", "layout", "bytes", "workers", "")
    words = "parameters and buffers" if _has_buffer(first) else "parameters"
    parts = section_parts(words, titles, rows, left) + _not_compared(records, ask)
    verdict = verdict_of(words, titles, rows, left)
    apart = set_up_apart(records)
    parts += apart
    if any(part.role == "warning" for part in apart) and (
        verdict is None or verdict.role != "warning"
    ):
        verdict = Text("modules are set up differently", "warning")
    return Children(tuple(parts), verdict)


def set_up_apart(records: _Records) -> list[Text]:
    """How modules that have the same parameters are in other modes, or have other settings.

    Where parameters are distinct, as with shards, settings may be: a layer may tell its rank.
    """
    found: list[Text] = []
    modes = {rank: _mode(record.get("training")) for rank, record in records.items()}
    if len(set(modes.values())) > 1 and all(modes.values()):
        found.append(
            Text("; ".join(f"[{ranks}] {mode}" for mode, ranks in grouped(modes)), "warning")
        )
    settings = {rank: _settings(record) for rank, record in records.items()}
    words = dict.fromkeys(word for said in settings.values() for word in said)
    odd = [word for word in words if not all(word in said for said in settings.values())]
    if odd:
        digests = {record.get("digest") for record in records.values()}
        role: Role = "warning" if len(digests) == 1 and None not in digests else "muted"
        told = [
            f"[{format_ranks(rank for rank, said in settings.items() if word in said)}] {word}"
            for word in odd[:_MOST_SETTINGS]
        ]
        more = f"; and {len(odd) - len(told)} more" if len(odd) > len(told) else ""
        found.append(Text(f"set up differently: {'; '.join(told)}{more}", role))
    return found


def differ_but_for_values(records: _Records) -> bool:
    """Whether modules of which all values are equal are in other modes, frozen or set up apart."""
    if {record.get("kind") for record in records.values()} != {"module"}:
        return False
    return bool(set_up_apart(records)) or any(map(_frozen_verdict, by_name(records).values()))


def _mode(training: object) -> str:
    """``in train mode``, ``in eval mode``, ``3 of 5 modules in train mode``; "" if not known."""
    match training:
        case [int(some), int(count)]:
            if some in (0, count):
                return "in train mode" if some else "in eval mode"
            return f"{some} of {count} modules in train mode"
        case _:
            return ""


def _settings(record: Mapping[str, Any]) -> list[str]:
    pairs = record.get("settings")
    if not isinstance(pairs, list):
        return []
    return [f"{count} × {word}" if count > 1 else str(word) for word, count in pairs]


def _unlike_modules(records: _Records, num_groups: int, ask: str) -> Children:
    """A row for each worker, and what several of them have by the same name compared."""
    modules = not_none(records)
    layouts = {rank: record.get("layouts") or [] for rank, record in modules.items()}
    shared = {name: held for name, held in by_name(modules).items() if len(held) > 1}
    if not shared:
        own = Text("each has parameters of its own", "muted") if len(modules) > 1 else None
        return Children((_stages(records),), own)
    rows = []
    for held in shared.values():
        groups = num_groups if len(held) == len(records) else 1
        rows.append((*_parameter(held, layouts, groups), Text(format_ranks(sorted(held)))))
    for place in few_distinct([row[_VERDICT] for row in rows]):
        rows[place] = (*rows[place][:_VERDICT], _MISSED, *rows[place][_VERDICT + 1 :])
    words = "common parameters"
    titles = ("name", "shape", "dtype", "layout", "bytes", "workers", "", "on")
    parts = [_stages(records), *section_parts(words, titles, rows, 0)]
    verdict = verdict_of(words, titles, rows)
    if verdict is None:
        said = {row[_VERDICT].text for row in rows} or {""}
        verdict = _ALL_SAY.get(max(said), Text(f"{words}: {max(said)}", "muted"))
    return Children((*parts, *_not_compared(records, ask)), verdict)


def _alike(records: _Records) -> bool:
    """Whether all modules have parameters of the same names, as far as these are told."""
    names = {
        (record.get("more"), *(row.get("name") for row in rows_of(record)))
        for record in records.values()
    }
    return len(names) == 1


def _has_buffer(record: Mapping[str, Any]) -> bool:
    return any(row.get("buffer") for row in rows_of(record))


def _not_compared(records: _Records, ask: str) -> list[Part]:
    """Say why parameters are not compared: those of a worker have no data, or are large."""
    without: dict[int, str] = {}
    large = False
    for rank, record in records.items():
        bare = [row for row in rows_of(record) if row.get("digest") is None]
        notes = {str(row["note"]) for row in bare if row.get("note")}
        if notes:
            count = sum("note" in row for row in bare)
            without[rank] = f"{'; '.join(sorted(notes))} ({count} parameter{'s' * (count > 1)})"
        large = large or any("note" not in row for row in bare)
    parts: list[Part] = [Text(f"[{ranks}] {words}", "muted") for words, ranks in grouped(without)]
    if large and len(records) > 1:
        words = f"large: parameters are not compared unless asked for: {ask}"
        parts.append(Text(words, "muted"))
    return parts


def _parameter(
    held: _Records, layouts: Mapping[int, Sequence[Any]], num_groups: int
) -> tuple[Text, ...]:
    """One parameter or buffer on all workers."""
    first = next(iter(held.values()))
    layout = sharding(first, layouts[next(iter(held))])
    keys = {rank: row.get("digest") for rank, row in held.items()}
    verdict = row_verdict(keys, num_groups, must_agree(held, layouts))
    return (
        Text(str(first.get("name"))),
        same_words(held, lambda row: str(row.get("size") or format_shape(row.get("shape")))),
        same_words(held, lambda row: str(row.get("dtype", ""))),
        Text(format_placements(layout), "muted"),
        format_byte_range(row.get("nbytes") for row in held.values()),
        verdict if verdict.role == "warning" else _frozen_verdict(held) or verdict,
        Text(same_words(held, _marks).text, "muted"),
    )


def _marks(row: Mapping[str, Any]) -> str:
    return ", ".join(word for word in ("buffer", "frozen", "grad") if row.get(word))


def _frozen_verdict(held: _Records) -> Text | None:
    """A parameter that only some workers train ends up different on them."""
    frozen = [rank for rank, row in held.items() if row.get("frozen")]
    if not frozen or len(frozen) == len(held) or any("size" in row for row in held.values()):
        return None
    return Text(f"≠ frozen only on {format_workers(sorted(frozen))}", "warning")


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


def compared_parameters(
    records: _Records,
) -> list[tuple[str, dict[int, object], list[list[int]] | None]]:
    """Name, contents by rank and sets that must agree, of each parameter and buffer."""
    parameters: list[tuple[str, dict[int, object], list[list[int]] | None]] = []
    layouts = {rank: record.get("layouts") or [] for rank, record in records.items()}
    for name, held in by_name(records).items():
        digests: dict[int, object] = {rank: row.get("digest") for rank, row in held.items()}
        parameters.append((name, digests, must_agree(held, layouts)))
    return parameters


def by_name(records: _Records) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The parameters and buffers of all workers by name, those too that are told in a line."""
    parameters: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        for row in rows_of(record):
            parameters.setdefault(str(row.get("name")), {})[rank] = row
        for name, words, digest in record.get("brief") or []:
            dtype, _, shape = str(words).partition("[")
            line = {"name": name, "dtype": dtype, "size": f"[{shape}", "digest": digest}
            parameters.setdefault(str(name), {})[rank] = line
    return parameters


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


def format_placements(layout: Mapping[str, Any] | None) -> str:
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
    return Children(tuple(parts), verdict_of("items", titles, rows, left))


def _items_of_some(records: _Records, num_workers: int) -> Children | None:
    """Containers, where some workers have None."""
    children = draw_children(records)
    if children is None or not children.parts or children.verdict is not None:
        return children
    classes = content_classes(records)
    if classes is None:
        return Children(children.parts, _ALL_SAY[""])
    return Children(children.parts, free_verdict(classes, num_workers, 1))


def _inner(held: _Records, num_groups: int) -> list[Part]:
    """The table of a container in a container, without a second section around it."""
    return [
        part.body if isinstance(part, Details) and part.summary.startswith("items") else part
        for part in _items(held, num_groups).parts
    ]


def _item(key: str, held: _Records, records: _Records, num_groups: int) -> tuple[Text, ...]:
    lacking = sorted(set(records) - set(held))
    first = next(iter(held.values()))
    keys = {rank: content_key(record) for rank, record in held.items()}
    if lacking:
        said = row_verdict(keys, 1, replicas(first.get("sharding"))).text
        where = f"only on {format_workers(sorted(held))}"
        verdict = Text(f"{where}, {said}" if said not in ("", "equal") else where, "warning")
    else:
        verdict = row_verdict(keys, num_groups, replicas(first.get("sharding")))
    return (
        Text(key),
        same_words(held, lambda record: summarize(record, 80)),
        same_words(
            held, lambda record: str(record.get("placements") or record.get("layout") or "")
        ),
        same_words(held, lambda record: str(record.get("device", ""))),
        format_byte_range(record.get("nbytes") for record in held.values()),
        verdict,
    )


# -- containers of plain values --------------------------------------------------------------------


def by_key(records: _Records) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The items of all workers by key, in the order of the first worker that has one."""
    items: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        for item in record["items"]:
            items.setdefault(str(item["key"]), {})[rank] = item["value"]
    return items


def plain_parts(records: _Records) -> list[Part] | None:
    """A row for each worker, a column for each key in which they differ."""
    items = by_key(records)
    differing = {
        key: held
        for key, held in items.items()
        if len({str(content_key(record)) for record in held.values()}) > 1
        or len(held) < len(records)
    }
    unknown = any(record.get("more") for record in records.values())
    if not differing:
        return None if unknown and len({str(content_key(r)) for r in records.values()}) > 1 else []
    shown = list(differing.items())[:_MOST_KEYS]
    rows = []
    odd = {key: set(_odd(held)) for key, held in shown}
    for rank in sorted(records):
        cells = [
            Text(
                summarize(held[rank], 40) if rank in held else "–",
                "warning" if rank in odd[key] else "plain",
            )
            for key, held in shown
        ]
        rows.append(Row(tuple(cells), (rank,)))
    columns = tuple(Column(key, _align(held)) for key, held in shown)
    parts: list[Part] = [Table(columns, tuple(rows))]
    same = len(items) - len(differing)
    words = []
    if len(differing) > len(shown):
        words.append(f"{len(differing) - len(shown)} more keys differ")
    if same:
        words.append(f"{same} other {'key is' if same == 1 else 'keys are'} equal")
    if words:
        parts.append(Text(", ".join(words), "muted"))
    return parts


def _odd(held: _Records) -> list[int]:
    """The workers outside a majority, if there is one."""
    keys = {rank: str(content_key(record)) for rank, record in held.items()}
    return odd_ranks(keys, sorted(keys)) if len(set(keys.values())) < len(keys) else []


def _align(held: _Records) -> Align:
    numbers = all(record.get("type") in ("int", "float") for record in held.values())
    return "right" if numbers else "left"


# -- rows as tables: those that differ in sight, the usual ones folded -----------------------------


def same_words(held: _Records, words: Callable[[Mapping[str, Any]], str]) -> Text:
    """What all workers say of something, or what each says."""
    groups = grouped({rank: words(record) for rank, record in held.items()})
    if len(groups) == 1:
        return Text(groups[0][0])
    told = [f"{text or 'none'} on {ranks}" for text, ranks in groups[:3]]
    return Text("; ".join(told) + ("; …" if len(groups) > 3 else ""))


def format_byte_range(counts: Iterable[object]) -> Text:
    known = [count for count in counts if isinstance(count, int)]
    if not known:
        return Text("")
    low, high = min(known), max(known)
    return Text(format_bytes(low) if low == high else f"{format_bytes(low)} – {format_bytes(high)}")


def few_distinct(verdicts: Sequence[Text]) -> set[int]:
    """The places of a few "distinct" among many "equal": parameters that were missed, it seems.

    Where a good part is distinct, as with shards, nothing is said against it.
    """
    distinct = {place for place, verdict in enumerate(verdicts) if verdict.text == "distinct"}
    equal = sum(verdict.text == "equal" for verdict in verdicts)
    return distinct if 4 * len(distinct) <= equal else set()


def section_parts(
    words: str, titles: Sequence[str], rows: Sequence[tuple[Text, ...]], left: int
) -> list[Part]:
    """The rows as a table; where there are many, the usual ones in a section to be opened."""
    if not rows:
        return []
    place = titles.index("workers")
    odd = [row for row in rows if row[place].role == "warning"]
    usual = [row for row in rows if row[place].role != "warning"]
    if len(rows) <= _MOST_OPEN and not left:
        if odd:
            return [_table(titles, rows)]
        return [Details(f"{words}: {len(rows)}{_verdict(usual, place)}", _table(titles, rows))]
    parts: list[Part] = []
    if odd:
        more = f", the first {_MOST_ROWS}" if len(odd) > _MOST_ROWS else ""
        parts.append(Text(f"{words} that differ: {len(odd)} of {len(rows) + left}{more}"))
        parts.append(_table(titles, odd[:_MOST_ROWS]))
    said = Counter(row[place].text for row in usual)
    usual.sort(key=lambda row: said[row[place].text])  # what is rare is not left out
    shown = usual[: max(_MOST_ROWS - len(odd), _MOST_OPEN)]
    if shown:
        which = "the others" if odd else words
        body = _table(titles, shown)
        unseen = len(usual) - len(shown) + left
        first = f"{which}: {len(usual) + left}{_verdict(usual, place) if not left else ''}"
        rest = [Text(f"and {unseen} more", "muted")] if unseen else []
        parts.append(Details(first, VStack((body, *rest))))
    return parts


def verdict_of(
    words: str, titles: Sequence[str], rows: Sequence[tuple[Text, ...]], left: int = 0
) -> Text | None:
    """How the workers compare in all rows, where that is not one word for all of them.

    `left` counts those that there are no rows of.
    """
    cells = [row[titles.index("workers")] for row in rows]
    odd = sum(cell.role == "warning" for cell in cells)
    if odd:
        verb = "differs" if odd == 1 else "differ"
        return Text(f"{odd} of {len(rows) + left} {words} {verb}", "warning")
    said = [cell.text for cell in cells if cell.text]
    if len(set(said)) < 2:
        return None
    return Text(f"{said.count('distinct')} of {len(rows) + left} {words} distinct", "muted")


def _verdict(rows: Sequence[tuple[Text, ...]], place: int) -> str:
    """What all rows say of the workers, if they say the same."""
    said = {row[place].text for row in rows}
    word = said.pop() if len(said) == 1 else ""
    return f", all {word}" if word else ""


def _table(titles: Sequence[str], rows: Sequence[tuple[Text, ...]]) -> Table:
    used = [place for place in range(len(titles)) if any(row[place].text for row in rows)]
    return Table(
        tuple(
            Column(titles[place], "right" if titles[place] in _RIGHT else "left") for place in used
        ),
        tuple(Row(tuple(row[place] for place in used)) for row in rows),
    )
