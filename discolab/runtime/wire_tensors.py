"""Tensors, arrays and raw buffers on the wire: a record in the message, the bytes in a frame.

Stateless, on the thread that encodes or decodes. Writing copies nothing of a contiguous CPU
tensor or array; reading gives a view on the frame, or a copy where the frame's memory must not
be written or lies askew for the dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch

from .regions import bare, dressed
from .wire_types import (
    ARRAY,
    ARRAY_CODE,
    BUFFER,
    DTYPE_CODE,
    MOST_DIMS,
    NO_FRAME,
    QUANTIZED,
    SCALAR,
    TENSOR,
    U32,
    ProtocolError,
    array_dtype_of,
    bad,
    dtype_of,
    first_line,
)

Place = Callable[[torch.Tensor, torch.device], torch.Tensor]

_NEEDS_GRAD, _PARAMETER, _CONJ, _NEG = 1, 2, 4, 8  # flags of a tensor
_FORTRAN = 1  # flag of an array
_READ_ONLY = 1  # flag of a buffer
_MOST_BYTES = 2**63 - 1
_CPU = torch.device("cpu")

SHAPES = tuple(struct.Struct(f"<{n}Q") for n in range(MOST_DIMS + 1))


class Frames:
    """The frames of a message while it is read: each is taken once, in order.

    `dry` reads only check; they give None for a tensor, an array or a buffer.
    """

    __slots__ = ("all", "dry", "next", "place", "shared", "tensors")

    def __init__(
        self, frames: Sequence[memoryview], place: Place | None = None, dry: bool = False
    ) -> None:
        self.all = frames
        self.next = 0
        self.place = place
        self.dry = dry
        self.shared: dict[int, tuple[Any, torch.device]] = {}  # what several aliases look at
        self.tensors: list[Any] = []  # in the order of their records

    def take(self, number: int, nbytes: int | None, pos: int) -> memoryview:
        """The frame of that number, which must be the one after the last, and of that size."""
        if number != self.next:
            bad(f"frame {number} where frame {self.next} is next", pos)
        if number >= len(self.all):
            bad(f"frame {number} of {len(self.all)}", pos)
        frame = self.all[number]
        if nbytes is not None and frame.nbytes != nbytes:
            bad(f"frame {number} has {frame.nbytes} bytes where {nbytes} are due", pos)
        self.next = number + 1
        return frame


def as_bytes(frame: Any, what: str) -> memoryview:
    """A frame as a flat view of bytes."""
    try:
        view = memoryview(frame)
        flat = view.format == "B" and view.ndim == 1 and view.c_contiguous
        return view if flat else view.cast("B")
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{what} is no contiguous buffer: {exc}") from None


def view_of(array: Any) -> memoryview:
    """The memory of a flat array of bytes."""
    return memoryview(array)


def usable(frame: memoryview, align: int) -> Any:
    """The bytes of a frame, writable and aligned: the frame itself if it is, else a copy."""
    if frame.readonly or addressof(c_char.from_buffer(frame)) % align:
        return bytearray(frame)
    return frame


# -- writing ------------------------------------------------------------------------------------


def tensor_head(index: int, tensor: torch.Tensor) -> bytes | None:
    """Type index, dtype, flags, device of a plain tensor; None of another."""
    code = DTYPE_CODE.get(tensor.dtype)
    if (
        code is None
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
        or tensor.dim() > MOST_DIMS
    ):
        return None
    flags = _NEEDS_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= _PARAMETER
    if tensor.is_conj():
        flags |= _CONJ
    if tensor.is_neg():
        flags |= _NEG
    head = bytes((index, code, flags))
    return head + (b"\x03cpu" if tensor.device == _CPU else device_text(tensor.device))


def tensor_record(tensor: torch.Tensor, frames: list[Any]) -> bytes | None:
    """The record of a plain tensor, its bytes appended to `frames`; None if it is not plain."""
    head = tensor_head(TENSOR, tensor)
    if head is None:
        return None
    number = NO_FRAME
    if tensor.numel():
        number = len(frames)
        data = bare(tensor).cpu().contiguous()
        # not reshape: with one element any stride is contiguous, and would stay
        flat = data.as_strided((data.numel(),), (1,))
        frames.append(view_of(flat.view(torch.uint8).numpy()))
    shape = tensor.shape
    dims = len(shape)
    return b"".join((head, bytes((dims,)), SHAPES[dims].pack(*shape), U32.pack(number)))


def array_record(array: np.ndarray[Any, Any], frames: list[Any]) -> bytes | None:
    """The record of an array of a plain dtype, its bytes appended; None if it is not plain."""
    code = ARRAY_CODE.get(array.dtype)
    if code is None or array.dtype.metadata:
        return None
    flags = 0
    shape = array.shape
    if not array.flags.c_contiguous and array.flags.f_contiguous:
        flags = _FORTRAN
        array = array.T
    number = NO_FRAME
    if array.size:
        number = len(frames)
        flat = np.ascontiguousarray(array).reshape(-1)
        frames.append(view_of(flat.view(np.uint8)))
    dims = len(shape)
    head = bytes((ARRAY, code, flags, dims))
    return head + SHAPES[dims].pack(*shape) + U32.pack(number)


def scalar_record(value: np.generic) -> bytes | None:
    """The record of a numpy number; None if its dtype is not plain."""
    code = ARRAY_CODE.get(value.dtype)
    return None if code is None else bytes((SCALAR, code)) + value.tobytes()


def buffer_record(raw: memoryview, frames: list[Any]) -> bytes:
    """The record of the raw bytes of a buffer in a pickle."""
    number = NO_FRAME
    if raw.nbytes:
        number = len(frames)
        frames.append(raw)
    return bytes((BUFFER, _READ_ONLY if raw.readonly else 0)) + U32.pack(number)


def device_text(device: torch.device) -> bytes:
    """A device as it is written: the length of its name, its name."""
    text = str(device).encode()
    return bytes((len(text),)) + text


# -- reading ------------------------------------------------------------------------------------


class TensorHead:
    """Dtype, flags and device of a tensor as read, and the offset behind them."""

    __slots__ = ("device", "dtype", "end", "flags", "pos")

    def __init__(self, body: bytes, pos: int) -> None:
        self.pos = pos
        self.dtype = dtype = dtype_of(body[pos], pos)
        self.flags = flags = body[pos + 1]
        if flags > _NEEDS_GRAD | _PARAMETER | _CONJ | _NEG:
            bad(f"a tensor with flags {flags:#04x}", pos + 1)
        if dtype in QUANTIZED:
            bad(f"a tensor of {dtype} without its scale", pos)
        if flags & _NEEDS_GRAD and not (dtype.is_floating_point or dtype.is_complex):
            bad(f"a tensor of {dtype} that requires grad", pos)
        if flags & _CONJ and not dtype.is_complex:
            bad(f"a tensor of {dtype} that is conjugated", pos)
        if flags & _NEG and not (dtype.is_floating_point or dtype.is_complex):
            bad(f"a tensor of {dtype} that is negated", pos)
        self.device, self.end = read_device(body, pos + 2)

    def finish(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its flags."""
        flags = self.flags
        if not flags:
            return tensor
        needs_grad = bool(flags & _NEEDS_GRAD)
        return dressed(
            tensor, bool(flags & _CONJ), bool(flags & _NEG), bool(flags & _PARAMETER), needs_grad
        )

    def refuse(self, shape: tuple[int, ...], exc: Exception) -> NoReturn:
        """Raise for what torch can't make."""
        bad(f"no tensor of {self.dtype} and shape {shape}: {first_line(exc)}", self.pos)


