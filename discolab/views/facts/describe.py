"""Describes any value on the worker that holds it, as a small plain record.

`describe` runs as an ordinary worker function, in whatever thread the worker runs in. The record
travels to the controller, where `dref.view` draws the records of all workers. It never raises,
never runs a collective, and leaves random number generators and autograd as they were.

A record stays under 100 KB: the first parameters of a module are told in full, some hundreds more
in a line each, all others in one digest. Digests, by which workers are compared, are taken unasked
of modules up to 16 MiB. If they differ, `dref.ask` has the others compared block by block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...runtime.functions import worker_function
from ..dref.contents import content_key
from ..formats import cut, format_ranks, format_shape
from ..summary import summarize
from .guard import (
    FAILURES,
    FAILURES_OR_STOP,
    Record,
    carriable,
    error_text,
    plain,
    raise_stop,
    safe_repr,
    type_name,
)
from .tensors import (
    SMALL_BYTES,
    Stats,
    describe_array,
    describe_tensor,
    digest_of,
    dtype_name,
    is_dtensor,
    is_lazy,
    shape_of,
    sharding_of,
    why_no_data,
)

DRAWING = "drawing a value"  # what status calls what the workers do for a picture
_CHILDREN = 6  # items told of a container within another
_NODES = 240  # values told in one record
_DEPTH = 3
_SORTED_SET = 1000
_LONGEST_PLAIN = 10_000  # items of a plain container that are compared
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, tuple, list)


@dataclass
class _Scope:
    """What is left to tell in one record, and whether digests of items are to be taken."""

    stats: Stats
    nodes: int = _NODES
    digests: bool = False


@worker_function(DRAWING)
def describe(value: object, stats: Stats = "auto") -> Record:
    """Describe a value in a kilobyte or two.

    Parameters
    ----------
    value : object
        Anything. A type may opt in with a method ``__disco_describe__()`` that returns a record
        as below, or one of a kind of its own with a one-line ``summary``.
    stats : bool or "auto"
        True: statistics and digest of tensors of any size. False: metadata only, no data read.
        "auto": statistics and digest up to 4 MiB, the first values always.

    Returns
    -------
    dict
        Holds only None, bool, int, float, str, list and dict. Always ``kind``, and:

        - "tensor": ``type``, ``shape``, ``dtype`` (``"float32"``), ``device``, ``nbytes``; on
          demand ``head`` (first values), ``stats`` (mean, std, min, max of the finite values,
          count of nonfinite ones; of magnitudes if complex), ``digest`` (16 hex digits),
          ``thumbnail`` (at most 24 x 24 cells), ``histogram`` (of 24 bins from min to max) and
          ``places`` (of the first nonfinite values: kind, index); where it applies ``layout``,
          ``requires_grad``, ``placements``, ``logical_shape``, ``note``.
        - "module": ``type``, ``layers`` (names), ``parameters``, ``nbytes``, ``params`` (name,
          shape, dtype, nbytes, digest; ``buffer``, ``frozen``, ``grad`` where true; ``layout``,
          an index into ``layouts``), ``more`` (parameters and buffers beyond 40), ``brief`` (of
          500 of those: name, words, digest), ``digest`` of all; ``training`` (how many of the
          modules in it, and how many there are), ``settings`` (what they say of themselves, and
          how many do).
        - "list", "tuple", "dict", "dataclass": ``type``, ``length``, ``items`` (key, value),
          ``more``; of tensors beyond 40 ``brief`` as above. Up to 16 MiB in all, tensors in it
          have a ``digest``.
        - "object": ``type``, ``repr`` (at most 200 characters), ``cut`` if that is not all.
        - "none".

        ``error`` says what could not be found out.

    Examples
    --------
    >>> describe(3)
    {'kind': 'object', 'type': 'int', 'repr': '3'}
    >>> describe(torch.ones(2, 3), stats=False)["shape"]
    [2, 3]
    """
    try:
        return _describe(value, _Scope(stats), 0)
    except FAILURES_OR_STOP as error:
        raise_stop(error)
        return {"kind": "object", "type": type_name(value), "repr": "?", "error": error_text(error)}


def _describe(value: object, scope: _Scope, depth: int) -> Record:
    if value is None:
        return {"kind": "none"}
    if hasattr(type(value), "__disco_describe__"):
        return _opted_in(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value, scope, depth)
    if isinstance(value, torch.nn.Module):
        inner = scope.stats if not depth or scope.digests else False
        return describe_module(value, inner) if not depth else _inner_module(value, inner)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return describe_array(value, False if depth else scope.stats)
    if numpy is not None and isinstance(value, numpy.generic):
        return _object(value.item()) | {"type": type_name(value)}
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return _container(kind.__name__, value, scope, depth)
    if _shown_by_fields(value):
        return _container("dataclass", value, scope, depth)
    return _object(value)


def _tensor(value: torch.Tensor, scope: _Scope, depth: int) -> Record:
    """A tensor; of one in a container no values and no statistics, but maybe its digest."""
    if not depth:
        return describe_tensor(value, scope.stats)
    record = describe_tensor(value, False)
    if scope.digests and "note" not in record:
        try:
            record["digest"] = digest_of(value)
        except FAILURES as error:
            record["error"] = f"digest failed: {error_text(error)}"
    return record


def _inner_module(value: torch.nn.Module, stats: Stats) -> Record:
    """A module in a container: in a line, not parameter by parameter."""
    record = describe_module(value, stats)
    for key in ("params", "brief", "layouts", "more", "training", "settings"):
        record.pop(key, None)
    return record


def _opted_in(value: Any) -> Record:
    try:
        found = value.__disco_describe__()
        if not isinstance(found, dict):
            raise TypeError(f"__disco_describe__ returned {type_name(found)}, expected dict")
        record = cast(Record, plain(found))
    except FAILURES as error:
        return {**_object(value), "error": error_text(error)}
    record.setdefault("kind", "object")
    record.setdefault("type", type_name(value))
    return record


def _object(value: object) -> Record:
    record: Record = {"kind": "object", "type": type_name(value)}
    if isinstance(value, set | frozenset):
        return record | _set(value)
    text, whole = safe_repr(value)
    record["repr"] = text
    if not whole or (not isinstance(value, str | bytes | bytearray) and _is_vague(value, text)):
        record["cut"] = True
    if isinstance(value, str | bytes | bytearray):
        record["length"] = len(value)
        if not whole and len(value) <= SMALL_BYTES:
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            record["digest"] = hashlib.blake2b(data, digest_size=8).hexdigest()
    return record


def _is_vague(value: object, text: str) -> bool:
    """Whether values that differ may have this repr: torch's and numpy's leave out the middle."""
    return type(value).__repr__ is object.__repr__ or "..." in text


def _set(value: set[object] | frozenset[object]) -> Record:
    """Write a set in sorted order: the order of its own repr differs from process to process."""
    length = len(value)
    if not length or length > _SORTED_SET:
        words = "()" if not length else f" of {length}"
        return {"repr": type_name(value) + words, "length": length, "cut": bool(length)}
    inner = ", ".join(sorted(safe_repr(item, 60)[0] for item in value))
    text, whole = safe_repr(_Verbatim("{" + inner + "}"))
    return {"repr": text, "length": length} | ({} if whole else {"cut": True})


class _Verbatim(str):
    """A string that is its own repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _container(kind: str, value: Any, scope: _Scope, depth: int) -> Record:
    pairs: Iterator[tuple[str, Any]]
    if kind == "dataclass":
        fields = [(field.name, getattr(value, field.name, None)) for field in _fields(value)]
        pairs, length = iter(fields), len(fields)
    elif kind == "dict":
        pairs, length = ((_key(key), item) for key, item in value.items()), len(value)
    else:
        names = getattr(type(value), "_fields", None) if kind == "tuple" else None
        keys = names if isinstance(names, tuple) else itertools.count()
        pairs, length = zip(map(str, keys), value, strict=False), len(value)
    record: Record = {"kind": kind, "type": type_name(value), "length": length}
    if depth >= _DEPTH or not scope.nodes:
        return record
    if not depth:
        total = _bytes_in(value)
        record |= {"nbytes": total} if total else {}
        scope.digests = scope.stats is True or (scope.stats == "auto" and total <= SMALL_MODULE)
    most = min(MOST_LISTED if not depth else _CHILDREN, scope.nodes)
    told = list(itertools.islice(pairs, most))
    scope.nodes -= len(told)
    record["items"] = [{"key": key, "value": _child(item, scope, depth + 1)} for key, item in told]
    if length > len(told):
        record["more"] = length - len(told)
        if not depth:
            record |= _whole_digest(kind, value) or _brief(record, pairs, scope)
    return record


