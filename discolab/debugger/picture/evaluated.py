"""Draws what an expression is on several workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...views.formats import cut, format_workers
from ...views.parts import ComparisonTable, Line, Part, Text, VStack
from .values import row_of


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
