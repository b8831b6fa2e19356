"""Values to bytes: one small function a type, found by the exact class of the value.

Each puts pieces into a list that is joined at the end, so a message is allocated once at its
full size. The commonest types are written in line, in the loop over the items of a container:
a command is encoded by every call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from operator import index
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from . import wire_types as wire
from .arguments import Register
from .errors import ArgumentError
from .regions import find_regions
from .sealed import Sealed, seal
from .wire_alias import again_record, alias_record
from .wire_tensors import array_record, device_text, scalar_record, tensor_head, tensor_record
from .wire_types import (
    ARRAY_CODE,
    C128,
    DEEPEST,
    DTYPE_CODE,
    F64,
    FORMAT_CODE,
    INT,
    LAYOUT_CODE,
    SMALL,
    STR,
    TENSOR,
    TUPLE,
    USER_BY_CLASS,
    UserType,
    first_line,
    length,
    struct_error,
)

Put = Callable[[Any], None]


class Writing:
    """One message while it is written: its parts and frames, and whether it may have pickles.

    What has frames is written at the end, when it is certain which tensors share memory: `later`
    has its places among the parts.
    """

    __slots__ = ("frames", "later", "parts", "pickled")

    def __init__(self, parts: list[Any], pickled: bool) -> None:
        self.parts = parts
        self.frames: list[Any] = []
        self.later: list[tuple[int, Any]] = []
        self.pickled = pickled

    def put_later(self, value: Any) -> None:
        """Write a tensor, an array, or the frames of a pickle, here."""
        self.later.append((len(self.parts), value))
        self.parts.append(b"")

    def finish(self) -> None:
        """Write what was put off."""
        frames, value = self.frames, None
        try:
            different = {id(v): v for _, v in self.later if isinstance(v, torch.Tensor)}
            regions = find_regions(list(different.values()))
            ordinals: dict[int, int] = {}
            for place, value in self.later:
                if type(value) is tuple:
                    frames.extend(value)
                    continue
                if type(value) is np.ndarray:
                    record = array_record(value, frames)
                else:
                    record = self._tensor(value, regions.get(id(value)), ordinals)
                assert record is not None, "only what is plain was put off"
                self.parts[place] = record
        except Exception as exc:  # a tensor of vmap, say, whose memory can't be had
            kind = type(next(iter(different.values())) if value is None else value)
            raise _cannot(kind, exc) from exc

    def _tensor(self, tensor: Any, region: Any, ordinals: dict[int, int]) -> bytes | None:
        ordinal = ordinals.get(id(tensor))
        if ordinal is not None:
            return again_record(ordinal)
        ordinals[id(tensor)] = len(ordinals)
        if region is not None:
            return alias_record(tensor, region, self.frames)
        return tensor_record(tensor, self.frames)


def _cannot(kind: type, exc: Exception) -> ArgumentError:
    return ArgumentError(
        f"a {kind.__qualname__} can't be sent to another process: {first_line(exc)}"
    )


Writer = Callable[[Any, Put, Writing, int], None]

_SMALL = tuple(bytes((SMALL, n)) for n in range(256))
_EMPTY_TUPLE = bytes((TUPLE, 0))
_EMPTY_DICT = bytes((wire.DICT, 0))
_SHORT_STR = tuple(bytes((STR, n)) for n in range(255))
_SHORT_TUPLE = tuple(bytes((TUPLE, n)) for n in range(255))
_pack_int = struct.Struct("<Bq").pack


def write_items(items: Sequence[Any], put: Put, out: Writing, depth: int) -> None:
    """Write values one behind the other; `depth` containers are around them."""
    for item in items:
        kind = type(item)
        if kind is int:
            if 0 <= item < 256:
                put(_SMALL[item])
            else:
                try:
                    put(_pack_int(INT, item))
                except struct_error:
                    _write_big(item, put, out, depth)
        elif kind is str:
            try:
                text = item.encode()
            except UnicodeEncodeError:  # half of a surrogate pair, as in odd file names
                text = item.encode("utf-8", "surrogatepass")
            n = len(text)
            put(_SHORT_STR[n] if n < 255 else _head(STR, n))
            put(text)
        elif kind is tuple:
            n = len(item)
            if n:
                put(_SHORT_TUPLE[n] if n < 255 else _head(TUPLE, n))
                if depth >= DEEPEST:
                    _too_deep()
                write_items(item, put, out, depth + 1)
            else:
                put(_EMPTY_TUPLE)
        else:
            _find(kind, _write_other)(item, put, out, depth)


def _head(kind: int, n: int) -> bytes:
    return bytes((kind,)) + length(n)


def _too_deep() -> None:
    raise ArgumentError(
        f"a value is nested more than {DEEPEST} deep (does a list hold itself?); "
        "no message can carry that"
    )


# -- numbers and texts --------------------------------------------------------------------------


def _constant(kind: int) -> Writer:
    data = bytes((kind,))
    return lambda value, put, out, depth: put(data)


def _write_bool(value: bool, put: Put, out: Writing, depth: int) -> None:
    put(b"\x02" if value else b"\x01")


def _write_big(value: int, put: Put, out: Writing, depth: int) -> None:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    put(_head(wire.BIG, len(data)))
    put(data)


def _write_float(value: float, put: Put, out: Writing, depth: int) -> None:
    put(_FLOAT)
    put(F64.pack(value))


def _write_complex(value: complex, put: Put, out: Writing, depth: int) -> None:
    put(bytes((wire.COMPLEX,)) + C128.pack(value.real, value.imag))


def _write_bytes(value: bytes, put: Put, out: Writing, depth: int) -> None:
    put(_head(wire.BYTES, len(value)))
    put(value)


_FLOAT = bytes((wire.FLOAT,))
_pack_register = struct.Struct("<Bq").pack


def _write_register(value: Register, put: Put, out: Writing, depth: int) -> None:
    try:
        put(_pack_register(wire.REGISTER, value))
    except struct_error:
        raise ArgumentError("the number of a register must fit in 64 bits") from None


# -- containers ---------------------------------------------------------------------------------


def _container(kind: int) -> Writer:
    def write(value: Any, put: Put, out: Writing, depth: int) -> None:
        items = tuple(value)  # at one moment, should another thread change it
        put(_head(kind, len(items)))
        if items:
            if depth >= DEEPEST:
                _too_deep()
            write_items(items, put, out, depth + 1)

    return write


def _write_dict(value: dict[Any, Any], put: Put, out: Writing, depth: int) -> None:
    if not value:
        put(_EMPTY_DICT)
        return
    if depth >= DEEPEST:
        _too_deep()
    pairs = list(value.items())
    put(_head(wire.DICT, len(pairs)))
    write_items(tuple(chain.from_iterable(pairs)), put, out, depth + 1)


def _write_slice(value: slice, put: Put, out: Writing, depth: int) -> None:
    if depth >= DEEPEST:
        _too_deep()
    put(bytes((wire.SLICE,)))
    write_items((value.start, value.stop, value.step), put, out, depth + 1)


def _write_range(value: range, put: Put, out: Writing, depth: int) -> None:
    put(bytes((wire.RANGE,)))
    write_items((value.start, value.stop, value.step), put, out, depth)


# -- torch and numpy ----------------------------------------------------------------------------


def _write_size(value: torch.Size, put: Put, out: Writing, depth: int) -> None:
    try:
        data = struct.pack(f"<{len(value)}q", *value)
    except struct_error:
        return _write_pickled(value, put, out, depth)
    put(_head(wire.SIZE, len(value)))
    put(data)


def _coded(kind: int, codes: dict[Any, int]) -> Writer:
    def write(value: Any, put: Put, out: Writing, depth: int) -> None:
        code = codes.get(value)
        if code is None:
            _write_pickled(value, put, out, depth)
        else:
            put(bytes((kind, code)))

    return write


def _write_device(value: torch.device, put: Put, out: Writing, depth: int) -> None:
    put(bytes((wire.DEVICE,)))
    put(device_text(value))


def _write_scalar(value: np.generic, put: Put, out: Writing, depth: int) -> None:
    record = scalar_record(value)
    if record is None:
        _write_pickled(value, put, out, depth)
    else:
        put(record)


def _write_tensor(value: torch.Tensor, put: Put, out: Writing, depth: int) -> None:
    try:
        plain = tensor_head(TENSOR, value) is not None
    except Exception as exc:
        raise _cannot(type(value), exc) from exc
    if plain:
        out.put_later(value)
    else:
        _write_pickled(value, put, out, depth)


def _write_array(value: np.ndarray[Any, Any], put: Put, out: Writing, depth: int) -> None:
    if value.dtype in ARRAY_CODE and not value.dtype.metadata:
        out.put_later(value)
    else:
        _write_pickled(value, put, out, depth)


# -- everything else ----------------------------------------------------------------------------


def _write_other(value: Any, put: Put, out: Writing, depth: int) -> None:
    user = USER_BY_CLASS.get(type(value))
    if user is None:
        _write_pickled(value, put, out, depth)
    else:
        _write_user(user, value, put)


def _write_user(user: UserType, value: Any, put: Put) -> None:
    try:
        size = index(user.size(value))
        data = bytearray(size)
        user.write(value, memoryview(data))
    except Exception as exc:
        raise ArgumentError(
            f"a {user.cls.__qualname__} can't be sent: the functions registered for the type "
            f"{user.name!r} raised {type(exc).__name__}: {first_line(exc)}"
        ) from exc
    put(user.head)
    put(length(size))
    put(data)


def _write_pickled(value: Any, put: Put, out: Writing, depth: int) -> None:
    if not out.pickled:
        kind = type(value)
        raise ArgumentError(
            f"a {kind.__module__}.{kind.__qualname__} can't be sent here: it would have to be "
            "pickled, and this message must do without"
        )
    sealed = seal(value)
    what = sealed.what.encode("utf-8", "replace")
    put(_head(wire.PICKLED, len(what)))
    put(what)
    put(length(len(sealed.frames)))
    put(length(len(sealed.table)))
    put(sealed.table)
    put(length(len(sealed.data)))
    put(sealed.data)
    if sealed.frames:
        out.put_later(sealed.frames)


_WRITERS: dict[type, Writer] = {
    type(None): _constant(wire.NONE),
    bool: _write_bool,
    float: _write_float,
    complex: _write_complex,
    bytes: _write_bytes,
    Register: _write_register,
    list: _container(wire.LIST),
    set: _container(wire.SET),
    frozenset: _container(wire.FROZENSET),
    dict: _write_dict,
    slice: _write_slice,
    range: _write_range,
    EllipsisType: _constant(wire.ELLIPSIS),
    torch.Size: _write_size,
    torch.dtype: _coded(wire.DTYPE, DTYPE_CODE),
    torch.layout: _coded(wire.LAYOUT, LAYOUT_CODE),
    torch.memory_format: _coded(wire.MEMORY_FORMAT, FORMAT_CODE),
    torch.device: _write_device,
    torch.Tensor: _write_tensor,
    torch.nn.Parameter: _write_tensor,
    np.ndarray: _write_array,
}
for _kind in (np.bool_, *np.sctypeDict.values()):
    _WRITERS[_kind] = _write_scalar
_find = _WRITERS.get

OWN_TYPES = frozenset((*_WRITERS, int, str, tuple, Sealed))
assert wire.FALSE == 1 and wire.TRUE == 2
