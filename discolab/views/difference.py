"""Compares two values on each worker: ``sess.compare(a, b)``.

The workers compare, chunk by chunk and without a collective, what they hold under both names, and
send a few hundred bytes for each tensor. Values of any nesting are matched by name: a module and
its ``state_dict`` too. `Comparison` keeps the records; its picture has a row for each worker, or
for each name.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..runtime.display import Pictured
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.registers import OWN
from .dref.contents import grouped
from .dref.differences import pair_words, place_of
from .facts.distances import distances
from .facts.guard import FAILURES, error_text, safe_repr, type_name
from .facts.tensors import dtype_name, is_dtensor, shape_of, why_no_data
from .formats import cut, format_number, format_ranks, format_shape, format_workers
from .parts import Card, Column, Details, Line, Part, Row, Table, Text, VStack

_Row: TypeAlias = dict[str, Any]

_MOST_ROWS = 250  # of a record
_MOST_LEAVES = 20_000
_DEPTH = 8


class Comparison(Pictured):
    """What `Session.compare` found; shows itself as text and as HTML.

    Attributes
    ----------
    equal : bool
        Whether all elements are within the tolerances on all workers.
    identical : bool
        Whether they are the same without any tolerance; NaN is the same as NaN.
    ranks : list of int
        The workers on which they are not within the tolerances.
    records : dict of rank to list of dict
        What each worker found: a row for each pair of tensors or plain values, with ``name``,
        ``shape``, ``dtype``, ``size``, ``max_abs``, ``index``, ``a`` and ``b`` (the values there),
        ``max_rel``, ``mean_abs``, ``over`` (elements over the tolerance), ``differ`` (not the
        same), ``nan_one`` (NaN in one only); ``problem`` says why two can't be compared.
    """

    def __init__(
        self, names: tuple[str, str], records: Mapping[int, list[_Row]], counts: Mapping[int, _Row]
    ) -> None:
        self.names = names
        self.records = dict(records)
        self.counts = dict(counts)

    @property
    def ranks(self) -> list[int]:
        """The workers on which something is over the tolerance."""
        return [rank for rank, counts in sorted(self.counts.items()) if counts["over"]]

    @property
    def equal(self) -> bool:
        """Whether everything is within the tolerances."""
        return not self.ranks

    @property
    def identical(self) -> bool:
        """Whether everything is the same."""
        return not any(counts["differ"] for counts in self.counts.values())

    @property
    def part(self) -> Part:
        """The picture."""
        return comparison_parts(self.names, self.records, self.counts)


def compare(
    session: Any,
    a: Any,
    b: Any,
    rtol: float | None = None,
    atol: float | None = None,
    timeout: float | None = None,
) -> Comparison:
    """Compare two values on each worker; see `Session.compare`."""
    if not isinstance(a, DRef) and not isinstance(b, DRef):
        raise ArgumentError(
            f"compare: one of the two must be a DRef, got {type_name(a)} and {type_name(b)}: "
            'sess.compare(sess["x"], sess["y"]), or sess.compare(sess["x"], tensor)'
        )
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        good = tolerance is None or (isinstance(tolerance, int | float) and tolerance >= 0)
        if not good or isinstance(tolerance, bool):
            raise ArgumentError(
                f"compare: {name} is a number, 0 or more, or None: got {tolerance!r:.60}"
            )
    compared = session.call_packed(compare_values, a, b, rtol, atol)
    compared.name = OWN
    found = session.fetch(compared, None, timeout)
    problems = {
        rank: str(record["rows"][0]["problem"])
        for rank, record in enumerate(found)
        if record["rows"] and record["rows"][0]["name"] == "" and "problem" in record["rows"][0]
    }
    if problems:
        words = "; ".join(
            f"{text} on worker{'' if ranks.isdigit() else 's'} {ranks}"
            for text, ranks in grouped(problems)[:8]
        )
        raise ArgumentError(f"compare: {words}")
    names = (_name_of(a, "a"), _name_of(b, "b"))
    return Comparison(
        names if names[0] != names[1] else ("a", "b"),
        {rank: record["rows"] for rank, record in enumerate(found)},
        {rank: record["counts"] for rank, record in enumerate(found)},
    )


def _name_of(value: Any, other: str) -> str:
    return (value.name or other) if isinstance(value, DRef) else f"given {type_name(value)}"


# -- on the workers -------------------------------------------------------------------------------


@worker_function("a comparison")
def compare_values(a: Any, b: Any, rtol: float | None, atol: float | None) -> dict[str, Any]:
    """Compare this worker's two values (a worker function).

    Returns
    -------
    dict
        ``rows``, those that differ first if not all can be told, and ``counts`` over all of them.
    """
    mine, its = dict(_leaves(a)), dict(_leaves(b))
    rows = []
    for name in dict.fromkeys((*mine, *its)):
        if name not in its or name not in mine:
            holder = "first" if name in mine else "second"
            rows.append(_problem(name, f"only in the {holder}" if name else _unlike(a, b)))
        else:
            rows.append(_pair(name, mine[name], its[name], rtol, atol))
    counts = {
        "rows": len(rows),
        "over": sum(bool(row.get("over")) or "problem" in row for row in rows),
        "differ": sum(bool(row.get("differ")) or "problem" in row for row in rows),
    }
    counts["no_data"] = sum("no_data" in row for row in rows)
    if len(rows) > _MOST_ROWS:
        rows.sort(key=lambda row: not (row.get("over") or "problem" in row))  # stable
    return {"rows": rows[:_MOST_ROWS], "counts": counts}


def _leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values in a value, with their names as a state_dict has them."""
    if isinstance(value, torch.nn.Module):
        for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield _joined(name, inner), tensor
        return
    pairs: Any = None
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if pairs is None or depth == _DEPTH:
        yield name, value
        return
    for count, (key, item) in enumerate(pairs):
        if count == _MOST_LEAVES:
            return
        words = key if isinstance(key, str) else safe_repr(key, 60)[0]
        yield from _leaves(item, _joined(name, words), depth + 1)