def _brief(record: Record, pairs: Iterator[tuple[str, Any]], scope: _Scope) -> Record:
    """A line for each of the tensors after those that are told in full, and a digest of all."""
    lines: list[list[object]] = []
    known = scope.digests
    for key, item in itertools.islice(pairs, _LONGEST_PLAIN):
        if not isinstance(item, torch.Tensor):
            return {}
        found = _child(item, scope, 1)
        known = known and "digest" in found
        lines.append([key, summarize(found, 60), found.get("digest")])
    told = cast(list[Record], record["items"])
    keys = [(item["key"], content_key(cast(Record, item["value"]))) for item in told]
    if not known or any(key is None for _, key in keys):
        return {"brief": lines[:MOST_BRIEF]}
    return {"brief": lines[:MOST_BRIEF], "digest": text_digest(f"{keys}{lines}")}


def _whole_digest(kind: str, value: Any) -> Record:
    """Of a container of plain values that is not told in full: something to compare it by."""
    if len(value) > _LONGEST_PLAIN or kind == "dataclass":
        return {}
    items = itertools.chain(value, value.values()) if kind == "dict" else iter(value)
    if not all(type(item) in _ATOMS for item in items):
        return {}
    return {"digest": text_digest(repr(value))}


def _bytes_in(value: Any) -> int:
    """How many bytes the tensors in a container have, as far as they are told."""
    todo, total, seen = [(value, 0)], 0, 0
    while todo and seen < _LONGEST_PLAIN:
        one, depth = todo.pop()
        seen += 1
        if isinstance(one, torch.Tensor):
            total += _size(one)
        elif isinstance(one, torch.nn.Module):
            total += sum(map(_size, itertools.chain(one.parameters(), one.buffers())))
        elif depth < _DEPTH and isinstance(one, _CONTAINERS):
            inner = one.values() if isinstance(one, dict) else one
            todo += [(item, depth + 1) for item in itertools.islice(inner, _LONGEST_PLAIN)]
        elif depth < _DEPTH and _shown_by_fields(one):
            todo += [(getattr(one, field.name, None), depth + 1) for field in _fields(one)]
    return total


