"""Rows of parameters and items as tables: those that differ in sight, the usual ones folded.

Pure. A row is a tuple of cells, one for each title; the cell below "workers" says how the workers
compare in it, and is a warning where one is odd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..formats import format_bytes
from ..parts import Column, Details, Part, Row, Stack, Table, Text
from .compare import grouped

_Records: TypeAlias = Mapping[int, Mapping[str, Any]]

_MOST_ROWS = 40
_MOST_OPEN = 12  # rows that are shown without being asked for
_RIGHT = {"bytes"}


def same_words(held: _Records, words: Callable[[Mapping[str, Any]], str]) -> Text:
    """What all workers say of something, or what each says."""
    groups = grouped({rank: words(record) for rank, record in held.items()})
    if len(groups) == 1:
        return Text(groups[0][0])
    told = [f"{text or 'none'} on {ranks}" for text, ranks in groups[:3]]
    return Text("; ".join(told) + ("; …" if len(groups) > 3 else ""))


def byte_words(counts: Iterable[object]) -> Text:
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
        parts.append(Details(first, Stack((body, *rest))))
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