def _joined(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name else inner


def _unlike(a: Any, b: Any) -> str:
    return f"{type_name(a)} and {type_name(b)} can't be compared"


def _problem(name: str, words: str) -> _Row:
    return {"name": name[:200], "problem": words}


def _pair(name: str, a: Any, b: Any, rtol: float | None, atol: float | None) -> _Row:
    try:
        tensors = [value for value in (a, b) if isinstance(value, torch.Tensor)]
        if reasons := sorted({why_no_data(tensor) for tensor in tensors} - {""}):
            return {**_problem(name, "; ".join(reasons)), "no_data": 1}
        one, other = _as_tensor(a), _as_tensor(b)
        if one is None and other is None:
            return _plain_pair(name, a, b)
        if one is None or other is None:
            return _problem(name, _unlike(a, b))
        if one.shape != other.shape:
            return _problem(name, f"shapes differ: {_words(one)} and {_words(other)}")
        return {"name": name[:200], **difference_of(one, other, rtol, atol)}
    except FAILURES as error:
        return _problem(name, f"not compared: {error_text(error)}")


def _words(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{shape_of(tensor)}"


def _plain_pair(name: str, a: Any, b: Any) -> _Row:
    """Two values that are no numbers: the same, or not."""
    same = a is b or (type(a) is type(b) and bool(a == b))
    words = [safe_repr(value, 60)[0] for value in (a, b)]
    return {"name": name[:200], "a": words[0], "b": words[1], "size": 1} | {
        key: int(not same) for key in ("over", "differ")
    }


def _as_tensor(value: Any) -> torch.Tensor | None:
    """What a tensor, array or number holds here, as a dense tensor; None of anything else."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        local: torch.Tensor = value._local_tensor if is_dtensor(value) else value  # type: ignore[attr-defined]
        local = local.detach()
        if local.is_quantized:
            return local.dequantize()
        if local.layout is torch.jagged:
            return local.values()
        return local if local.layout is torch.strided else local.to_dense()
    if isinstance(value, bool | int | float | complex):
        big = isinstance(value, int) and not -(2**63) <= value < 2**63
        kind = torch.float64 if isinstance(value, float) or big else None
        return torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else kind)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        array = numpy.array(value, order="C")  # a copy: torch warns of read-only ones
        if array.dtype.kind in "biufc":
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    return None


# -- two tensors, chunk by chunk: nothing larger than a chunk, nothing recorded for autograd -------

_CHUNK = 2**19  # elements; temporaries of 4 MiB each
_TOLERANCES = {  # relative and absolute, as torch.testing has them
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}


def difference_of(a: torch.Tensor, b: torch.Tensor, rtol: float | None, atol: float | None) -> _Row:
    """How far two tensors of one shape are apart; without tolerances those of the dtypes."""
    usual = max(_TOLERANCES.get(a.dtype, (0.0, 0.0)), _TOLERANCES.get(b.dtype, (0.0, 0.0)))
    rtol, atol = usual[0] if rtol is None else rtol, usual[1] if atol is None else atol
    found = _Found(float(rtol), float(atol))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for start, one, other in _chunks(a, b, 0):
            found.add(start, one, other)
        row = found.row(a, b)
    row |= {"shape": shape_of(a), "dtype": dtype_name(a.dtype), "size": a.numel()}
    if a.dtype != b.dtype:
        row["other_dtype"] = dtype_name(b.dtype)
    return row | {"rtol": float(rtol), "atol": float(atol)}


def _chunks(
    a: torch.Tensor, b: torch.Tensor, start: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Cut both alike in flat pieces in row-major order; a piece is copied only if it must be."""
    if a.numel() <= _CHUNK:
        if a.numel():
            yield start, a.reshape(-1), b.reshape(-1).to(a.device)
        return
    rows = a.numel() // a.shape[0]
    step = max(_CHUNK // rows, 1)
    for first in range(0, a.shape[0], step):
        count = min(step, a.shape[0] - first)
        one, other = a.narrow(0, first, count), b.narrow(0, first, count)
        if step == 1:
            one, other = one[0], other[0]
        yield from _chunks(one, other, start + first * rows)


class _Found:
    """What is known of two tensors after some of their chunks."""

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.place: int | None = None
        self.max_abs = self.max_rel = self.total = 0.0
        self.over = self.differ = self.nan_one = self.counted = 0

    def add(self, start: int, one: torch.Tensor, other: torch.Tensor) -> None:
        """Take in the elements from `start` on."""
        same, nan, gap = distances(one, other)
        self.counted += same.numel() - int(nan.sum())
        if bool(same.all()):
            return
        gap.masked_fill_(same | nan, 0.0)
        self.differ += gap.numel() - int(same.sum())
        self.nan_one += int(nan.sum())
        size = other.to(torch.complex128 if other.is_complex() else torch.float64).abs()
        near = torch.isfinite(gap) & (gap <= size * self.rtol + self.atol)
        self.over += int((nan | ~(same | near)).sum())
        self.total += float(gap.sum())
        largest, place = (found.item() for found in gap.max(0))
        if self.place is None or largest > self.max_abs:
            self.max_abs, self.place = float(largest), start + int(place)
            if not largest:  # all that differs here is NaN in one
                self.place = start + int(nan.to(torch.uint8).argmax())
        rel = (gap / size).nan_to_num_(nan=math.inf, posinf=math.inf)  # also of all but zero
        self.max_rel = max(self.max_rel, float(rel.masked_fill_(gap == 0, 0.0).max()))

    def row(self, a: torch.Tensor, b: torch.Tensor) -> _Row:
        """The findings as a record, with both values at the place of the largest difference."""
        found: _Row = {
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "mean_abs": self.total / self.counted if self.counted else 0.0,
            "over": self.over,
            "differ": self.differ,
            "nan_one": self.nan_one,
        }
        if self.place is not None:
            index = place_of(self.place, a.shape)
            found["index"] = list(index)
            for key, tensor in (("a", a), ("b", b)):
                value = tensor[index].item()
                found[key] = str(value) if isinstance(value, complex) else value
        return found


# -- the picture -----------------------------------------------------------------------------------

_MOST_DRAWN = 40
_RIGHT = {"max |a - b|", "mean", "relative", "a", "b"}
_FACTS = ("over tolerance", "NaN in one", "max |a - b|", "at", "a", "b", "relative", "mean")

_Rows: TypeAlias = Mapping[int, Sequence[Mapping[str, Any]]]
_Cells: TypeAlias = tuple[Mapping[str, Text], tuple[int, ...]]


def comparison_parts(
    names: tuple[str, str], records: _Rows, counts: Mapping[int, Mapping[str, int]]
) -> Part:
    """Draw a comparison.

    Parameters
    ----------
    names
        What the two are called.
    records : mapping of rank to rows
    counts : mapping of rank to dict
        ``rows``, ``over`` and ``differ`` of all rows, told or not.
    """
    lone = all(len(rows) == 1 and rows[0].get("name") == "" for rows in records.values())
    title = Line(
        (
            Text(f"{cut(names[0], 60)} against {cut(names[1], 60)}", "title"),
            Text(f" · {_what(records, lone, counts)} on {_workers(len(records))} · "),
            _verdict(records, counts),
        )
    )
    below = _by_worker(records) if lone else _by_name(records, counts)
    return Card(title, tuple(below))


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _what(records: _Rows, lone: bool, counts: Mapping[int, Mapping[str, int]]) -> str:
    rows = [row for rows in records.values() for row in rows]
    words = {f"{row['dtype']}{format_shape(row['shape'])}" for row in rows if "dtype" in row}
    if lone:
        return words.pop() if len(words) == 1 else "values"
    return f"{max((count['rows'] for count in counts.values()), default=0):,} values"


def _verdict(records: _Rows, counts: Mapping[int, Mapping[str, int]]) -> Text:
    over = [rank for rank, count in sorted(counts.items()) if count["over"]]
    if over:
        if all(counts[rank]["over"] == counts[rank].get("no_data") for rank in over):
            return Text(f"no data to compare on {format_workers(over)}", "warning")
        return Text(f"≠ differ on {format_workers(over)}", "warning")
    if any(count["differ"] for count in counts.values()):
        return Text(f"✓ equal within {_tolerance(records)}", "good")
    return Text("✓ identical", "good")


def _tolerance(records: _Rows) -> str:
    known = {
        (row["rtol"], row["atol"]) for rows in records.values() for row in rows if "rtol" in row
    }
    if len(known) != 1:
        return "the tolerances of their dtypes"
    rtol, atol = known.pop()
    return f"rtol {rtol:g}, atol {atol:g}"


def _facts(row: Mapping[str, Any]) -> dict[str, Text]:
    """The cells of one pair; of two that are the same nothing but that they are."""
    if "problem" in row:
        return {"over tolerance": Text(str(row["problem"]), "warning")}
    over, size = row.get("over", 0), row.get("size", 1)
    cells = {
        "max |a - b|": Text(format_number(row.get("max_abs"))),
        "over tolerance": Text(f"{over:,} of {size:,}", "warning" if over else "plain"),
    }
    if row.get("differ"):
        a, b = pair_words(row.get("a"), row.get("b"))
        cells |= {
            "at": Text(format_shape(row["index"]) if "index" in row else ""),
            "a": Text(cut(a, 40)),
            "b": Text(cut(b, 40)),
            "relative": Text(format_number(row.get("max_rel"))),
            "mean": Text(format_number(row.get("mean_abs"))),
        }
    if row.get("nan_one"):
        if not row.get("max_abs"):  # nothing else differs
            cells |= {"max |a - b|": Text("nan"), "relative": Text("nan"), "mean": Text("")}
        cells["NaN in one"] = Text(f"{row['nan_one']:,}", "warning")
    return cells


def _by_worker(records: _Rows) -> list[Part]:
    """One pair of tensors: a row for each worker."""
    rows = [(rank, {**_dtypes(rows[0]), **_facts(rows[0])}) for rank, rows in records.items()]
    return [_table(("dtypes", *_FACTS), [(cells, (rank,)) for rank, cells in sorted(rows)])]


def _dtypes(row: Mapping[str, Any]) -> dict[str, Text]:
    if "other_dtype" not in row:
        return {}
    return {"dtypes": Text(f"{row['dtype']}, {row['other_dtype']}")}


def _by_name(records: _Rows, counts: Mapping[int, Mapping[str, int]]) -> list[Part]:
    """Many pairs: a row for each name, with the facts of the worker on which it is worst."""
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, rows in sorted(records.items()):
        for row in rows:
            by_name.setdefault(str(row.get("name")), {})[rank] = row
    odd: list[_Cells] = []
    usual: list[_Cells] = []
    for name, held in by_name.items():
        bad = [rank for rank, row in held.items() if row.get("over") or "problem" in row]
        worst = max(held, key=lambda rank: _badness(held[rank]))
        row = held[worst]
        words = f"{row['dtype']}{format_shape(row['shape'])}" if "dtype" in row else ""
        cells = {"name": Text(cut(name, 80)), "value": Text(words), **_dtypes(row), **_facts(row)}
        if bad:
            cells["differs on"] = Text(format_ranks(bad), "warning")
            cells["worst on"] = Text(str(worst) if len(bad) > 1 else "")
        (odd if bad else usual).append((cells, ()))
    titles = ("name", "value", "dtypes", "differs on", "worst on", *_FACTS)
    parts: list[Part] = []
    if odd:
        parts.append(_table(titles, odd[:_MOST_DRAWN]))
    total = max(count["rows"] for count in counts.values())
    if len(odd) > _MOST_DRAWN:
        parts.append(Text(f"and {len(odd) - _MOST_DRAWN} more that differ", "muted"))
    if usual:
        shown = usual[:_MOST_DRAWN]
        rest = max(total - len(odd), len(usual)) - len(shown)
        same = not any("a" in cells for cells, _ in usual)
        body: Part = _table(titles[:3] if same else titles, shown)
        if rest:
            body = VStack((body, Text(f"and {rest} more", "muted")))
        words = "identical" if same else "within tolerance"
        parts.append(Details(f"{words}: {rest + len(shown)}", body))
    return parts


def _badness(row: Mapping[str, Any]) -> tuple[bool, int, float]:
    over = row.get("over", 0)
    return "problem" in row, int(bool(row.get("nan_one"))), row.get("max_abs", 0.0) or float(over)


def _table(titles: Sequence[str], rows: Sequence[_Cells]) -> Table:
    used = [title for title in titles if any(title in cells for cells, _ in rows)]
    used = [t for t in used if any(cells[t].text for cells, _ in rows if t in cells)]
    return Table(
        tuple(Column(title, "right" if title in _RIGHT else "left") for title in used),
        tuple(
            Row(tuple(cells.get(title, Text("")) for title in used), ranks) for cells, ranks in rows
        ),
    )