def read_tensor(body: bytes, pos: int, frames: Frames) -> tuple[Any, int]:
    """The tensor whose record goes on at `pos`, behind its type index."""
    tensor, end = _read_tensor(body, pos, frames)
    frames.tensors.append(tensor)
    return tensor, end


def _read_tensor(body: bytes, pos: int, frames: Frames) -> tuple[Any, int]:
    head = TensorHead(body, pos)
    dtype = head.dtype
    shape, at = read_shape(body, head.end, dtype.itemsize)
    number, end = _frame_number(body, at, shape)
    data: Any = None
    if number != NO_FRAME:
        data = frames.take(number, prod(shape) * dtype.itemsize, at)
    if frames.dry:
        return None, end
    try:
        if data is None:
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype)
        else:
            flat = torch.frombuffer(usable(data, dtype.itemsize), dtype=dtype)
        tensor = flat if len(shape) == 1 and data is not None else flat.view(shape)
        if frames.place is None or head.device == _CPU:
            return head.finish(tensor), end
    except Exception as exc:  # whatever torch raises for it
        head.refuse(shape, exc)
    return head.finish(frames.place(tensor, head.device)), end


def read_array(body: bytes, pos: int, frames: Frames) -> tuple[Any, int]:
    """The array whose record goes on at `pos`, behind its type index."""
    dtype = array_dtype_of(body[pos], pos)
    flags = body[pos + 1]
    if flags > _FORTRAN:
        bad(f"an array with flags {flags:#04x}", pos + 1)
    shape, at = read_shape(body, pos + 2, dtype.itemsize)
    number, end = _frame_number(body, at, shape)
    data: Any = None
    if number != NO_FRAME:
        data = frames.take(number, prod(shape) * dtype.itemsize, at)
    if frames.dry:
        return None, end
    order: Any = "F" if flags else "C"
    try:
        if data is None:
            return np.empty(shape, dtype, order), end
        flat = np.frombuffer(usable(data, dtype.alignment), dtype)
        return flat if len(shape) == 1 else flat.reshape(shape, order=order), end
    except Exception as exc:  # whatever numpy raises for it
        bad(f"no array of {dtype} and shape {shape}: {first_line(exc)}", pos)


