"""What the doctor found, as parts: the verdict, who waits for whom, the last collectives.

Pure: a `Diagnosis` is a record, so nothing is asked of the workers. Members that did the same are
joined in one row; one that did something else has a row of its own, marked in text and colour.
Durations stand at line ends, so that they move nothing else from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..ccl.board.rounds import LATE, LEFT, MISSING, STARTED, STOPPED, Entry, Round
from ..ccl.doctor import Diagnosis, Edge, Parcel
from ..runtime.status import WorkerStatus
from .formats import cut, format_ranks, format_seconds, format_workers
from .parts import Column, Line, Part, Role, Row, Table, Text, VStack, fold_rows
from .pictures import picture_of

_LONGEST = 120  # characters of a cell
_FROZEN = "has given no sign of life"  # whatever it did before
_COLUMNS = (
    Column("#", "right"),
    Column("collective"),
    Column("among"),
    Column("state"),
    Column(""),
    Column("called at"),
)
_ROLES: dict[str, Role] = {
    "waiting": "warning",
    STARTED: "plain",
    "dead": "error",
    "failed": "error",
    LATE: "error",
    MISSING: "error",
    LEFT: "error",
    STOPPED: "muted",
}


def doctor_parts(found: Diagnosis) -> Part:
    """Draw a diagnosis.

    Parameters
    ----------
    found : Diagnosis
    """
    parts: list[Part] = [
        Line((Text("doctor", "title"), Text(f" · {found.title}", "muted"))),
        Line((verdict(found),)),
    ]
    if {status.state for status in found.workers} not in ({"idle"}, {"ended"}):
        parts += [_heading("now"), _now(found.workers)]
    if found.waits:
        parts += [_heading("who waits for whom"), *map(_edge_line, _joined(found.waits))]
    if found.messages:
        parts += [_heading("sent, not received"), *_parcel_lines(found.messages)]
    if found.rounds:
        parts += [_heading("the last collectives, oldest first"), _rounds(found)]
    if found.failure:
        parts += [_heading("the last failure"), Text(found.failure)]
    if found.unseen:
        words = f"{format_workers(found.unseen)}: in another process, not seen from here"
        parts.append(Text(words, "muted"))
    return VStack(tuple(parts))


def verdict(found: Diagnosis) -> Text:
    """The first thing to know, in one line."""
    if found.deadlocks:
        knots = "; ".join(format_workers(ranks) for ranks in found.deadlocks)
        return Text(f"deadlock: {knots} wait for each other", "error")
    if found.waits:
        words = dict.fromkeys(_who(edge, ranks) for edge, ranks in _joined(found.waits))
        calm = all(edge.doing for edge in found.waits)
        return Text("; ".join(words), "plain" if calm else "warning")
    dead = [status.rank for status in found.workers if status.state == "dead"]
    if dead:
        return Text(f"{format_workers(dead)} died: %disco_restart starts new ones", "error")
    waiting = [s.rank for s in found.workers if s.state == "waiting" and _FROZEN not in s.detail]
    verb = "waits" if len(waiting) == 1 else "wait"
    # as in a remote call: below it says for what
    who = f"{format_workers(waiting)} {verb} outside any collective" if waiting else "nobody waits"
    if not found.rounds:
        return Text(f"{who}; no collective to show", "warning" if waiting else "muted")
    states = {entry.state for one in found.rounds for entry in one.entries}
    if states == {"done"}:
        return Text(f"{who}; the last collectives are done", "warning" if waiting else "plain")
    if "failed" in states:
        return Text(f"{who}; a collective has failed", "warning")
    if STOPPED in states:
        return Text(f"{who}; a collective was stopped", "warning")
    return Text(who, "warning")


def _heading(text: str) -> Text:
    return Text(text, "title")


def _now(workers: Iterable[WorkerStatus]) -> Table:
    rows = []
    for status in workers:
        cells = (
            Text(status.state, _ROLES.get(status.state, "plain")),
            Text(cut(status.detail, 2 * _LONGEST)),
        )
        rows.append(Row(cells, (status.rank,)))
    return Table((Column("state"), Column("doing")), fold_rows(tuple(rows)))


# -- edges and messages ------------------------------------------------------------------------


def _joined(edges: Iterable[Edge]) -> list[tuple[Edge, tuple[int, ...]]]:
    """Edges that differ only in who waits, with who that is; each for the longest wait."""
    held: dict[object, list[Edge]] = {}
    for edge in edges:
        key = (edge.whom, edge.any_of, edge.what, edge.site, edge.doing)
        held.setdefault(key, []).append(edge)
    return [
        (max(group, key=lambda edge: edge.seconds), tuple(edge.rank for edge in group))
        for group in held.values()
    ]


def _who(edge: Edge, ranks: tuple[int, ...]) -> str:
    if edge.doing:
        return f"all of {edge.what} have come; {edge.doing}"
    verb = "waits" if len(ranks) == 1 else "wait"
    any_of = "any of " if edge.any_of else ""
    return f"{format_workers(ranks)} {verb} for {any_of}{format_workers(edge.whom)}"


def _edge_line(item: tuple[Edge, tuple[int, ...]]) -> Line:
    edge, ranks = item
    any_of = "any of " if edge.any_of else ""
    where = f" at {edge.site}" if edge.site else ""
    return Line(
        (
            Text("  "),
            Text(format_workers(ranks), "warning"),
            Text(" → "),
            Text(edge.doing) if edge.doing else Text(any_of + format_workers(edge.whom), "error"),
            Text(f"  in {edge.what}{where}"),
            Text(f" · for {format_seconds(edge.seconds)}", "muted"),
        )
    )


def _parcel_lines(parcels: Iterable[Parcel]) -> list[Part]:
    lines: list[Part] = []
    for parcel, same in groupby(parcels):
        count = len(list(same))
        tag = f" with tag {parcel.tag}" if parcel.tag else ""
        times = f"  {count} times" if count > 1 else ""
        whom = f"  worker {parcel.sender} → worker {parcel.receiver}"
        where = f", sent at {parcel.site}" if parcel.site else ""
        lines.append(Line((Text(whom), Text(f"  {parcel.what}{tag}{where}{times}"))))
    return lines


# -- collectives ---------------------------------------------------------------------------------


def _rounds(found: Diagnosis) -> Table:
    """A row for each different thing that members of a collective did."""
    rows: list[Row] = []
    for messages, rounds in groupby(found.rounds, lambda one: one.number is None):
        made = [row for one in rounds for row in _round_rows(one)]
        rows += _folded(made) if messages else made
    used = [any(row.cells[i] != Text("") for row in rows) for i in range(len(_COLUMNS))]
    return Table(
        tuple(column for column, keep in zip(_COLUMNS, used, strict=True) if keep),
        tuple(
            Row(tuple(c for c, keep in zip(row.cells, used, strict=True) if keep), row.ranks)
            for row in rows
        ),
        ordered=True,
    )


def _round_rows(one: Round) -> list[Row]:
    same: dict[object, list[Entry]] = {}
    for entry in one.entries:
        key = (entry.what, entry.state, entry.odd, entry.site)
        same.setdefault(key, []).append(entry)
    among = format_ranks(one.group) + (f" {one.tag}" if one.tag else "")
    number = Text("" if one.number is None else str(one.number))
    return [
        Row((number, *_entry_cells(entries, among if one.number else "")), _ranks(entries))
        for entries in same.values()
    ]


def _entry_cells(entries: list[Entry], among: str) -> tuple[Text, ...]:
    first = entries[0]
    role = _ROLES.get(first.state, "plain")
    missing = first.state == MISSING
    note = ("◀" if missing or first.state == LATE else "◀ differs") if first.odd else ""
    longest = max((entry.seconds for entry in entries if entry.seconds is not None), default=None)
    where = [first.site] if first.site else []
    if longest is not None:
        since = "for " if first.state in ("waiting", STARTED) else ""
        where.append(f"{since}{format_seconds(longest)}")
    return (
        Text(cut(first.what, _LONGEST), "error" if note == "◀ differs" else "plain"),
        Text(among),
        Text(first.state, role),
        Text(note, "error" if note else "plain"),
        Text(" · ".join(where), "muted"),
    )


def _ranks(entries: Iterable[Entry]) -> tuple[int, ...]:
    return tuple(entry.rank for entry in entries)


def _folded(rows: Iterable[Row]) -> list[Row]:
    """Neighbouring rows of different workers that read the same, as one.

    Only those of messages: of collectives each row belongs to one of them.
    """
    folded: list[Row] = []
    for row in rows:
        last = folded[-1] if folded else None
        if last and last.cells == row.cells and not set(last.ranks) & set(row.ranks):
            folded[-1] = Row(row.cells, last.ranks + row.ranks)
        else:
            folded.append(row)
    return folded


picture_of.register(Diagnosis, doctor_parts)
