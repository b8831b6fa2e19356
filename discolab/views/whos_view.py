"""Draws all variables of all workers, as ``%whos`` does in one process: one row a variable.

A pure function of the records that `describe` made on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .dref.children import differ_but_for_values
from .dref.contents import grouped
from .dref.summary import LayoutFacts, ValueSummary, summarize_value
from .formats import cut, format_bytes, format_ranks
from .parts import Card, Column, Line, Part, Row, Table, Text
from .summary import format_module, format_tensor, format_values, summarize

_LIMIT = 44  # characters of a cell
_MOST_ROWS = 250
_TITLES = ("name", "type", "layout", "bytes", "contents", "value")


@dataclass(frozen=True)
class Variables:
    """The variables of one worker: records of `describe` by name, bytes, and what is no value.

    Attributes
    ----------
    others
        Functions, classes and modules: name -> what it is.
    """

    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nbytes: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)


def whos_parts(
    title: str,
    workers: Mapping[int, Variables],
    known: LayoutFacts,
    missing: Mapping[int, str] | None = None,
) -> Part:
    """Draw the variables of all workers as parts.

    Parameters
    ----------
    title
        Whose they are: the session.
    workers
        By rank, as far as they have answered.
    known
        How they hold values, as far as the controller knows.
    missing
        What the others do: ``busy in the cell``.

    Examples
    --------
    >>> from discolab.views import describe, render_text
    >>> one, two = ({"x": describe(3), "y": describe(rank)} for rank in range(2))
    >>> workers = {0: Variables(one), 1: Variables(two)}
    >>> print(render_text(whos_parts("sess", workers, LayoutFacts(num_workers=2))))
    sess · 2 variables on 2 workers
      name  type  contents     value
      x     int   ✓ equal      3
      y     int   2 different  0 | 1
    """
    names = sorted({name for variables in workers.values() for name in variables.records})
    count = f"{len(names):,} variable{'' if len(names) == 1 else 's'}" if names else "no variables"
    plural = "" if known.num_workers == 1 else "s"
    head = Line((Text(title, "title"), Text(f" · {count} on {known.num_workers} worker{plural}")))
    parts: list[Part] = []
    if names:
        rows = [_row(name, workers, known) for name in names[:_MOST_ROWS]]
        kept = [title for title in _TITLES if any(row[title].text for row in rows)]
        columns = [Column(title, "right" if title == "bytes" else "left") for title in kept]
        cells = [Row(tuple(row[title] for title in kept)) for row in rows]
        parts.append(Table(tuple(columns), tuple(cells)))
    if len(names) > _MOST_ROWS:
        parts.append(Text(f"and {len(names) - _MOST_ROWS:,} more: %disco_whos a*", "muted"))
    parts += _others(workers)
    for words, ranks in grouped(dict(missing or {})):
        some = f"worker{'' if ranks.isdigit() else 's'} {ranks}"
        parts.append(Text(f"{some}: {words}", "warning"))
    return Card(head, tuple(parts)) if parts else head


def _row(name: str, workers: Mapping[int, Variables], known: LayoutFacts) -> dict[str, Text]:
    records = {rank: v.records[name] for rank, v in workers.items() if name in v.records}
    sizes = {v.nbytes.get(name, 0) for rank, v in workers.items() if rank in records}
    try:
        summary = summarize_value(records, name, known)
        kind, layout = _type(summary), _layout(summary)
        contents = _contents(summary, sorted(workers))
        value = _values(records)
    except Exception as error:  # a view never raises
        failed = Text(f"not drawn: {type(error).__name__}", "error")
        kind, layout, contents, value = summarize(records[min(records)], _LIMIT), "", failed, ""
    return {
        "name": Text(cut(name, _LIMIT)),
        "type": Text(kind),
        "layout": Text(layout, "muted"),
        "bytes": Text(_range(sizes)),
        "contents": contents,
        "value": Text(value, "muted"),
    }


def _range(sizes: set[int]) -> str:
    """The bytes of each worker, or the least and the most of them; nothing for none."""
    ends = sorted({min(sizes), max(sizes)}) if any(sizes) else []
    return "–".join(format_bytes(size) for size in ends)


def _type(summary: ValueSummary) -> str:
    """The type, and of tensors that make up one the shape of that."""
    first = summary.first
    if summary.plans and len({plan.logical for plan in summary.plans}) == 1:
        return cut(format_tensor(first, summary.plans[0].logical), _LIMIT)
    types = {rank: _short_type(record) for rank, record in summary.good.items()}
    groups = grouped(types)
    if len(groups) == 1:
        return groups[0][0]
    return cut(", ".join(f"{kind} on {ranks}" for kind, ranks in groups), _LIMIT)


def _short_type(record: Mapping[str, Any]) -> str:
    kind = record.get("kind")
    if kind == "module":
        return cut(format_module(record, with_size=False), _LIMIT)  # a column has its bytes
    if kind == "tensor":
        return summarize(record, _LIMIT)
    name = str(record.get("type", "NoneType" if kind == "none" else kind))
    length = record.get("length")
    return name if length is None or name in ("str", "bytes") else f"{name} of {length:,}"


def _layout(summary: ValueSummary) -> str:
    if not summary.plans or not (summary.plans[0].sharded or not summary.inferred):
        return ""
    return summary.plans[0].words + (" (inferred)" if summary.inferred else "")


def _contents(summary: ValueSummary, asked: Sequence[int]) -> Text:
    """Whether all that have it hold the same, and who does not have it."""
    ranks = sorted(summary.good)
    only = "" if ranks == list(asked) else f", on {format_ranks(ranks)} only"
    if len(ranks) < 2:
        return Text(only.removeprefix(", "), "muted")
    classes = summary.classes
    if classes is None:
        return Text(f"not compared{only}", "muted")
    different = len(set(classes.values()))
    if different == 1 and differ_but_for_values(summary.good):
        return Text(f"≠ set up differently{only}", "warning")
    if different == 1:
        return Text(f"✓ equal{only}", "good")
    agree = [group for plan in summary.plans for group in plan.replicas]
    if any(len({classes[rank] for rank in group}) > 1 for group in agree):
        return Text(f"≠ differ{only}", "warning")
    if different == len(ranks):
        return Text(f"{different} different{only}", "muted")
    apart = " | ".join(ranks for _, ranks in grouped(classes))
    return Text(f"{different} different: {apart}{only}")


def _values(records: Mapping[int, Mapping[str, Any]]) -> str:
    """What is short enough to be written out: plain values and small tensors."""
    words = {rank: _value(record) for rank, record in records.items()}
    if not all(words.values()):
        return ""
    return cut(" | ".join(text for text, _ in grouped(words)), _LIMIT)


def _value(record: Mapping[str, Any]) -> str:
    kind = record.get("kind")
    if kind == "tensor":
        return format_values(record)
    return "" if kind == "module" else summarize(record, _LIMIT)


def _others(workers: Mapping[int, Variables]) -> list[Part]:
    """Functions, classes and modules: by name only, one line a kind."""
    kinds: dict[str, set[str]] = {}
    for variables in workers.values():
        for name, kind in variables.others.items():
            kinds.setdefault(kind, set()).add(name)
    return [
        Line((Text(f"{kind}: ", "muted"), Text(cut(", ".join(sorted(names)), 160), "muted")))
        for kind, names in sorted(kinds.items())
    ]
