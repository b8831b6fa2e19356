"""The operation at which a NaN hunt has stopped: inputs and output, side by side. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ...views.formats import format_workers
from ...views.parts import ComparisonTable, Line, Part, Text
from ..stops import Record, Stop
from .values import row_of
from .variables import by_name


def operation_parts(stop: Stop) -> list[Part]:
    """A table for each operation that workers stand at."""
    found: dict[str, dict[int, Mapping[str, Record]]] = {}
    for worker in stop.workers:
        if worker.found is not None:
            op, records = worker.found
            found.setdefault(op, {})[worker.rank] = records
    parts: list[Part] = []
    for op, values in found.items():
        ranks = sorted(values)
        whose = "" if len(ranks) == len(stop.workers) else f" on {format_workers(ranks)}"
        rows = [row_of(name, held, ranks) for name, held in by_name(values).items()]
        parts.append(Line((Text(op, "title"), Text(whose, "muted"))))
        parts.append(ComparisonTable(("value", ""), tuple(ranks), tuple(rows)))
    return parts
