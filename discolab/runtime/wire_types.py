"""What both sides of the wire know: type indices, codes of dtypes, bounds, lengths.

No state but the tables of user types, which `register_type` replaces whole entries of; any
thread may read and write them. The layout is written down byte by byte in docs/protocol.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from .errors import ArgumentError, DiscoError

MAGIC = b"dlab"
VERSION = 2
HEADER = struct.Struct("<4sHI")  # magic, version, number of frames
DEEPEST = 72  # containers in containers: 64 of an argument, the rest for the command around it
MOST_DIMS = 64  # numpy's and torch's own bound
NO_FRAME = 0xFFFFFFFF  # the frame number of what has no bytes
LONG = 0xFF  # first byte of a length that needs more than one

# The type indices. A number is never used again for something else.
NONE, FALSE, TRUE, SMALL, INT, BIG, FLOAT, COMPLEX, STR, BYTES = range(10)
TUPLE, LIST, DICT, SET, FROZENSET, SLICE, RANGE, ELLIPSIS = range(16, 24)
REGISTER, SIZE, DTYPE, DEVICE, LAYOUT, MEMORY_FORMAT = range(32, 38)
TENSOR, ARRAY, SCALAR, BUFFER, ALIAS, AGAIN = range(48, 54)
USER, PICKLED = range(64, 66)

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
F64 = struct.Struct("<d")
C128 = struct.Struct("<dd")
struct_error = struct.error


class ProtocolError(DiscoError):
    """Bytes that are no message of this protocol: torn, of another version, or made wrongly."""


def bad(what: str, pos: int) -> NoReturn:
    """Raise the `ProtocolError` for what was read at offset `pos` of a message."""
    raise ProtocolError(f"malformed message: {what}, at offset {pos}")


def first_line(exc: BaseException) -> str:
    """What an exception says, on one line; of a user's class it may say anything or fail to."""
    try:
        text = str(exc)
    except Exception:
        text = ""
    return (text or type(exc).__name__).splitlines()[0][:300]


# -- codes --------------------------------------------------------------------------------------

# In the order of their codes; a name that this torch lacks leaves a gap. Append only.
# fmt: off
_DTYPE_NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "int1", "int2", "int3", "int4",
    "int5", "int6", "int7", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "qint8", "quint8",
    "qint32", "quint4x2", "quint2x4",
)
# fmt: on
_LAYOUT_NAMES = (
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "_mkldnn",
    "jagged",
)
_FORMAT_NAMES = (
    "contiguous_format",
    "channels_last",
    "channels_last_3d",
    "preserve_format",
)


def _of_torch(names: tuple[str, ...], code: int, kind: str, pos: int) -> Any:
    """The torch object of that code, or a `ProtocolError`."""
    if code >= len(names):
        bad(f"{code} is the code of no {kind}", pos)
    found = getattr(torch, names[code], None)
    if found is None:
        bad(f"the torch of this process has no {kind} torch.{names[code]}", pos)
    return found


def _codes(names: tuple[str, ...]) -> dict[Any, int]:
    found = {getattr(torch, name, None): code for code, name in enumerate(names)}
    found.pop(None, None)
    return found


DTYPE_CODE: dict[torch.dtype, int] = _codes(_DTYPE_NAMES)
LAYOUT_CODE: dict[torch.layout, int] = _codes(_LAYOUT_NAMES)
FORMAT_CODE: dict[torch.memory_format, int] = _codes(_FORMAT_NAMES)
QUANTIZED = frozenset(d for d in DTYPE_CODE if str(d).startswith(("torch.qint", "torch.quint")))
_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODE.items()}


def dtype_of(code: int, pos: int) -> torch.dtype:
    """The torch dtype of a code."""
    found = _DTYPES.get(code)
    return _of_torch(_DTYPE_NAMES, code, "dtype", pos) if found is None else found


def layout_of(code: int, pos: int) -> torch.layout:
    """The torch layout of a code."""
    return _of_torch(_LAYOUT_NAMES, code, "layout", pos)  # type: ignore[no-any-return]


def format_of(code: int, pos: int) -> torch.memory_format:
    """The torch memory format of a code."""
    return _of_torch(_FORMAT_NAMES, code, "memory format", pos)  # type: ignore[no-any-return]


# numpy's own words for them, either byte order; `longdouble` differs between machines
# fmt: off
_ARRAY_NAMES = (
    "|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8",
    "<c16", ">i2", ">u2", ">i4", ">u4", ">i8", ">u8", ">f2", ">f4", ">f8", ">c8", ">c16",
)
# fmt: on
_ARRAY_DTYPES = tuple(np.dtype(name) for name in _ARRAY_NAMES)
ARRAY_CODE: dict[np.dtype[Any], int] = {dtype: code for code, dtype in enumerate(_ARRAY_DTYPES)}


def array_dtype_of(code: int, pos: int) -> np.dtype[Any]:
    """The numpy dtype of a code."""
    if code >= len(_ARRAY_DTYPES):
        bad(f"{code} is the code of no numpy dtype", pos)
    return _ARRAY_DTYPES[code]


# -- lengths ------------------------------------------------------------------------------------

_SHORT = tuple(bytes((n,)) for n in range(LONG))


def length(n: int) -> bytes:
    """A length or a count as it is written: one byte below 255, else nine."""
    return _SHORT[n] if n < LONG else b"\xff" + U64.pack(n)


def read_length(body: bytes, pos: int, each: int = 1) -> tuple[int, int]:
    """A length or count of things of at least `each` bytes, and the offset behind it.

    It is never more than the rest of the message can hold.
    """
    n = body[pos]
    end = pos + 1
    if n == LONG:
        n = U64.unpack_from(body, end)[0]
        end += 8
    if n * each > len(body) - end:
        bad(f"a length of {n} with {len(body) - end} bytes left", pos)
    return n, end


# -- user types ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserType:
    """The three functions of a type that a user registered, and its name on the wire."""

    cls: type
    name: str
    head: bytes  # type index, length of the name, name
    size: Callable[[Any], int]
    write: Callable[[Any, memoryview], object]
    read: Callable[[memoryview], Any]


USER_BY_CLASS: dict[type, UserType] = {}
USER_BY_NAME: dict[str, UserType] = {}


def add_user_type(
    cls: type,
    name: str,
    size: Callable[[Any], int],
    write: Callable[[Any, memoryview], object],
    read: Callable[[memoryview], Any],
) -> None:
    """See `protocol.register_type`."""
    if not isinstance(cls, type):
        raise ArgumentError(f"register_type: a class is needed, got {cls!r}")
    if not isinstance(name, str) or not name or len(name.encode("utf-8", "replace")) > 200:
        raise ArgumentError(f"register_type: a name of 1 to 200 bytes is needed, got {name!r}")
    for what, function in (("size", size), ("write", write), ("read", read)):
        if not callable(function):
            raise ArgumentError(f"register_type: {what} must be a function, got {function!r}")
    try:
        text = name.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"register_type: {name!r} is no name in Unicode") from None
    kind = UserType(cls, name, bytes((USER,)) + length(len(text)) + text, size, write, read)
    former = USER_BY_NAME.get(name)
    if former is not None and former.cls.__qualname__ != cls.__qualname__:
        raise ArgumentError(
            f"register_type: {name!r} is the name of {former.cls.__qualname__} already"
        )
    if former is not None:  # a cell that ran again has made the class anew
        USER_BY_CLASS.pop(former.cls, None)
    other = USER_BY_CLASS.get(cls)
    if other is not None:
        USER_BY_NAME.pop(other.name, None)
    USER_BY_NAME[name] = USER_BY_CLASS[cls] = kind
