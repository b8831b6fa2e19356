"""Describes any value on the worker that holds it, as a small plain record.

`describe` runs as an ordinary worker function, in whatever thread the worker runs in. The record
travels to the controller, where `dref_view` draws the records of all workers. It never raises,
never runs a collective, and leaves random number generators and autograd as they were.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from typing import Any, cast

import torch

from .guard import FAILURES, Record, error_text, plain, safe_repr, type_name
from .tensors import (
    SMALL_BYTES,
    Stats,
    describe_array,
    describe_tensor,
    dtype_name,
    is_dtensor,
    shape_of,
)

_CHILDREN = 6
_PARAMETERS = 20
_DEPTH = 2
_SORTED_SET = 1000


def describe(value: object, stats: Stats = "auto") -> Record:
    """Describe a value in a few hundred bytes.

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
          count of nonfinite ones; of magnitudes if complex) and ``digest`` (16 hex digits); where
          it applies ``layout``, ``requires_grad``, ``placements``, ``logical_shape``, ``note``.
        - "module": ``type``, ``parameters``, ``nbytes``, ``params`` (name, shape, dtype),
          ``more`` (parameters not listed).
        - "list", "tuple", "dict": ``type``, ``length``, ``items`` (key, value), ``more``.
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
        return _describe(value, stats, 0)
    except FAILURES as error:
        return {"kind": "object", "type": type_name(value), "repr": "?", "error": error_text(error)}


def _describe(value: object, stats: Stats, depth: int) -> Record:
    if value is None:
        return {"kind": "none"}
    if hasattr(type(value), "__disco_describe__"):
        return _opted_in(value)
    if isinstance(value, torch.Tensor):
        return describe_tensor(value, stats)
    if isinstance(value, torch.nn.Module):
        return _module(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return describe_array(value, stats)
    if numpy is not None and isinstance(value, numpy.generic):
        return _object(value.item()) | {"type": type_name(value)}
    if isinstance(value, dict):
        return _container("dict", value, depth)
    if isinstance(value, tuple):
        return _container("tuple", value, depth)
    if isinstance(value, list):
        return _container("list", value, depth)
    return _object(value)


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
    if not whole:
        record["cut"] = True
    if isinstance(value, str | bytes | bytearray):
        record["length"] = len(value)
        if not whole and len(value) <= SMALL_BYTES:
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            record["digest"] = hashlib.blake2b(data, digest_size=8).hexdigest()
    return record


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


def _container(kind: str, value: Any, depth: int) -> Record:
    length = len(value)
    record: Record = {"kind": kind, "type": type_name(value), "length": length}
    if depth >= _DEPTH:
        return record
    if kind == "dict":
        pairs = [(_key(key), item) for key, item in itertools.islice(value.items(), _CHILDREN)]
    else:
        pairs = [(str(place), item) for place, item in enumerate(value[:_CHILDREN])]
    record["items"] = [{"key": key, "value": _child(item, depth + 1)} for key, item in pairs]
    if length > len(pairs):
        record["more"] = length - len(pairs)
    return record


def _key(key: object) -> str:
    return safe_repr(key, 60)[0]


def _child(value: object, depth: int) -> Record:
    try:
        return _describe(value, False, depth)
    except FAILURES as error:
        return {"kind": "object", "type": type_name(value), "repr": "?", "error": error_text(error)}


def _module(module: torch.nn.Module) -> Record:
    record: Record = {"kind": "module", "type": type_name(module)}
    count = nbytes = number = 0
    listed: list[Record] = []
    try:
        for number, (name, parameter) in enumerate(module.named_parameters(), start=1):
            row = _parameter(str(name), parameter)
            count += cast(int, row.pop("count"))
            nbytes += cast(int, row.pop("nbytes"))
            if number <= _PARAMETERS:
                listed.append(row)
        nbytes += sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    except FAILURES as error:
        record["error"] = f"parameters not listed: {error_text(error)}"
    record |= {"parameters": count, "nbytes": nbytes, "params": listed}
    if number > _PARAMETERS:
        record["more"] = number - _PARAMETERS
    return cast(Record, plain(record))


def _parameter(name: str, parameter: Any) -> Record:
    """Describe one parameter; a sharded one counts with what lies here, shown by full shape."""
    row: Record = {"name": name, "shape": None, "dtype": dtype_name(parameter.dtype)}
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        return row | {"count": 0, "nbytes": 0}
    local = parameter._local_tensor if is_dtensor(parameter) else parameter
    row["shape"] = shape_of(parameter)
    return row | {"count": local.numel(), "nbytes": local.numel() * local.element_size()}
