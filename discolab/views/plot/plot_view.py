"""From a picture of a tensor to words and parts: what a saved notebook and text show. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..dref.contents import NO_VALUE
from ..dref.tables import problem_parts, role_of
from ..formats import cut, format_number, format_shape, format_workers
from ..parts import Card, Column, Legend, Line, Outline, Part, Plot, Row, Table, Text
from .picture import NOT_FINITE, TOP, Facts, Picture, Shades, Stat
from .sheet import Shard, Sheet, choices, sources

_RAMP = "·░▒▓█"
_BARS = "▁▂▃▄▅▆▇█"
_TEXT_SIZE = 12, 48  # characters
_WIDEST = 240  # pixels of the saved picture
_NAME_LIMIT = 60


def format_stat(picture: Picture, stat: Stat, choice: str) -> str:
    """What a pixel stands for."""
    size = " x ".join(str(block) for block in picture.blocks)
    if picture.mean.shape[0] == 1 and picture.blocks[0] == 1:
        size = str(picture.blocks[1])
    kind = {
        "mean": "means",
        "absmax": "largest magnitudes",
        "nonfinite": "numbers of non-finite values",
    }[stat]
    if picture.exact:
        words = {"mean": "each element", "absmax": "magnitudes"}.get(stat, "non-finite elements")
    elif choice.startswith("difference"):
        words = f"what differs most of mean, lowest and highest of {size} elements"
    else:
        words = f"{kind} of {size} elements"
    if picture.every > 1:
        words += f", sampled: 1 in {picture.every}"
    if picture.sheet.dtype.startswith("complex") and stat != "nonfinite":
        words += ", of complex values their magnitudes"
    return words


def format_point(picture: Picture, row: int, column: int, choice: str) -> str:
    """What is known of the pixel that an element is in: its index, its values, who holds it."""
    sheet = picture.sheet
    shard = sheet.shard_at(row, column)
    if shard is None:
        return "between the tensors"
    where = f"{sheet.words_at(row, column)} · {format_workers(shard.ranks)}"
    place = row // picture.blocks[0] - picture.top, column // picture.blocks[1] - picture.left
    inside = all(0 <= at < size for at, size in zip(place, picture.mean.shape, strict=True))
    if not inside or shard not in picture.shown:
        silent = any(rank in picture.states for rank in shard.ranks)
        return f"{where} · {format_state(_state_of(shard, picture)) if silent else 'not read yet'}"
    mean, low, high, bad = (
        float(part[place]) for part in (picture.mean, picture.low, picture.high, picture.bad)
    )
    if picture.exact:
        value = repr_number(mean, sheet.dtype)
        if bad and math.isfinite(mean):
            value = "one of them is not finite"
        return f"{where} · {value}"
    first = [(number + at) * block for number, at, block in zip(
        (picture.top, picture.left), place, picture.blocks, strict=True)]  # fmt: skip
    ends = [min(start + block, size) for start, block, size in zip(
        first, picture.blocks, sheet.size, strict=True)]  # fmt: skip
    count = math.prod(end - start for start, end in zip(first, ends, strict=True))
    words = f"{format_number(mean)}" if choice.startswith("difference") else (
        f"mean {format_number(mean)}, about {_rough(low)} to {_rough(high)}"
    )  # fmt: skip
    if bad == 1:
        words = "none finite"
    elif bad:
        words += f", about {max(round(bad * count), 1)} not finite"
    return f"{where} · {words}, of {count} elements"


def _rough(value: float) -> str:
    """A number in three digits, as the lowest and highest are read."""
    return format_number(float(f"{value:.3g}"))


def repr_number(value: float, dtype: str) -> str:
    """A value in as many digits as its dtype has."""
    if dtype.startswith(("int", "uint", "bool")) and math.isfinite(value):
        return f"{'' if abs(value) < 2**53 else 'about '}{int(value)}"
    digits = {"float64": 16, "complex128": 16, "float16": 5, "bfloat16": 4}.get(dtype, 8)
    return f"{value:.{digits}g}"


def format_state(record: Mapping[str, Any]) -> str:
    """Why a shard is not seen, in a word or a line."""
    kind = NO_VALUE.get(str(record.get("kind")), "silent")
    message = record.get("message")
    return cut(f"{kind}: {message}" if message else kind, 120)


# -- saved pictures -------------------------------------------------------------------------------


def title_of(sheet: Sheet, name: str | None) -> str:
    """``w · float32 [8, 4] Shard(0)``, or that it is not known how they join."""
    title = "tensor" if name is None else cut(name, _NAME_LIMIT)
    words = f"{title} · {sheet.dtype} {format_shape(list(sheet.shape))}"
    if sheet.joined:
        return f"{words} {sheet.layout}"
    alike = len({shard.label for shard in sheet.shards}) == 1
    if alike:
        return f"{words} a worker, not joined"
    return f"{title} · {sheet.dtype}, one tensor per worker, shapes differ, not joined"


def format_axes(sheet: Sheet) -> tuple[str, str]:
    """What runs down and across."""
    down, across = sheet.dims
    return ("" if down < 0 else f"dim {down}", "" if across < 0 else f"dim {across}")


def format_cut(sheet: Sheet) -> str:
    """Where the other dims are cut."""
    others = [f"dim {d} at {at}" for d, at in enumerate(sheet.index) if d not in sheet.dims]
    return ", ".join(others)


def plot_parts(
    picture: Picture, *, name: str | None, stat: Stat, choice: str, shades: Shades
) -> Part:
    """The picture for a saved notebook and for text."""
    sheet = picture.sheet
    facts = [format_stat(picture, stat, choice)]
    if format_cut(sheet):
        facts.append(format_cut(sheet))
    if choice != "value" or sheet.terms > 1:
        facts.append(dict(choices(sheet))[choice])
    low, high = shades.ends
    if shades.nonfinite and stat != "nonfinite":
        facts.append(f"{shades.nonfinite} of {picture.known.sum()} pixels not finite")
    words = " · ".join(facts)
    ends = f"{low} to {high}" if low else "none finite"
    alt = f"{title_of(sheet, name)}: {words}, {ends}"
    children: list[Part] = [
        Text(f"{words} · {ends}", "muted"),
        _plot(sheet, picture, shades, alt),
        Legend(low, high, shades.diverging, bool(shades.nonfinite) and stat != "nonfinite"),
        _shard_table(sheet, picture, choice),
    ]
    if not sheet.joined and len(sheet.shards) > 1:
        why = f"; {sheet.note}" if sheet.note else ""
        children.insert(1, Text(f"one tensor per worker{why}"))
    elif sheet.note:
        children.insert(1, Text(sheet.note))
    if sheet.replicas == "differ":
        drawn = "" if sheet.terms > 1 else f"; drawn: {dict(choices(sheet))[choice]}"
        children.insert(
            1, Text(f"≠ workers that should hold the same values differ{drawn}", "warning")
        )
    if sheet.others:
        ranks = ", ".join(f"worker {rank} holds {kind}" for rank, kind in sheet.others.items())
        children.append(Text(ranks, "muted"))
    children += problem_parts(picture.states)
    return Card(Line((Text(title_of(sheet, name), "title"),)), tuple(children))


def _plot(sheet: Sheet, picture: Picture, shades: Shades, alt: str) -> Plot:
    height, width = drawn_size(sheet)
    outlines = []
    for shard in sheet.shards:
        rows, columns = picture.cells_of(shard)
        levels: tuple[bytes, ...] = ()
        if shard in picture.shown:
            levels = tuple(line.tobytes() for line in shades.levels[rows, columns])
        covers = (
            (picture.top + rows.start) * picture.blocks[0],
            (picture.left + columns.start) * picture.blocks[1],
            (picture.top + rows.stop) * picture.blocks[0],
            (picture.left + columns.stop) * picture.blocks[1],
        )
        state = "" if shard in picture.shown else short_state(_state_of(shard, picture))
        outlines.append(Outline(shard.window, shard.ranks, levels, covers, state))
    down, across = format_axes(sheet)
    return Plot(
        sheet.size, (height, width), tuple(outlines), (down, across), sheet.joined,
        shades.diverging, alt, _text_picture(sheet, picture, shades),
    )  # fmt: skip


def short_state(record: Mapping[str, Any]) -> str:
    """``still busy``"""
    return NO_VALUE.get(str(record.get("kind")), "silent")


def drawn_ratio(sheet: Sheet) -> float:
    """How much wider than tall it is drawn: to scale up to 4 to 1."""
    tall, wide = sheet.size
    return min(max(wide / tall, 0.25), 4.0)


def drawn_size(sheet: Sheet) -> tuple[int, int]:
    if sheet.size[0] == 1:
        return 28, _WIDEST
    ratio = drawn_ratio(sheet)
    width = _WIDEST if ratio >= 1 else max(round(_WIDEST * ratio), 60)
    return max(round(width / ratio), 1), width


def _shard_table(sheet: Sheet, picture: Picture, choice: str) -> Table:
    rows = []
    read = {shard: [rank for rank, _ in wanted] for shard, wanted in sources(sheet, choice)}
    for shard in sheet.shards:
        facts = picture.shown.get(shard)
        if facts is None:
            kind = str(_state_of(shard, picture)["kind"])
            cells = Text(NO_VALUE.get(kind, "silent"), role_of(kind)), Text("")
        else:
            words = _range_words(facts, picture.exact)
            if sheet.replicas != "equal" and set(read[shard]) < set(shard.ranks):
                words += f" on {format_workers(sorted(read[shard]))}"
            cells = Text(words), _bad_words(facts, picture.exact)
        rows.append(Row((Text(shard.label), *cells), shard.ranks))
    return Table((Column("holds"), Column("values"), Column("not finite")), tuple(rows))


def _state_of(shard: Shard, picture: Picture) -> Mapping[str, Any]:
    """Why a shard is not seen."""
    found = (picture.states[rank] for rank in shard.ranks if rank in picture.states)
    return next(found, {"kind": "missing", "message": ""})


def _range_words(facts: Facts, exact: bool) -> str:
    if math.isnan(facts.low):
        return "none finite"
    return f"{'' if exact else 'about '}{_rough(facts.low)} to {_rough(facts.high)}"


def _bad_words(facts: Facts, exact: bool) -> Text:
    if not facts.bad:
        return Text("0")
    one = "element" if exact else "pixel"
    return Text(f"{facts.bad} {one}{'' if facts.bad == 1 else 's'}", "warning")


def _text_picture(sheet: Sheet, picture: Picture, shades: Shades) -> tuple[str, ...]:
    """At most 12 lines of 48 characters, and one that says what they mean."""
    lines, columns = _TEXT_SIZE
    tall, wide = picture.mean.shape
    ratio = drawn_ratio(sheet)
    down = min(lines, max(round(columns / 2 / ratio), 1), tall)
    across = min(columns, max(round(down * 2 * ratio), wide if down == tall else 4))
    marks = _BARS if down == 1 else _RAMP
    drawn = [
        "".join(
            _mark(shades, picture, _part(i, down, tall), _part(j, across, wide), marks)
            for j in range(across)
        )
        for i in range(down)
    ]
    scale = f"{marks[0]} {shades.ends[0]} to {marks[-1]} {shades.ends[1]}"
    key = [] if shades.empty else [scale]
    for mark, words in (("!", "not finite"), ("?", "no answer")):
        if any(mark in line for line in drawn):
            key.append(f"{mark} {words}")
    return *drawn, ", ".join(key)


def _part(place: int, count: int, size: int) -> slice:
    start = place * size // count
    return slice(start, max((place + 1) * size // count, start + 1))


def _mark(shades: Shades, picture: Picture, rows: slice, columns: slice, marks: str) -> str:
    known = picture.known[rows, columns]
    levels = shades.levels[rows, columns][known]
    if not levels.size:
        return "?" if picture.states else " "
    if (levels == NOT_FINITE).any():
        return "!"
    return marks[min(int(levels.mean() / (TOP + 1) * len(marks)), len(marks) - 1)]
