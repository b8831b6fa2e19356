"""What each worker does and what it uses, as parts; and the words for it, which the widget shares.

Pure: a row is a record of one worker, as `Devices.rows` in a notebook gives it. Keys:

- ``rank``, ``device``, ``device_name``, ``host``, ``pid``
- ``state``, ``seconds`` (None if it is not known since when), ``doing`` (in what), ``queued``
- ``waits_for``, ``any_of``, ``held_up`` (ranks that wait for it)
- ``cpu`` (cores; None until it was seen twice), ``rss`` (bytes; None if not known)
- ``memory`` (torch's on a GPU: ``used``, ``reserved``, ``peak``, ``total``), ``gpu`` (NVML's:
  ``utilisation``, ``temperature``); None without a GPU
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from .formats import cut, format_bytes, format_ranks, format_workers
from .parts import Bars, Cell, Column, Line, Part, Role, Row, Table, Text, VStack

SYMBOLS = {
    "idle": "○",
    "running": "►",
    "waiting": "◔",
    "paused": "‖",
    "starting": "…",
    "ended": "□",
    "dead": "✕",
}
_ROLES: dict[str, Role] = {"waiting": "warning", "dead": "error", "ended": "muted"}
_LONGEST = 120  # characters of a cell
_BARS = 20  # of a sparkline


def format_age(seconds: float | None) -> str:
    """Write how long something lasts, no finer than a second: pictures change once a second.

    Examples
    --------
    >>> format_age(0.4), format_age(59.9), format_age(150), format_age(7300), format_age(None)
    ('', '59 s', '2 min', '2 h', '')
    """
    if seconds is None or seconds < 1:
        return ""
    if seconds < 60:
        return f"{int(seconds)} s"
    return f"{int(seconds // 60)} min" if seconds < 3600 else f"{int(seconds // 3600)} h"


def format_state(row: Mapping[str, Any]) -> str:
    """Symbol and word for a worker's state."""
    state = str(row["state"])
    return f"{SYMBOLS.get(state, '•')} {state}"


Pieces: TypeAlias = list[tuple[str, list[int]]]
"""Words, each followed by ranks: text writes these as a set, the panel as chips in colours."""


def doing_pieces(row: Mapping[str, Any]) -> Pieces:
    """What a worker does, and whom it waits for."""
    doing = str(row["doing"]) if row["doing"] and row["state"] != "dead" else ""
    if not row["waits_for"]:
        return [(doing, [])] if doing else []
    any_of = "any of " if row["any_of"] else ""
    first = f"for {any_of}{_workers(row['waits_for'])} ", list(row["waits_for"])
    return [first, (f" {doing}", [])] if doing else [first]


def held_pieces(row: Mapping[str, Any]) -> Pieces:
    """Who waits for a worker."""
    if not row["held_up"]:
        return []
    verb = "waits" if len(row["held_up"]) == 1 else "wait"
    return [(f"{_workers(row['held_up'])} ", list(row["held_up"])), (f" {verb} for it", [])]


def _workers(ranks: Sequence[int]) -> str:
    return "worker" if len(ranks) == 1 else "workers"


def format_doing(row: Mapping[str, Any]) -> str:
    """What a worker does, whom it waits for, and who waits for it, in a line of text."""
    clauses = filter(None, (doing_pieces(row), held_pieces(row)))
    return "; ".join(
        "".join(words + (format_ranks(ranks) if ranks else "") for words, ranks in clause)
        for clause in clauses
    )


def format_memory(row: Mapping[str, Any]) -> str:
    """What a worker has of its GPU's memory."""
    memory = row["memory"]
    if memory is None:
        return ""
    used, reserved, peak = (format_bytes(memory[key]) for key in ("used", "reserved", "peak"))
    return f"{used}, reserved {reserved}, peak {peak}, of {format_bytes(memory['total'])}"


def format_used_memory(row: Mapping[str, Any]) -> str:
    """How much memory a worker has: of its GPU, or of the machine."""
    memory = row["memory"]
    return format_bytes(row["rss"] if memory is None else memory["used"])


def format_gpu(row: Mapping[str, Any]) -> str:
    """How busy and how warm a worker's GPU is."""
    told = row["gpu"] or {}
    units = {"utilisation": "%", "temperature": "°C"}  # a part of a GPU tells less
    return ", ".join(
        f"{told[fact]} {unit}" for fact, unit in units.items() if told.get(fact) is not None
    )


def format_cpu(row: Mapping[str, Any]) -> str:
    """How much of a core a worker uses."""
    return "" if row["cpu"] is None else f"{round(100 * row['cpu'])} %"


