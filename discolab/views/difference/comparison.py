"""Compares two values on each worker: ``sess.compare(a, b)``.

The workers compare, chunk by chunk and without a collective, what they hold under both names, and
send a few hundred bytes for each tensor. Values of any nesting are matched by name: a module and
its ``state_dict`` too. `Comparison` keeps the records and draws itself.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from ...runtime.drawn import Pictured
from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError
from ...runtime.registers import OWN
from ..dref.contents import grouped
from ..facts.guard import FAILURES, error_text, safe_repr, type_name
from ..facts.storage import why_no_data
from ..facts.tensors import dtype_name, is_dtensor, shape_of
from ..parts import Part
from .difference_view import comparison_parts
from .tensor_difference import difference_of

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


compare_values.disco_command = "a comparison"  # type: ignore[attr-defined]  # what status calls it


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