def read_scalar(body: bytes, pos: int) -> tuple[np.generic, int]:
    """The numpy number whose record goes on at `pos`."""
    dtype = array_dtype_of(body[pos], pos)
    end = pos + 1 + dtype.itemsize
    if end > len(body):
        bad(f"a number of {dtype.itemsize} bytes with {len(body) - pos - 1} left", pos)
    value: np.generic = np.frombuffer(body, dtype, 1, pos + 1)[0]
    return value, end


def read_buffer(body: bytes, pos: int, frames: Frames) -> tuple[Any, int]:
    """The buffer of a pickle whose record goes on at `pos`."""
    flags = body[pos]
    if flags > _READ_ONLY:
        bad(f"a buffer with flags {flags:#04x}", pos)
    number = U32.unpack_from(body, pos + 1)[0]
    data: Any = bytearray() if number == NO_FRAME else frames.take(number, None, pos)
    if frames.dry:
        return None, pos + 5
    if flags:
        return memoryview(data).toreadonly(), pos + 5
    return data if number == NO_FRAME else usable(data, 1), pos + 5


def read_device(body: bytes, pos: int) -> tuple[torch.device, int]:
    """A device: the length of its name, its name."""
    end = pos + 1 + body[pos]
    if end > len(body):
        bad(f"a device's name of {body[pos]} bytes with {len(body) - pos - 1} left", pos)
    name = body[pos + 1 : end]
    if name == b"cpu":
        return _CPU, end
    device = _parse_device(name)
    if device is None:
        bad(f"{name!r} is no device of torch", pos)
    return device, end


@lru_cache(256)
def _parse_device(name: bytes) -> torch.device | None:
    try:
        return torch.device(name.decode("ascii"))
    except (RuntimeError, ValueError):
        return None


def read_shape(body: bytes, pos: int, itemsize: int) -> tuple[tuple[int, ...], int]:
    """The number of dimensions and their sizes."""
    dims = body[pos]
    if dims > MOST_DIMS:
        bad(f"{dims} dimensions, at most {MOST_DIMS} are possible", pos)
    shape: tuple[int, ...] = SHAPES[dims].unpack_from(body, pos + 1)
    if prod(size or 1 for size in shape) * itemsize > _MOST_BYTES:
        bad(f"a shape {shape} beyond what memory can be", pos)
    return shape, pos + 1 + 8 * dims


def _frame_number(body: bytes, pos: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of the frame of such a shape: there is one if there are bytes."""
    number = U32.unpack_from(body, pos)[0]
    if (number == NO_FRAME) != (0 in shape):
        frame = "no frame" if number == NO_FRAME else f"frame {number}"
        bad(f"a shape {shape} with {frame}", pos)
    return number, pos + 4