def _size(tensor: Any) -> int:
    try:
        local = getattr(tensor, "_local_tensor", tensor)
        return min(int(local.numel() * local.element_size()), 2**50)
    except FAILURES:
        return 0


def _shown_by_fields(value: Any) -> bool:
    """Whether a value is of a dataclass that has not a repr of its own."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind):
        return False
    made = getattr(kind.__repr__, "__wrapped__", None)  # by the decorator
    return getattr(getattr(made, "__code__", None), "co_filename", "") == "<string>"


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if field.repr]


def _key(key: object) -> str:
    return safe_repr(key, 60)[0]


def _child(value: object, scope: _Scope, depth: int) -> Record:
    try:
        return _describe(value, scope, depth)
    except FAILURES as error:
        return {"kind": "object", "type": type_name(value), "repr": "?", "error": error_text(error)}


# -- modules: layers, parameters and buffers -------------------------------------------------------

#: Digests of parameters and items are taken unasked up to this many bytes in all.
SMALL_MODULE = 16 * 2**20

MOST_LISTED = 40  # parameters, or items of a container, told in full
MOST_BRIEF = 500  # parameters after those
_MOST_LAYERS = 8
_MOST_LAYOUTS = 16
_MOST_SET_UP = 1000  # modules whose settings are looked at
_NAME_LIMIT = 120
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def describe_module(module: torch.nn.Module, stats: Stats) -> Record:
    """Describe a module.

    Returns
    -------
    dict
        Kind "module"; see `describe`. ``params`` has a row for each of the first parameters and
        buffers; ``brief`` has ``[name, words, digest]`` for those after them.
    """
    record: Record = {"kind": "module", "type": type_name(module)}
    rows: list[tuple[str, Any, bool]] = []
    try:
        rows += [(name, value, False) for name, value in module.named_parameters()]
        rows += [(name, value, True) for name, value in module.named_buffers()]
        record["layers"] = _layers(module)
    except FAILURES as error:
        record["error"] = f"parameters not listed: {error_text(error)}"
    counts = [0 if buffer else _count(value) for _, value, buffer in rows]
    nbytes = sum(_bytes(value) for _, value, _ in rows)
    small = stats is True or (stats == "auto" and nbytes <= SMALL_MODULE)
    digests = [_digest(value) if small else None for _, value, _ in rows]
    layouts = _Layouts()
    listed = [
        _row(*row, digest, layouts)
        for row, digest in zip(rows[:MOST_LISTED], digests[:MOST_LISTED], strict=True)
    ]
    record |= {"parameters": sum(counts), "nbytes": nbytes, "params": listed}
    if stats is not False:
        record |= _set_up(module)
    if layouts.found:
        record["layouts"] = layouts.found
    if len(rows) > MOST_LISTED:
        record["more"] = len(rows) - MOST_LISTED
        pairs = zip(rows[MOST_LISTED:], digests[MOST_LISTED:], strict=True)
        record["brief"] = [
            [_name(name), cut(_words(value), 60), digest]
            for (name, value, _), digest in itertools.islice(pairs, MOST_BRIEF)
        ]
    if small and None not in digests:
        record["digest"] = text_digest(
            "\n".join(f"{row[0]} {digest}" for row, digest in zip(rows, digests, strict=True))
        )
    return record


def text_digest(text: str) -> str:
    """Hash a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class _Layouts:
    """How DTensors are laid out: each layout is told once, parameters have its number."""

    def __init__(self) -> None:
        self.found: list[object] = []

    def number(self, tensor: Any) -> int | None:
        """The number of a layout, None if there are too many."""
        sharding = sharding_of(tensor)
        if sharding not in self.found:
            if len(self.found) == _MOST_LAYOUTS:
                return None
            self.found.append(sharding)
        return self.found.index(sharding)


