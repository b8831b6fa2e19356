"""Lowers `Source` and `Across` to HTML: lines that keep their places in plain markup too. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats import format_ranks
from ..parts import Across, AcrossRow, Heat, Mark, Source, SourceLine, Span
from .across import (
    CHANGED,
    DIFFERS,
    MOST_COLUMNS,
    SIGNS,
    label_of,
    lines_of,
    listed,
    runs_of,
    sizes_of,
)
from .html_base import escaped, rank_colour, rank_fill
from .html_heat import heat_source

_SIDE = 28  # pixels of a thumbnail


def uses_program_style(html: str) -> bool:
    """Whether anything in it is drawn here."""
    return '<pre class="q">' in html or '<div class="o">' in html


def source_html(source: Source) -> str:
    """Numbered lines, in front of them who is there in the workers' colours."""
    wide, digits = sizes_of(source)
    lines = []
    for line in lines_of(source):
        if line is None:
            lines.append(f'<span class="m">{" " * (wide + 1)}{"⋮".rjust(digits)}</span>')
        else:
            lines.append(_line(line, wide, digits))
    return '<pre class="q">' + "\n".join(lines) + "</pre>"


def _line(line: SourceLine, wide: int, digits: int) -> str:
    text = escaped(line.text.expandtabs(4))
    if not line.marks:
        return f'{" " * (wide + 1)}<span class="m">{line.number:>{digits}}</span>  {text}'
    width = sum(len(format_ranks(mark.ranks)) + 3 for mark in line.marks) - 1
    marks = " ".join(map(_mark, line.marks))
    look = "at" if any(mark.look != "waiting" for mark in line.marks) else "by"
    return (
        f'<span class="{look}">{" " * (wide - width)}{marks} '
        f'<span class="m">{line.number:>{digits}}</span>  {text}</span>'
    )


def _mark(mark: Mark) -> str:
    fill = rank_fill(mark.ranks)
    badge = f'<b style="background:{fill}">{format_ranks(mark.ranks)}</b>'
    return f"{badge} {SIGNS.get(mark.look, '?')}"


def across_html(across: Across) -> str:
    """A column a worker; of many workers the values of each row in a list."""
    ranks = across.ranks
    columns = len(ranks) <= MOST_COLUMNS
    if columns:
        heads = "".join(map(_rank_head, ranks))
    else:
        heads = f'<th scope="col">{len(ranks)} workers</th>'
    marks = any(row.differs for row in across.rows)
    about = any(row.about for row in across.rows)
    front = "".join(
        f'<th scope="col">{escaped(head)}</th>' for head in across.heads[: 2 if about else 1]
    )
    front = ("<th></th>" if marks else "") + front
    body = "".join(_row(row, ranks, columns, marks, about) for row in across.rows)
    return (
        f'<div class="o"><table class="d"><thead><tr>{front}{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _rank_head(rank: int) -> str:
    return f'<th scope="col" style="border-bottom:3px solid {rank_colour(rank)}">worker {rank}</th>'


def _row(row: AcrossRow, ranks: Sequence[int], columns: bool, marks: bool, about: bool) -> str:
    cells = ""
    if marks:
        cells = f"<td>{_differs(row)}</td>"
    dot = f' <span class="ch">{CHANGED}</span>' if row.changed else ""
    cells += f'<th scope="row" class="i">{escaped(row.name)}{dot}</th>'
    if about:
        cells += f'<td class="m ab">{escaped(row.about)}</td>'
    if columns:
        cells += "".join(_cell(span, held, ranks) for span, held in runs_of(row, ranks))
    else:
        cells += f'<td class="ls">{_listed(row, ranks)}</td>'
    return f"<tr>{cells}</tr>"


def _differs(row: AcrossRow) -> str:
    """Loud only where somebody stands out: shards always differ."""
    if not row.differs:
        return ""
    loud = any(span.words.role in ("warning", "error") for span in row.spans)
    return f'<span class="{"w" if loud else "m"}">{DIFFERS}</span>'


def _cell(span: Span | None, held: Sequence[int], ranks: Sequence[int]) -> str:
    if span is None:
        return f'<td colspan="{len(held)}"></td>' if len(held) > 1 else "<td></td>"
    label = label_of(held, ranks)
    over = f' colspan="{len(held)}" class="f"' if len(held) > 1 else ""
    return f"<td{over}>{_label(label)}{_content(span)}</td>"


def _label(label: str) -> str:
    return f'<span class="m">{label}</span>' if label else ""


def _content(span: Span) -> str:
    words = span.words
    css = {"muted": "m", "warning": "w", "error": "e", "good": "ok", "title": "t"}.get(words.role)
    text = f'<span class="{css}">{escaped(words.text)}</span>' if css else escaped(words.text)
    note = f'<span class="m"> · {escaped(span.note)}</span>' if span.note else ""
    picture = f"{_picture(span.heat)} " if span.heat is not None else ""
    return f"{picture}{text}{note}"


def _picture(heat: Heat) -> str:
    height, width = len(heat.levels), len(heat.levels[0])
    scale = _SIDE / max(height, width)
    tall, wide = (max(round(side * scale), 6) for side in (height, width))
    size = f'width="{wide}" height="{tall}" style="height:{tall}px"'
    return f'<img class="h" {size} src="{heat_source(heat)}" alt="{escaped(heat.alt)}">'


def _listed(row: AcrossRow, ranks: Sequence[int]) -> str:
    if len(row.spans) == 1 and len(row.spans[0].ranks) == len(ranks):
        return _label(label_of(ranks, ranks)) + _content(row.spans[0])
    shown, more = listed(row)
    items = [
        f'<span class="v"><b style="background:{rank_fill(span.ranks)}">'
        f"{format_ranks(span.ranks)}</b> {_content(span)} </span>"
        for span in shown
    ]
    return "".join(items) + (f'<span class="m">and {more} more values</span>' if more else "")
