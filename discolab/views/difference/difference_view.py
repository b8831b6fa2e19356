"""Draws what a comparison of two values found: a row for each worker, or for each name.

Pure: made from the rows that `difference.compare_values` took on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..dref.differences import pair_words
from ..formats import cut, format_number, format_ranks, format_shape, format_workers
from ..parts import Card, Column, Details, Line, Part, Row, Table, Text, VStack

_MOST_ROWS = 40
_RIGHT = {"max |a - b|", "mean", "relative", "a", "b"}
_FACTS = ("over tolerance", "NaN in one", "max |a - b|", "at", "a", "b", "relative", "mean")

_Rows: TypeAlias = Mapping[int, Sequence[Mapping[str, Any]]]
_Cells: TypeAlias = tuple[Mapping[str, Text], tuple[int, ...]]


def comparison_parts(
    names: tuple[str, str], records: _Rows, counts: Mapping[int, Mapping[str, int]]
) -> Part:
    """Draw a comparison.

    Parameters
    ----------
    names
        What the two are called.
    records : mapping of rank to rows
    counts : mapping of rank to dict
        ``rows``, ``over`` and ``differ`` of all rows, told or not.
    """
    lone = all(len(rows) == 1 and rows[0].get("name") == "" for rows in records.values())
    title = Line(
        (
            Text(f"{cut(names[0], 60)} against {cut(names[1], 60)}", "title"),
            Text(f" · {_what(records, lone, counts)} on {_workers(len(records))} · "),
            _verdict(records, counts),
        )
    )
    below = _by_worker(records) if lone else _by_name(records, counts)
    return Card(title, tuple(below))


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _what(records: _Rows, lone: bool, counts: Mapping[int, Mapping[str, int]]) -> str:
    rows = [row for rows in records.values() for row in rows]
    words = {f"{row['dtype']}{format_shape(row['shape'])}" for row in rows if "dtype" in row}
    if lone:
        return words.pop() if len(words) == 1 else "values"
    return f"{max((count['rows'] for count in counts.values()), default=0):,} values"


def _verdict(records: _Rows, counts: Mapping[int, Mapping[str, int]]) -> Text:
    over = [rank for rank, count in sorted(counts.items()) if count["over"]]
    if over:
        if all(counts[rank]["over"] == counts[rank].get("no_data") for rank in over):
            return Text(f"no data to compare on {format_workers(over)}", "warning")
        return Text(f"≠ differ on {format_workers(over)}", "warning")
    if any(count["differ"] for count in counts.values()):
        return Text(f"✓ equal within {_tolerance(records)}", "good")
    return Text("✓ identical", "good")


def _tolerance(records: _Rows) -> str:
    known = {
        (row["rtol"], row["atol"]) for rows in records.values() for row in rows if "rtol" in row
    }
    if len(known) != 1:
        return "the tolerances of their dtypes"
    rtol, atol = known.pop()
    return f"rtol {rtol:g}, atol {atol:g}"


def _facts(row: Mapping[str, Any]) -> dict[str, Text]:
    """The cells of one pair; of two that are the same nothing but that they are."""
    if "problem" in row:
        return {"over tolerance": Text(str(row["problem"]), "warning")}
    over, size = row.get("over", 0), row.get("size", 1)
    cells = {
        "max |a - b|": Text(format_number(row.get("max_abs"))),
        "over tolerance": Text(f"{over:,} of {size:,}", "warning" if over else "plain"),
    }
    if row.get("differ"):
        a, b = pair_words(row.get("a"), row.get("b"))
        cells |= {
            "at": Text(format_shape(row["index"]) if "index" in row else ""),
            "a": Text(cut(a, 40)),
            "b": Text(cut(b, 40)),
            "relative": Text(format_number(row.get("max_rel"))),
            "mean": Text(format_number(row.get("mean_abs"))),
        }
    if row.get("nan_one"):
        cells["NaN in one"] = Text(f"{row['nan_one']:,}", "warning")
    return cells


def _by_worker(records: _Rows) -> list[Part]:
    """One pair of tensors: a row for each worker."""
    rows = [(rank, {**_dtypes(rows[0]), **_facts(rows[0])}) for rank, rows in records.items()]
    return [_table(("dtypes", *_FACTS), [(cells, (rank,)) for rank, cells in sorted(rows)])]


def _dtypes(row: Mapping[str, Any]) -> dict[str, Text]:
    if "other_dtype" not in row:
        return {}
    return {"dtypes": Text(f"{row['dtype']}, {row['other_dtype']}")}


def _by_name(records: _Rows, counts: Mapping[int, Mapping[str, int]]) -> list[Part]:
    """Many pairs: a row for each name, with the facts of the worker on which it is worst."""
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, rows in sorted(records.items()):
        for row in rows:
            by_name.setdefault(str(row.get("name")), {})[rank] = row
    odd: list[_Cells] = []
    usual: list[_Cells] = []
    for name, held in by_name.items():
        bad = [rank for rank, row in held.items() if row.get("over") or "problem" in row]
        worst = max(held, key=lambda rank: _badness(held[rank]))
        row = held[worst]
        words = f"{row['dtype']}{format_shape(row['shape'])}" if "dtype" in row else ""
        cells = {"name": Text(cut(name, 80)), "value": Text(words), **_dtypes(row), **_facts(row)}
        if bad:
            cells["differs on"] = Text(format_ranks(bad), "warning")
            cells["worst on"] = Text(str(worst) if len(bad) > 1 else "")
        (odd if bad else usual).append((cells, ()))
    titles = ("name", "value", "dtypes", "differs on", "worst on", *_FACTS)
    parts: list[Part] = []
    if odd:
        parts.append(_table(titles, odd[:_MOST_ROWS]))
    total = max(count["rows"] for count in counts.values())
    if len(odd) > _MOST_ROWS:
        parts.append(Text(f"and {len(odd) - _MOST_ROWS} more that differ", "muted"))
    if usual:
        shown = usual[:_MOST_ROWS]
        rest = max(total - len(odd), len(usual)) - len(shown)
        same = not any("a" in cells for cells, _ in usual)
        body: Part = _table(titles[:3] if same else titles, shown)
        if rest:
            body = VStack((body, Text(f"and {rest} more", "muted")))
        words = "identical" if same else "within tolerance"
        parts.append(Details(f"{words}: {rest + len(shown)}", body))
    return parts


def _badness(row: Mapping[str, Any]) -> tuple[bool, int, float]:
    over = row.get("over", 0)
    return "problem" in row, int(bool(row.get("nan_one"))), row.get("max_abs", 0.0) or float(over)


def _table(titles: Sequence[str], rows: Sequence[_Cells]) -> Table:
    used = [title for title in titles if any(title in cells for cells, _ in rows)]
    used = [t for t in used if any(cells[t].text for cells, _ in rows if t in cells)]
    return Table(
        tuple(Column(title, "right" if title in _RIGHT else "left") for title in used),
        tuple(
            Row(tuple(cells.get(title, Text("")) for title in used), ranks) for cells, ranks in rows
        ),
    )