def format_shared_memory(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whose memory is whose: threads of one process share it, so it is said once for all."""
    together: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    on_gpu: dict[tuple[str, int, str], list[int]] = {}
    for row in rows:
        if row["rss"] is not None:
            together.setdefault((row["host"], row["pid"]), []).append(row)
        if row["memory"] is not None:
            on_gpu.setdefault((row["host"], row["pid"], row["device"]), []).append(row["rank"])
    return [
        f"{format_workers([row['rank'] for row in same])} are threads of process {pid}, which has "
        f"{format_bytes(max(row['rss'] for row in same))} of memory (RSS)"
        for (_, pid), same in together.items()
        if len(same) > 1
    ] + [
        f"{format_workers(ranks)} share {device}: its memory is what process {pid} has there, "
        "for all of them"
        for (_, pid, device), ranks in on_gpu.items()
        if len(ranks) > 1
    ]


def is_shared(row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether other workers live in the same process."""
    mine = row["host"], row["pid"], row["rank"]
    return any((o["host"], o["pid"]) == mine[:2] and o["rank"] != mine[2] for o in rows)


def format_dead(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who has died, and of what."""
    why: dict[str, list[int]] = {}
    for row in rows:
        if row["state"] == "dead":
            why.setdefault(str(row["doing"]) or "has ended unexpectedly", []).append(row["rank"])
    words = [f"{format_workers(ranks)} {text}" for text, ranks in why.items()]
    return [*words, "%disco_restart starts new workers"] if words else []


def devices_parts(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    history: Mapping[int, Sequence[float | None]] | None = None,
    notice: str = "",
) -> Part:
    """Draw the workers of a session as a table.

    Parameters
    ----------
    title
        Which session.
    rows
        See the module.
    history
        Of each worker what it has used in the last minute, 0 to 1; None where nobody looked.
    notice
        What is to be said of the whole session.
    """
    parts: list[Part] = [Line((Text("devices", "title"), Text(f" · {title}", "muted")))]
    if notice:
        parts.append(Line((Text(notice, "warning"),)))
    parts += [Line((Text(words, "error"),)) for words in format_dead(rows)]
    columns, cells = _columns(rows, history or {})
    used = [any(_is_there(line[place]) for line in cells) for place in range(len(columns))]
    parts.append(
        Table(
            tuple(column for column, keep in zip(columns, used, strict=True) if keep),
            tuple(
                Row(tuple(c for c, keep in zip(line, used, strict=True) if keep), (row["rank"],))
                for line, row in zip(cells, rows, strict=True)
            ),
        )
    )
    parts += [Text(words, "muted") for words in format_shared_memory(rows)]
    return VStack(tuple(parts))


def _columns(
    rows: Sequence[Mapping[str, Any]], history: Mapping[int, Sequence[float | None]]
) -> tuple[list[Column], list[list[Cell]]]:
    columns = [
        Column("device"), Column("state"), Column("for", "right"), Column("doing"),
        Column("queued", "right"), Column("CPU", "right"), Column("memory (RSS)", "right"),
        Column("GPU memory"), Column("GPU"), Column("last minute"),
    ]  # fmt: skip
    cells: list[list[Cell]] = []
    for row in rows:
        alone = row["memory"] is None and not is_shared(row, rows)
        cells.append(
            [
                Text(row["device"]),
                Text(format_state(row), _ROLES.get(row["state"], "plain")),
                Text(format_age(row["seconds"]), "muted"),
                Text(cut(format_doing(row), _LONGEST)),
                Text(str(row["queued"] or "")),
                Text(format_cpu(row)),
                Text(format_bytes(row["rss"]) if alone else ""),
                Text(format_memory(row)),
                Text(format_gpu(row)),
                _sparkline(history.get(row["rank"], ())),
            ]
        )
    return columns, cells


def _is_there(cell: Cell) -> bool:
    return not isinstance(cell, Text) or bool(cell.text)


def _sparkline(values: Sequence[float | None]) -> Cell:
    """The last minute as bars, each the highest of some seconds."""
    seen = [value for value in values if value is not None]
    if len(seen) < 2:
        return Text("")
    step = max(1, len(values) // _BARS)
    groups = [values[at : at + step] for at in range(0, len(values), step)]
    heights = tuple(
        min(1.0, max((v for v in group if v is not None), default=0.0)) for group in groups
    )
    low, high = (f"{round(100 * edge)} %" for edge in (min(seen), max(seen)))
    return Bars(heights, f"last minute: {low} to {high}")
