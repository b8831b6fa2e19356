"""Draws the live registers of a session: a table, its totals, and for leaks the lines behind them.

Pure: rows are what `RegisterTable` has found.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..formats import cut, format_bytes
from ..parts import Column, Line, Part, Role, Row, Table, Text, VStack, without_empty_columns
from .table import READING, Group, format_age, format_bytes_each
from .table import Row as Register

MOST_ROWS = 50
_MOST_GROUPS = 12
_MOST_CELLS = 4
_LIMIT = 60  # characters of one cell


def registers_parts(
    title: str,
    rows: Sequence[Register],
    every: Sequence[Register],
    groups: Sequence[Group] | None = None,
) -> Part:
    """Draw a table of registers as parts.

    Parameters
    ----------
    title
        What they are of: the session.
    rows
        Those to be shown, in order; at most 50 are.
    every
        All of the session's, for the totals.
    groups
        The lines that made what may be leaks; None: leaks are not asked for.
    """
    spans = [Text(title, "title"), Text(f" · {format_totals(every)}")]
    if len(rows) != len(every) and groups is None:
        spans.append(Text(f" · {len(rows)} of them match", "muted"))
    children: list[Part] = [Line(tuple(spans))]
    if groups is not None:
        children += _leak_parts(rows, groups)
    if rows:
        children.append(_table(rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        rest = sum(row.total for row in rows[MOST_ROWS:])
        words = f"and {len(rows) - MOST_ROWS:,} more, {format_bytes(rest)}"
        children.append(Text(words, "muted"))
    return VStack(tuple(children))


def format_totals(rows: Sequence[Register]) -> str:
    """How many there are, their bytes on all workers together, and how many are not well.

    Bytes are "at least" so many while some were not read yet.
    """
    if not rows:
        return "no live registers"
    plural = "" if len(rows) == 1 else "s"
    total, states = 0, {"poisoned": 0, "lost": 0, "restored": 0, "pending": 0, READING: 0}
    for row in rows:
        total += row.total
        if row.state != "ok":
            states[row.state.partition(" ")[0]] += 1
    least = "at least " if states[READING] else ""
    words = [f"{len(rows):,} live register{plural}", least + format_bytes(total)]
    words += [f"{count:,} {state}" for state, count in states.items() if count]
    return " · ".join(words)


def cells_of(row: Register) -> tuple[str, ...]:
    """A row in words: register, name, type, layout, bytes, total, made by, held by, state."""
    return (
        f"r{row.reg_id}",
        cut(row.name, _LIMIT) or "-",
        cut(row.type or row.problem or "?", _LIMIT),
        cut(row.layout, _LIMIT),
        format_bytes_each(row.nbytes),
        format_bytes(row.total) if row.total else "",
        cut(row.made_by, _LIMIT),
        cut(format_holders(row), _LIMIT),
        row.state,
    )


def format_holders(row: Register) -> str:
    """Who holds it; nothing where its name says that already."""
    return "" if row.held_by == (row.name,) else ", ".join(row.held_by)


def format_growth(group: Group) -> str:
    """How many of a group each of the last cells has made: ``+4 in [5], +4 in [6]``."""
    shown = group.by_cell[-_MOST_CELLS:]
    words = ", ".join(f"+{count} in [{cell}]" if cell else f"{count}" for cell, count in shown)
    return f"…, {words}" if len(group.by_cell) > len(shown) else words


def format_leak_reason(group: Group) -> str:
    """Why a group is among the leaks."""
    reasons = []
    if group.unnamed:
        some = "" if group.unnamed == group.count else f" {group.unnamed} of them"
        reasons.append(f"no name leads to{some or (' it' if group.count == 1 else ' them')}")
    if group.grows:
        reasons.append("grows with each cell")
    return "; ".join(reasons)


def _leak_parts(rows: Sequence[Register], groups: Sequence[Group]) -> list[Part]:
    if not groups:
        return [Text("nothing leaks: names of the notebook lead to all that there is")]
    found = f"{len(rows):,} may be leaks: no name leads to them, or a line makes more and more"
    columns = (
        Column("made by"),
        Column("count", "right"),
        Column("bytes", "right"),
        Column("made in"),
        Column("why"),
    )
    lines = [
        Row(
            (
                Text(cut(group.made_by, _LIMIT)),
                Text(f"{group.count:,}"),
                Text(format_bytes(group.nbytes)),
                Text(format_growth(group), "muted"),
                Text(format_leak_reason(group), "warning" if group.grows else "plain"),
            )
        )
        for group in groups[:_MOST_GROUPS]
    ]
    children: list[Part] = [Text(found), Table(columns, tuple(lines))]
    if len(groups) > _MOST_GROUPS:
        children.append(Text(f"and {len(groups) - _MOST_GROUPS} more lines", "muted"))
    return children


def _table(rows: Sequence[Register]) -> Table:
    heads = ("register", "name", "type", "layout", "bytes", "total", "made by", "held by", "state")
    right = {"register", "bytes", "total", "age"}
    body = [(cells_of(row), format_age(row.age)) for row in rows]
    columns = [Column(head, "right" if head in right else "left") for head in heads]
    columns.insert(6, Column("age", "right"))
    lines = [
        Row((*map(Text, cells[:6]), Text(age, "muted"), *map(Text, cells[6:8]), _state(row)))
        for (cells, age), row in zip(body, rows, strict=True)
    ]
    return without_empty_columns(Table(tuple(columns), tuple(lines)))


def _state(row: Register) -> Text:
    if row.problem:
        role: Role = "warning" if row.state.startswith("lost") else "error"
        return Text(cut(f"{row.state}: {row.problem}", 2 * _LIMIT), role)
    if row.state.startswith("restored"):
        return Text(row.state, "good")
    return Text(row.state, "muted" if row.state == "ok" else "warning")
