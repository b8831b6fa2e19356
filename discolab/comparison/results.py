"""What a comparison found, and how it shows itself.

`Point`s are the values that were compared, the `Finding` is what comes first, a
`ProgramComparison` is all of it. It draws what comes first and why, then how the error grows over
the program. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..runtime.display import Pictured
from ..views.dref.differences import pair_words
from ..views.formats import cut, format_number, format_ranks, format_shape, format_workers
from ..views.parts import Bars, Card, Column, Details, Line, Part, Stack, Table, Text
from ..views.parts import Row as TableRow
from .measure import Row

_MOST_ROWS = 400
_BEFORE, _AFTER = 3, 4  # rows of the program around the first difference
_MOST_BARS = 40
_LOWEST = 1e-9  # a relative error that has no height
_NAME = 56


@dataclass(frozen=True, slots=True)
class Point:
    """A value of the reference, and how the workers' agree with it.

    Attributes
    ----------
    kind : str
        ``parameter``, ``buffer``, ``input`` or ``output`` of a module, ``note``, ``argument`` or
        ``result`` of the program, ``state`` of a buffer after it, ``operation`` inside a module.
    module : str
        The path of the module, with ``#2`` at its second call; what a note is called.
    gradient : bool
        Whether it is the gradient of that.
    leaf : str
        Which value of several, as ``0``; else empty.
    shape, dtype
        Of the reference's value.
    layout : str
        How the value lies over the workers, in torch's words; "" if none was found.
    source : str
        Who says so: ``given``, ``DTensor`` or ``inferred``.
    partial : bool
        Whether the workers hold terms of a sum. It was then compared at `sampled` elements.
    agrees : bool
    error : float
        The largest difference.
    relative : float
        That, as a part of `scale`.
    scale : float
        A typical element of the reference: the root of the mean square. Of the gradient of a
        parameter a quarter of the median one of all parameters at least.
    ranks : tuple of int
        The workers that differ.
    rows : dict of rank to dict
        ``max_abs``, ``index`` (in the worker's tensor), ``a`` (there), ``b`` (in the reference),
        ``over`` (elements beyond the tolerance), ``size``. Of a sum the first worker has the row.
    problem : str
        Why it could not be compared; it then counts neither as agreeing nor as differing.
    unlike : bool
        Whether the workers' values differ among themselves where they should be the same.
    rounding : float
        By how much runs of the reference that round otherwise differ here; 0: not measured.
    """

    kind: str
    module: str
    leaf: str
    gradient: bool
    shape: tuple[int, ...]
    dtype: str
    key: str = field(repr=False)
    theirs: str = field(repr=False)
    layout: str = ""
    source: str = ""
    partial: bool = False
    sampled: int = 0
    agrees: bool = True
    error: float = 0.0
    relative: float = 0.0
    scale: float = 0.0
    ranks: tuple[int, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict)
    problem: str = ""
    unlike: bool = False
    rounding: float = 0.0

    @property
    def size(self) -> int:
        """Of the reference's value."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """By which `layouts` may speak of it."""
        return point_name(self.kind, self.module, self.leaf, self.gradient)

    @property
    def owner(self) -> str:
        """The module that has a parameter or a buffer, and of other values their own."""
        of_module = self.kind in ("parameter", "buffer")
        return self.module.rpartition(".")[0] if of_module else self.module

    @property
    def ends_unsummed(self) -> bool:
        """Whether the program leaves terms where nothing comes that could sum them."""
        ends = ("parameter", "argument") if self.gradient else ("result",)
        return self.partial and self.source == "inferred" and self.kind in ends

    @property
    def words(self) -> str:
        """For a sentence."""
        leaf = f" ({self.leaf})" if self.leaf else ""
        whole = self.module or "the whole model"
        words = {
            "argument": "input of the program",
            "result": "result of the program",
            "input": f"input of {whole}",
            "output": f"output of {whole}",
            "note": f"note {self.module!r}",
            "state": f"buffer {self.module} after the run",
            "operation": f"operation {self.module.partition(':')[2]}",
        }.get(self.kind, f"{self.kind} {self.module}")
        words += leaf
        return f"gradient of the {words}" if self.gradient else words


def point_name(kind: str, module: str, leaf: str, gradient: bool) -> str:
    """The name of a point: ``mlp.up``, ``mlp.up.input``, ``mlp.up.weight``, each with ``.grad``."""
    name = module
    if kind == "argument":
        name = "input"
    elif kind == "input":
        name = f"{module}.input" if module else "input"
    elif kind == "result" or not module:
        name = "output"
    name += f".{leaf}" if leaf else ""
    return f"{name}.grad" if gradient else name


@dataclass(frozen=True, slots=True)
class Finding:
    """The first place where the two differ, and what the numbers say of the cause.

    Attributes
    ----------
    point : Point
    causes : tuple of str
        What the numbers prove, the strongest first; empty if they give nothing away.
    place : str
        What is known of where in the program it happens.
    proved : bool
        False if the program goes on as wrong as before with the reference's value in this place.
    """

    point: Point
    causes: tuple[str, ...] = ()
    place: str = ""
    proved: bool = True

    @property
    def name(self) -> str:
        """By which `layouts` may speak of the place; never empty."""
        return self.point.name

    @property
    def module(self) -> str:
        """The path of the module; "" for the program itself."""
        return self.point.module

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers that differ."""
        return self.point.ranks

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.point.words, self.place, *self.causes]))


class Unmatched(Pictured, tuple[Point, ...]):
    """Points that could not be compared: a tuple that shows itself as a table."""

    __slots__ = ()

    @property
    def part(self) -> Part:
        """The picture."""
        if not self:
            return Text("every value could be compared", "muted")
        return _unmatched_table(self, _MOST_ROWS)


@dataclass(frozen=True, slots=True, repr=False)
class ProgramComparison(Pictured):
    """What `discolab.compare` found; shows itself as text and as HTML.

    Attributes
    ----------
    agrees : bool
        Whether something was compared, and no value differs beyond its tolerance.
    first : Finding or None
        The first place where one does: parameters, then forward, then backward.
    parameters : tuple of Point
        Parameters and buffers.
    points : tuple of Point
        What was seen in forward, in the order of the reference's program.
    gradients : tuple of Point
        What was seen in backward, in the order of the reference's.
    unmatched : Unmatched
        The points of the reference that could not be compared; `problem` says why. Shows itself as
        a table.
    only_in_reference, only_in_sharded : tuple of str
        Modules, parameters and notes that the other side has not.
    notes : tuple of str
        What else a reader should know.
    partly : bool
        Whether some workers, or some of what the program gives, could not be compared.
    plain : int
        How many values besides tensors and numbers were compared.
    num_workers : int
    """

    names: tuple[str, str]
    num_workers: int
    first: Finding | None
    parameters: tuple[Point, ...]
    points: tuple[Point, ...]
    gradients: tuple[Point, ...]
    unmatched: Unmatched = field(default_factory=lambda: Unmatched())
    only_in_reference: tuple[str, ...] = ()
    only_in_sharded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    partly: bool = False
    plain: int = 0

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and no value differs beyond its tolerance."""
        return self.first is None and not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether nothing that the programs compute was compared."""
        values = (*(p for p in self.points if p.kind != "argument"), *self.gradients)
        computed = (p for p in values if 0 not in p.shape)
        return not self.plain and next(computed, None) is None

    @property
    def worst(self) -> Point | None:
        """The value with the largest error, as a part of a typical element."""
        found = (*self.parameters, *self.points, *self.gradients)
        return max(found, key=lambda point: point.relative, default=None)

    def __bool__(self) -> bool:
        return self.agrees

    @property
    def part(self) -> Part:
        """The picture."""
        return comparison_parts(self)


# -- drawing: the verdict --------------------------------------------------------------------------


def comparison_parts(comparison: ProgramComparison) -> Part:
    """Draw it."""
    verdict = (
        Text(f"nothing {'that it computes ' * bool(_counts(comparison))}was compared", "error")
        if comparison.first is None and comparison.is_empty
        else Text("✓ agrees where it could be compared", "good")
        if comparison.agrees and (comparison.unmatched or comparison.partly)
        else Text("✓ agrees", "good")
        if comparison.agrees
        else Text(f"≠ differs on {format_workers(comparison.first.ranks)}", "error")
        if comparison.first is not None and comparison.first.ranks
        else Text("≠ differs", "error")
    )
    ours, theirs = comparison.names
    title = Line(
        (
            Text(f"{cut(theirs, 40)} against {cut(ours, 40)}", "title"),
            Text(f" · {comparison.num_workers} worker{'s' * (comparison.num_workers > 1)} · "),
            verdict,
        )
    )
    body = (
        _agreement(comparison)
        if comparison.first is None
        else _difference(comparison, comparison.first)
    )
    return Card(title, (*body, *_rest(comparison)))


def _agreement(comparison: ProgramComparison) -> list[Part]:
    worst = comparison.worst
    parts: list[Part] = [Text(f"compared: {', '.join(_counts(comparison)) or 'nothing'}")]
    sums = [
        p for p in (*comparison.points, *comparison.gradients) if p.sampled and p.sampled < p.size
    ]
    if sums:
        text = f"sums of {len(sums)} values were compared at {sums[0].sampled:,} elements of each"
        parts.append(Text(text, "muted"))
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
    return [*parts, *_sparklines(comparison)]


def _counts(comparison: ProgramComparison) -> list[str]:
    """How much was compared, of each kind; of what nothing was, there is no word."""
    forward = "inputs of the program" if comparison.is_empty else "values in forward"
    counts = [
        f"{len(points)} {words if len(points) > 1 else words.replace('s', '', 1)}"
        for points, words in (
            (comparison.parameters, "parameters"),
            (comparison.points, forward),
            (comparison.gradients, "gradients"),
        )
        if points
    ]
    if comparison.plain:
        counts.append(
            f"{comparison.plain} value{'s' * (comparison.plain > 1)} that are not tensors"
        )
    return counts


def _difference(comparison: ProgramComparison, first: Finding) -> list[Part]:
    point = first.point
    head = Line((Text("first difference: "), Text(point.words, "title")))
    parts: list[Part] = [head]
    parts += [Text(cause, "warning") for cause in first.causes]
    if first.place:
        parts.append(Text(first.place))
    if not point.problem:
        parts += [Text(_layout_line(point), "muted"), _by_worker(point)]
    parts += _sparklines(comparison)
    group: Sequence[Point] = next(
        (
            points
            for points in (comparison.parameters, comparison.points, comparison.gradients)
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


def _layout_line(point: Point) -> str:
    words = f"{point.dtype}{format_shape(list(point.shape))}, layout: {point.layout}"
    words += f" ({point.source})"
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
        rows.append(TableRow(cells, ranks or (rank,)))
    titles = tuple(Column(title, "right" if title in right else "left") for title in columns)
    return Table(titles, tuple(rows))


# -- the error over the program --------------------------------------------------------------------


def _sparklines(comparison: ProgramComparison) -> list[Part]:
    """How the error grows, a bar for each output."""
    rows = []
    for words, points in (("forward", comparison.points), ("backward", comparison.gradients)):
        shown = [p for p in points if p.kind in ("output", "note", "result") or p.gradient]
        shown = [p for p in shown if p.kind != "result" or len(shown) == 1] or shown
        if len(shown) < 2:
            continue
        largest = max(point.relative for point in shown)
        alt = f"relative error of {len(shown)} values in {words}, up to {format_number(largest)}"
        rows.append(
            TableRow((Text(words), Text(format_number(largest)), Bars(_heights(shown), alt)))
        )
    if not rows:
        return []
    titles = ("error", "largest", "a bar for each value, logarithmic")
    return [Table(tuple(Column(title) for title in titles), tuple(rows))]


def _heights(points: Sequence[Point]) -> tuple[float, ...]:
    """Heights on a logarithmic scale; of many points the largest of each interval."""
    step = max(math.ceil(len(points) / _MOST_BARS), 1)
    intervals = [points[at : at + step] for at in range(0, len(points), step)]
    return tuple(_height(max(point.relative for point in each)) for each in intervals)


def _height(relative: float) -> float:
    if not relative > _LOWEST:
        return 0.0
    return min(math.log10(relative / _LOWEST) / -math.log10(_LOWEST), 0.999)


def _without_repeats(points: Sequence[Point], first: Finding | None) -> list[Point]:
    """Without what was shown already: the program's input and result, if the model's are there."""
    root = {(p.kind, p.leaf, p.gradient, p.error) for p in points if not p.module}
    same = {"argument": "input", "result": "output"}
    return [
        p for p in points
        if (same.get(p.kind), p.leaf, p.gradient, p.error) not in root
        or (first is not None and first.point.key == p.key)
    ]  # fmt: skip


def _table(points: Sequence[Point], first: Finding | None) -> Table:
    rows = []
    for point in _without_repeats(points, first)[:_MOST_ROWS]:
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
            TableRow(
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
        rows = [TableRow((*row.cells[:3], *row.cells[4:])) for row in rows]
    return Table(
        tuple(Column(c, "right" if c in ("relative", "max |a - b|") else "left") for c in columns),
        tuple(rows),
    )


# -- what else there is ----------------------------------------------------------------------------


def _rest(comparison: ProgramComparison) -> list[Part]:
    parts: list[Part] = [Text(note, "warning") for note in comparison.notes]
    if comparison.unmatched:
        count = len(comparison.unmatched)
        parts.append(Details(f"can't be matched: {count}", _unmatched_table(comparison.unmatched)))
    for names, where in (
        (comparison.only_in_reference, "only in the reference"),
        (comparison.only_in_sharded, "only in the sharded program"),
    ):
        if names:
            words = ", ".join(cut(name or "the whole model", _NAME) for name in names[:24])
            more = f" and {len(names) - 24} more" if len(names) > 24 else ""
            parts.append(Text(f"{where}: {words}{more}", "muted"))
    for points, words in (
        (comparison.parameters, "parameters"),
        (comparison.points, "forward"),
        (comparison.gradients, "gradients"),
    ):
        if points:
            over = sum(not point.agrees for point in points)
            verdict = f"{len(points)} agree" if not over else f"{over} of {len(points)} differ"
            parts.append(
                Details(f"{words}: {verdict}", _table(points, comparison.first), extra=True)
            )
    return parts


def _unmatched_table(points: Sequence[Point], most: int = 24) -> Part:
    rows = tuple(
        TableRow((Text(cut(p.words, _NAME)), Text(p.problem, "warning"))) for p in points[:most]
    )
    body = Table((Column("value"), Column("why")), rows)
    if len(points) <= most:
        return body
    return Stack((body, Text(f"and {len(points) - most} more", "muted")))
