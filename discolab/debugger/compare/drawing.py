"""Draws a comparison: what comes first and why, then how the error grows over the program. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...views.dref.differences import pair_words
from ...views.formats import cut, format_number, format_ranks, format_shape, format_workers
from ...views.parts import Bars, Card, Column, Details, Line, Part, Row, Stack, Table, Text
from .results import Comparison, Finding, Point

_MOST_ROWS = 400
_BEFORE, _AFTER = 3, 4  # rows of the program around the first difference
_MOST_BARS = 40
_LOWEST = 1e-9  # a relative error that has no height
_NAME = 56


def comparison_parts(found: Comparison) -> Part:
    """Draw it."""
    verdict = (
        Text("nothing was compared", "error")
        if found.first is None and found.is_empty
        else Text("✓ agrees where it could be compared", "good")
        if found.agrees and (found.unmatched or found.partly)
        else Text("✓ agrees", "good")
        if found.agrees
        else Text(f"≠ differs on {format_workers(found.first.ranks)}", "error")
        if found.first is not None and found.first.ranks
        else Text("≠ differs", "error")
    )
    ours, theirs = found.names
    title = Line(
        (
            Text(f"{cut(theirs, 40)} against {cut(ours, 40)}", "title"),
            Text(f" · {found.num_workers} worker{'s' * (found.num_workers > 1)} · "),
            verdict,
        )
    )
    body = _agreement(found) if found.first is None else _difference(found, found.first)
    return Card(title, (*body, *_rest(found)))


# -- the verdict -----------------------------------------------------------------------------------


def _agreement(found: Comparison) -> list[Part]:
    worst = found.worst
    counts = [
        f"{len(points)} {words}"
        for points, words in (
            (found.parameters, "parameters"),
            (found.points, "values in forward"),
            (found.gradients, "gradients"),
        )
        if points
    ]
    if found.plain:
        counts.append(f"{found.plain} value{'s' * (found.plain > 1)} that are no tensors")
    parts: list[Part] = [Text(f"compared: {', '.join(counts) or 'nothing'}")]
    sums = [p for p in (*found.points, *found.gradients) if p.sampled and p.sampled < p.size]
    if sums:
        told = f"sums of {len(sums)} values were compared at {sums[0].sampled:,} elements of each"
        parts.append(Text(told, "muted"))
    if worst is not None and worst.error:
        parts.append(
            Text(
                f"largest error: {format_number(worst.relative)} of a typical element, "
                f"{worst.words}",
                "muted",
            )
        )
    elif worst is not None:
        parts.append(Text("no element differs", "muted"))
    return [*parts, *_sparklines(found)]


def _difference(found: Comparison, first: Finding) -> list[Part]:
    point = first.point
    head = Line((Text("first difference: "), Text(point.words, "title")))
    parts: list[Part] = [head]
    parts += [Text(cause, "warning") for cause in first.causes]
    if first.place:
        parts.append(Text(first.place))
    if not point.problem:
        parts += [Text(_lies(point), "muted"), _by_worker(point)]
    parts += _sparklines(found)
    group: Sequence[Point] = next(
        (
            points
            for points in (found.parameters, found.points, found.gradients)
            if any(p.key == point.key for p in points)
        ),
        (),
    )
    if group and (point.kind not in ("parameter", "buffer") or point.gradient):
        at = next(n for n, p in enumerate(group) if p.key == point.key)
        near = group[max(at - _BEFORE, 0) : at + _AFTER + 1]
        words = "backward" if point.gradient else "forward"
        parts += [Text(f"around it, in the order of {words}", "title"), _table(near, first)]
    return parts


def _lies(point: Point) -> str:
    who = {"given": "as given", "DTensor": "as its DTensor says", "inferred": "inferred"}
    words = f"{point.dtype}{format_shape(list(point.shape))} lies as {point.layout}"
    words += f", {who.get(point.source, point.source)}"
    if point.partial and point.sampled:
        words += f"; the sum was compared at {point.sampled:,} elements"
    return words


def _by_worker(point: Point) -> Table:
    """What each worker holds at its worst element."""
    who = "sum of them" if point.partial else "worker"
    columns = ("max |a - b|", "over tolerance", "at", who, "reference")
    right = {"max |a - b|", who, "reference"}
    rows = []
    for rank, row in sorted(point.rows.items()):
        over, size = row["over"], row["size"]
        a, b = pair_words(row.get("a"), row.get("b")) if row.get("place") is not None else ("", "")
        cells = (
            Text(format_number(row["max_abs"])),
            Text(f"{over:,} of {size:,}", "warning" if over else "plain"),
            Text(format_shape(row["index"]) if row.get("index") is not None else ""),
            Text(a),
            Text(b),
        )
        ranks = tuple(point.ranks) if point.partial else (rank,)
        rows.append(Row(cells, ranks or (rank,)))
    titles = tuple(Column(title, "right" if title in right else "left") for title in columns)
    return Table(titles, tuple(rows))


# -- the error over the program --------------------------------------------------------------------


def _sparklines(found: Comparison) -> list[Part]:
    """How the error grows, a bar for each output."""
    rows = []
    for words, points in (("forward", found.points), ("backward", found.gradients)):
        shown = [p for p in points if p.kind in ("output", "note", "result") or p.gradient]
        shown = [p for p in shown if p.kind != "result" or len(shown) == 1] or shown
        if len(shown) < 2:
            continue
        largest = max(point.relative for point in shown)
        alt = f"relative error of {len(shown)} values in {words}, up to {format_number(largest)}"
        rows.append(Row((Text(words), Text(format_number(largest)), Bars(_heights(shown), alt))))
    if not rows:
        return []
    titles = ("error", "largest", "a bar for each value, logarithmic")
    return [Table(tuple(Column(title) for title in titles), tuple(rows))]


def _heights(points: Sequence[Point]) -> tuple[float, ...]:
    """Heights on a logarithmic scale; of many points the largest of each stretch."""
    step = max(math.ceil(len(points) / _MOST_BARS), 1)
    stretches = [points[at : at + step] for at in range(0, len(points), step)]
    return tuple(_height(max(point.relative for point in each)) for each in stretches)


def _height(relative: float) -> float:
    if not relative > _LOWEST:
        return 0.0
    return min(math.log10(relative / _LOWEST) / -math.log10(_LOWEST), 0.999)


def _told(points: Sequence[Point], first: Finding | None) -> list[Point]:
    """Without what is told already: the program's input and result, if the model's are there."""
    root = {(p.kind, p.leaf, p.gradient, p.error) for p in points if not p.module}
    same = {"argument": "input", "result": "output"}
    return [
        p for p in points
        if (same.get(p.kind), p.leaf, p.gradient, p.error) not in root
        or (first is not None and first.point.key == p.key)
    ]  # fmt: skip


def _table(points: Sequence[Point], first: Finding | None) -> Table:
    rows = []
    for point in _told(points, first)[:_MOST_ROWS]:
        at = first is not None and first.point.key == point.key
        verdict = (
            Text("≠ first", "error")
            if at
            else Text("✓", "plain")
            if point.agrees and not point.partial
            else Text("✓ summed", "plain")
            if point.agrees
            else Text(f"≠ on {format_ranks(point.ranks)}", "warning")
        )
        rows.append(
            Row(
                (
                    verdict,
                    Text(cut(point.words, _NAME)),
                    Text(point.layout),
                    Text("" if point.source == "inferred" else point.source, "muted"),
                    Text(format_number(point.relative)),
                    Text(format_number(point.error)),
                )
            )
        )
    columns = ["", "value", "layout", "who says so", "relative", "max |a - b|"]
    if not any(point.source != "inferred" for point in points):
        columns.remove("who says so")
        rows = [Row((*row.cells[:3], *row.cells[4:])) for row in rows]
    return Table(
        tuple(Column(c, "right" if c in ("relative", "max |a - b|") else "left") for c in columns),
        tuple(rows),
    )


# -- what else there is ----------------------------------------------------------------------------


def _rest(found: Comparison) -> list[Part]:
    parts: list[Part] = [Text(note, "warning") for note in found.notes]
    if found.unmatched:
        rows = tuple(
            Row((Text(cut(p.words, _NAME)), Text(p.problem, "warning"))) for p in found.unmatched
        )
        heads = (Column("value"), Column("why"))
        parts.append(_folded(f"can't be matched: {len(found.unmatched)}", heads, rows))
    for names, where in (
        (found.only_in_reference, "only in the reference"),
        (found.only_in_sharded, "only in the sharded program"),
    ):
        if names:
            words = ", ".join(cut(name, _NAME) for name in names[:24])
            more = f" and {len(names) - 24} more" if len(names) > 24 else ""
            parts.append(Text(f"{where}: {words}{more}", "muted"))
    for points, words in (
        (found.parameters, "parameters"),
        (found.points, "forward"),
        (found.gradients, "gradients"),
    ):
        if points:
            over = sum(not point.agrees for point in points)
            told = f"{len(points)} agree" if not over else f"{over} of {len(points)} differ"
            parts.append(Details(f"{words}: {told}", _table(points, found.first), extra=True))
    return parts


def _folded(summary: str, heads: tuple[Column, ...], rows: tuple[Row, ...]) -> Part:
    body: Part = Table(heads, rows[:24])
    if len(rows) > 24:
        body = Stack((body, Text(f"and {len(rows) - 24} more", "muted")))
    return Details(summary, body)


Comparison.draw = staticmethod(comparison_parts)