def _row(name: str, value: Any, buffer: bool, digest: str | None, layouts: _Layouts) -> Record:
    """One parameter or buffer; a sharded one counts with what lies here, shown by full shape."""
    row: Record = {"name": _name(name), "shape": None, "dtype": dtype_name(value.dtype)}
    if why := why_no_data(value):
        row["note"] = why
    if is_lazy(value):
        return row
    row |= {"shape": shape_of(value), "nbytes": _bytes(value)}
    if digest is not None:
        row["digest"] = digest
    if buffer:
        row["buffer"] = True
    elif not value.requires_grad:
        row["frozen"] = True
    if value.is_leaf and value.grad is not None:
        row["grad"] = True
    if is_dtensor(value):
        try:
            row["layout"] = layouts.number(value)
        except FAILURES as error:
            row["error"] = error_text(error)
    return row


def _set_up(module: torch.nn.Module) -> Record:
    """In what mode the modules in it are, and their settings, as a dropout's rate: equal ones once.

    Of a few modules there are many in a model, so a line for each kind is enough.
    """
    try:
        inner = [one for _, one in itertools.islice(module.named_modules(), _MOST_SET_UP)]
        found: dict[str, int] = {}
        for one in inner:
            said = one.extra_repr()
            if isinstance(said, str) and said and " at 0x" not in said:
                words = carriable(cut(f"{type_name(one)}({said})", _NAME_LIMIT))
                found[words] = found.get(words, 0) + 1
        training = sum(bool(one.training) for one in inner)
    except FAILURES:
        return {}
    settings = [list(pair) for pair in itertools.islice(found.items(), MOST_LISTED)]
    return {"training": [training, len(inner)], "settings": settings}


def _words(value: Any) -> str:
    return f"{dtype_name(value.dtype)}{format_shape(None if is_lazy(value) else shape_of(value))}"


def _name(name: object) -> str:
    return carriable(cut(str(name), _NAME_LIMIT))


def _local(value: Any) -> Any:
    return value._local_tensor if is_dtensor(value) else value


def _count(value: Any) -> int:
    return 0 if is_lazy(value) else cast(int, _local(value).numel())


def _bytes(value: Any) -> int:
    local = _local(value)
    return 0 if is_lazy(value) else min(local.numel() * local.element_size(), 2**62)


def _digest(value: Any) -> str | None:
    try:
        return digest_of(value)
    except FAILURES:
        return None


def _layers(module: torch.nn.Module) -> list[str]:
    """Name the layers that a module has; those in a list or a sequence by their numbers.

    A stage of a pipeline thus says which layers of the whole model it has.
    """
    found = []
    for name, child in itertools.islice(module.named_children(), _MOST_LAYERS + 1):
        inner = [key for key, _ in itertools.islice(child.named_children(), 1000)]
        if inner and isinstance(child, _LISTS):
            found.append(f"{name}.{_numbers(inner)}")
        else:
            found.append(name)
    if found and all(name.isdecimal() for name in module._modules):
        return [_name(_numbers(list(module._modules)))]
    if len(found) > _MOST_LAYERS:
        found[-1] = "…"
    return [_name(words) for words in found]


def _numbers(names: list[str]) -> str:
    """``4-7`` for neighbouring numbers, ``a,b`` for names."""
    numbers = all(name.isdecimal() for name in names)
    return format_ranks(map(int, names)) if numbers else ",".join(names)


# -- parameters and items beyond those that a record names: by block, then by name -----------------

MOST_NAMED = MOST_LISTED + MOST_BRIEF  # tensors that a record names; the others overflow
_MOST_OVERFLOW = 10_000  # of these are looked at
_MOST_BLOCKS = 256


def block_size(count: int) -> int:
    """How many of `count` tensors make a block."""
    return max(-(-min(count, _MOST_OVERFLOW) // _MOST_BLOCKS), 1)


@worker_function(DRAWING)
def overflow_blocks(value: object, count: int) -> list[str] | None:
    """A digest of each block of the `count` tensors after the first; None if one can't be read."""
    try:
        size = block_size(count)
        told = _overflow_lines(value, 0, _MOST_OVERFLOW)
        lines = [f"{name} {words} {digest}" for name, words, digest in told]
        starts = range(0, len(lines), size)
        return [text_digest("\n".join(lines[start : start + size])) for start in starts]
    except FAILURES:
        return None


@worker_function(DRAWING)
def overflow_rows(value: object, count: int, blocks: Sequence[int]) -> list[list[str]] | None:
    """Name, words and digest of each tensor in these blocks, as in the ``brief`` of a record."""
    try:
        size = block_size(count)
        return [
            line
            for block in blocks
            for line in _overflow_lines(
                value, block * size, min((block + 1) * size, _MOST_OVERFLOW)
            )
        ]
    except FAILURES:
        return None


def _overflow_lines(value: Any, first: int, last: int) -> Iterator[list[str]]:
    """In a line each, tensors from one number to another, counted after those that are named."""
    for name, item in itertools.islice(
        _named_tensors(value), MOST_NAMED + first, MOST_NAMED + last
    ):
        digest = digest_of(item)
        if digest is None:
            raise ValueError("a tensor without data")
        words = f"{dtype_name(item.dtype)}{format_shape(shape_of(item))}"
        yield [carriable(cut(name, 120)), cut(words, 60), digest]


def _named_tensors(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        return itertools.chain(value.named_parameters(), value.named_buffers())
    if isinstance(value, dict):
        return ((safe_repr(key, 60)[0], item) for key, item in value.items())
    return ((str(place), item) for place, item in enumerate(value))
