"""Serializes messages between processes that have authenticated each other: pickle 5.

`encode` makes a *body*, a pickle of the whole value, and *frames*: the bytes of tensors and arrays
as they lie in memory, out of band. `decode` unpickles the body and builds tensors in the frames
that came. It runs on receiving threads, so it calls nothing but what this file allows: whatever is
not a plain value (a function, a module, an object of any other class) crosses as a `LazyPickle`,
which is opened later, where an error in it belongs to a command. docs/protocol.md has the details.

Stateless but for the tables of registered types and of pickles of functions found by name; any
thread may encode and decode.

>>> body, frames = encode((3, 17, "add", [1.5, None]))
>>> decode(body, frames)
(3, 17, 'add', [1.5, None])
"""

from __future__ import annotations

import builtins
import importlib
import io
import operator
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import index
from types import BuiltinFunctionType, EllipsisType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import numpy as np
import torch

from .arguments import Pickled, Register
from .errors import ArgumentError, DiscoError
from .interrupts import shield
from .regions import ALIGN, array_of, bare, dressed, find_regions, is_plain, span, view_in

Place = Callable[[torch.Tensor, torch.device], torch.Tensor]
Reduction = tuple[Any, ...]

_plain_import = builtins.__import__
_MOST_BYTES = 2**63 - 1
_LONGEST_NAMES = 500  # bytes of a pickle that is a name and nothing else
_LONGEST_WHAT = 120  # characters
_END = object()


class ProtocolError(DiscoError):
    """Bytes that are no message: torn, of another version, or made wrongly."""


class Message(NamedTuple):
    """A value as it is sent.

    Attributes
    ----------
    body
        The pickle.
    frames
        The bytes of tensors, arrays and buffers: flat views of bytes. What they show is the
        sender's own memory, which must not change until it is sent.
    """

    body: bytes
    frames: list[Any]


def encode(value: Any) -> Message:
    """Serialize a value. What has no plain type is pickled by itself, as a `LazyPickle`.

    Raises
    ------
    ArgumentError
        If something in it can't be pickled, or must not be here, or is nested too deep.
    """
    if builtins.__import__ is _plain_import:
        return _encode(value)
    # the pickler imports by a function of Python, and loses an exception that comes within that
    with shield():
        return _encode(value)


def _encode(value: Any) -> Message:
    file = io.BytesIO()
    beside: list[Any] = []
    pickler = _MessagePickler(file, 5, buffer_callback=partial(_keep_beside, beside))
    pickler.beside = beside
    try:
        pickler.dump(value)
        return _finish(file, beside)
    except ArgumentError:
        raise
    except RecursionError:
        raise ArgumentError("a value is nested too deep; no message can carry that") from None
    except Exception as exc:  # a tensor of vmap, say, whose memory can't be had
        raise ArgumentError(_cannot(type(value), exc)) from exc


def decode(body: Any, frames: Sequence[Any] = (), place: Place | None = None) -> Any:
    """Build the value of a message. Each `LazyPickle` in it stays shut.

    Parameters
    ----------
    body, frames
        As they came: buffers of any kind. A tensor lives in its frame where that may be written
        and is aligned, so the frame is not to be used for anything else; otherwise in a copy.
    place
        ``place(tensor, device)`` gives the tensor to use for one that was on another device
        than the CPU; without it such a tensor is on the CPU.

    Raises
    ------
    ProtocolError
        If this is no message, or torn, or too long.
    """
    if type(body) is not bytes:
        body = bytes(as_bytes(body, "the body of a message"))
    if frames:
        frames = [as_bytes(frame, f"frame {i}") for i, frame in enumerate(frames)]
    try:
        return _load(_MessageUnpickler, body, frames, place)
    except ProtocolError:
        raise
    except Exception as exc:
        raise ProtocolError(f"malformed message: {type(exc).__name__}: {first_line(exc)}") from exc


def open_all(value: Any, place: Place | None = None) -> Any:
    """Open every `LazyPickle` in the containers of a decoded value; lists and dicts in place.

    Raises what unpickling raises.
    """
    return _opened(value, place, {}) if type(value) in _MAY_HOLD else value


def first_line(exc: BaseException) -> str:
    """What an exception says, on one line; of a user's class it may say anything or fail to."""
    try:
        text = str(exc)
    except Exception:
        text = ""
    return (text or type(exc).__name__).splitlines()[0][:300]


def _cannot(kind: type, exc: Exception) -> str:
    return f"a {kind.__qualname__} can't be sent to another process: {first_line(exc)}"


def _bad(what: str) -> NoReturn:
    raise ProtocolError(f"malformed message: {what}")


# -- pickles that stay shut -----------------------------------------------------------------------


class LazyPickle:
    """An object of a message, pickled by itself and kept shut until somebody asks for it.

    Attributes
    ----------
    what
        Describes what was pickled, for messages: ``function train``, ``my.Config``.
    data
        The pickle.
    frames
        The bytes of the tensors, arrays and buffers in it.
    kept
        Whether `pickle_lazily` gives this one again for the same function, which is a name.
    """

    __slots__ = ("__weakref__", "data", "frames", "kept", "what")

    def __init__(self, what: str, data: bytes, *frames: Any) -> None:
        self.what = what
        self.data = data
        self.frames = frames
        self.kept = False

    def __repr__(self) -> str:
        return f"<pickle of {self.what}: {len(self.data)} bytes, {len(self.frames)} frames>"

    def open(self, place: Place | None = None, lookup: Callable[[Register], Any] = Register) -> Any:
        """Unpickle; raises whatever that raises.

        Tensors and arrays live in the frames where those may be written: what is opened twice
        shares their memory.

        Parameters
        ----------
        place
            As for `decode`.
        lookup
            Gives what stands for a `Register` in it, as in ``Point(ref, 1)``, a named tuple.
        """
        frames: Any = self.frames
        if frames:
            frames = [_writable(as_bytes(frame, "a frame of a pickle")) for frame in frames]
        return _load(_ObjectUnpickler, self.data, frames, place, lookup)


def pickle_lazily(value: Any) -> LazyPickle:
    """Pickle a value; of a `Pickled` what is in it.

    Raises
    ------
    ArgumentError
        If it can't be pickled.
    """
    if type(value) is LazyPickle:
        return value
    unmark = isinstance(value, list | tuple | set | frozenset)  # of a class of its own, that is
    if type(value) is Pickled:
        value = value.value
    named = _is_named(value)
    if named and (known := _named.get(id(value))) and known[0]() is value:
        return known[1]
    if builtins.__import__ is _plain_import:
        return _pickle_alone(value, unmark, named)
    with shield():  # as in `encode`
        return _pickle_alone(value, unmark, named)


def _pickle_alone(value: Any, unmark: bool, named: bool) -> LazyPickle:
    file = io.BytesIO()
    beside: list[Any] = []
    try:
        pickler = _ObjectPickler(file, 5, buffer_callback=partial(_keep_beside, beside))
        pickler.beside, pickler.unmark = beside, unmark
        pickler.dump(value)
        data, frames = _finish(file, beside)
    except ArgumentError:  # it says itself what to do, as a DRef does
        raise
    except Exception as exc:
        raise ArgumentError(
            f"a {name_of(value)} can't be sent to another process: {first_line(exc)}. Send what "
            "it is made of (numbers, strings, tensors, lists, dicts), have a function on the "
            "worker make it, or teach its class to be pickled (__reduce__) or to travel "
            "(discolab.runtime.register_type)"
        ) from exc
    made = LazyPickle(name_of(value), data, *frames)
    if named and not frames and len(data) < _LONGEST_NAMES:
        _keep(value, made)
    return made


def _keep(value: Any, made: LazyPickle) -> None:
    made.kept = True
    key, known = id(value), _named  # the module's own name is gone when the interpreter ends
    known[key] = (weakref.ref(value, lambda _: known.pop(key, None)), made)


_named: dict[int, tuple[weakref.ref[Any], LazyPickle]] = {}  # by id: a class may redefine ==


def _is_named(value: Any) -> bool:
    """Whether a function or class is pickled as a name, at this moment."""
    kind = type(value)
    if kind is BuiltinFunctionType:
        owner = value.__self__
        return owner is None or isinstance(owner, ModuleType | type)
    if kind is not FunctionType and not isinstance(value, type):
        return False
    try:
        module = value.__module__
        if module == "__main__" or cloudpickle.list_registry_pickle_by_value():
            return False
        found: Any = sys.modules[module]
        for name in value.__qualname__.split("."):
            found = getattr(found, name)
        return found is value
    except Exception:  # not there, or a metaclass that does what it likes
        return False


def name_of(value: Any) -> str:
    """Describe a value in a few words."""
    try:
        if type(value) in (FunctionType, BuiltinFunctionType):
            return f"function {value.__qualname__}"[:_LONGEST_WHAT]
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__}"[:_LONGEST_WHAT]
        kind = type(value)
        return f"{kind.__module__}.{kind.__qualname__}"[:_LONGEST_WHAT]
    except Exception:  # as above
        return "object"


_SEQUENCES = frozenset((list, tuple, set, frozenset))
_MAY_HOLD = frozenset((*_SEQUENCES, dict, slice, LazyPickle))


def _opened(value: Any, place: Place | None, done: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _SEQUENCES and _MAY_HOLD.isdisjoint(map(type, value)):
        return value
    if id(value) in done:  # it came twice, or holds itself
        return done[id(value)][1]
    if kind is LazyPickle:
        made = value.open(place)
        done[id(value)] = value, made
        return made
    if kind is list or kind is dict:
        done[id(value)] = value, value
    if kind is dict:
        if not _MAY_HOLD.isdisjoint(map(type, value)):
            items = [(_opened(k, place, done), v) for k, v in value.items()]
            value.clear()
            value.update(items)
        for key, item in value.items():
            if type(item) in _MAY_HOLD:
                value[key] = _opened(item, place, done)
        return value
    items = [value.start, value.stop, value.step] if kind is slice else value
    if kind in _SEQUENCES or kind is slice:
        made = [_opened(v, place, done) if type(v) in _MAY_HOLD else v for v in items]
        if kind is list:
            value[:] = made
        elif kind is slice:
            return slice(*made)
        elif not all(map(operator.is_, made, value)):
            return kind(made)
    return value


# -- tensors and arrays ---------------------------------------------------------------------------

_NEEDS_GRAD, _PARAMETER, _CONJ, _NEG = 1, 2, 4, 8  # flags of a tensor

_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_QUANTIZED = frozenset(d for name, d in _DTYPES.items() if name.startswith(("qint", "quint")))
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
# numpy's own words for them, either byte order; `longdouble` differs between machines
_NUMBERS = ("b1", *(f"{kind}{n}" for kind in "iu" for n in (1, 2, 4, 8)), "f2", "f4", "f8", "c8")
_ARRAY_DTYPES = {np.dtype(o + kind): o + kind for o in "<>" for kind in (*_NUMBERS, "c16")}

_SHARED = struct.Struct("<cI")  # b"S", the size of the pickle of what is shared

# Stands in the pickle for the bytes of a tensor or an array: those are known at the end only, when
# it is certain which tensors share memory. The unpickler takes the next frame there.
_BYTES = pickle.PickleBuffer(bytearray())


def _view_of(array: Any) -> memoryview:
    """The memory of a flat array of bytes."""
    return memoryview(array)


def _keep_beside(beside: list[Any], buffer: pickle.PickleBuffer) -> bool:
    """Take a buffer out of band; whether it stays in the pickle."""
    if buffer is not _BYTES:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if not raw.nbytes:
            return True
        beside.append(raw)
    return False


def _reduce_tensor(pickler: Any, tensor: torch.Tensor) -> Reduction:
    flags = _NEEDS_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= _PARAMETER
    if tensor.is_conj():
        flags |= _CONJ
    if tensor.is_neg():
        flags |= _NEG
    data = None
    if tensor.numel():
        data = _BYTES
        pickler.beside.append(tensor)
    name, shape = _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if not tensor.is_cpu:
        return build_placed_tensor, (data, name, shape, flags, str(tensor.device))
    return (build_tensor, (data, name, shape, flags) if flags else (data, name, shape))


def _reduce_array(pickler: Any, array: np.ndarray[Any, Any]) -> Reduction:
    shape, order = array.shape, "C"
    if not array.flags.c_contiguous and array.flags.f_contiguous:
        array, order = array.T, "F"
    data = None
    if array.size:
        data = _BYTES
        pickler.beside.append(_view_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
    return build_array, (data, _ARRAY_DTYPES[array.dtype], shape, order)


def _finish(file: io.BytesIO, beside: list[Any]) -> Message:
    """The message, once the pickle is written.

    Where tensors share memory, or have strides of their own, several items of the pickle take
    their bytes from one frame. `shared` says where, and is a pickle before the pickle.
    """
    if not beside:
        return Message(file.getvalue(), beside)
    tensors = [item for item in beside if isinstance(item, torch.Tensor)]
    regions = find_regions(tensors) if tensors else {}
    frames: list[Any] = []
    shared: dict[int, tuple[Any, ...]] = {}
    for i, item in enumerate(beside):
        region = regions.get(id(item))
        if region is not None:
            if region.number is None:
                region.number = len(frames)
                frames.append(_view_of(array_of(region.memory().cpu())))
            shared[i] = (region.number, *region.place_of(item))
        elif isinstance(item, torch.Tensor):
            data = bare(item).cpu().contiguous()
            # not reshape: with one element any stride is contiguous, and would stay
            flat = data.as_strided((data.numel(),), (1,))
            frames.append(_view_of(array_of(flat.view(torch.uint8))))
        else:
            frames.append(item)
    body = file.getvalue()
    if shared:
        head = pickle.dumps(shared, 5)
        body = _SHARED.pack(b"S", len(head)) + head + body
    return Message(body, frames)


class _Shared:
    """A frame that several tensors of a message look at, or one with strides of its own."""

    def __init__(self, frame: Any) -> None:
        self.nbytes = frame.nbytes
        self.flat = torch.frombuffer(_usable(frame, ALIGN), dtype=torch.uint8)
        self.placed: dict[str, torch.Tensor] = {}  # by device


def _items(frames: Sequence[Any], shared: dict[int, tuple[Any, ...]]) -> Iterator[Any]:
    """What the pickle asks for, in order: a frame, or a place in one that is shared."""
    known: dict[int, _Shared] = {}
    taken = item = 0
    while taken < len(frames) or item in shared:
        place = shared.get(item)
        if place is None:
            yield frames[taken]
            taken += 1
        else:
            number, offset, strides = place
            if number == taken:
                known[number] = _Shared(frames[number])
                taken += 1
            yield known[number], offset, strides
        item += 1


def _usable(frame: Any, align: int) -> Any:
    """The bytes of a frame, writable and aligned: the frame itself if it is, else a copy."""
    if frame.readonly or addressof(c_char.from_buffer(frame)) % align:
        return bytearray(frame)
    return frame


def _writable(frame: memoryview) -> memoryview:
    return memoryview(bytearray(frame)) if frame.readonly else frame


def as_bytes(frame: Any, what: str) -> memoryview:
    """A frame as a flat view of bytes."""
    try:
        view = memoryview(frame)
        flat = view.format == "B" and view.ndim == 1 and view.c_contiguous
        return view if flat else view.cast("B")
    except (TypeError, ValueError) as exc:
        raise ProtocolError(f"{what} is no contiguous buffer: {exc}") from None


def _nbytes(data: Any, shape: tuple[int, ...], itemsize: int) -> int:
    """How many bytes a shape has; they must be there."""
    size = prod(shape) * itemsize
    if (data is None) != (0 in shape) or size < 0:
        _bad(f"a shape {shape} with {'no frame' if data is None else 'a frame'}")
    if data is None and prod(n or 1 for n in shape) * itemsize > _MOST_BYTES:
        _bad(f"a shape {shape} beyond what memory can be")
    return size


def build_tensor(data: Any, name: str, shape: tuple[int, ...], flags: int = 0) -> torch.Tensor:
    """The tensor of a pickle, in its frame."""
    return build_placed_tensor(None, data, name, shape, flags, "cpu")


def build_placed_tensor(
    place: Place | None, data: Any, name: str, shape: tuple[int, ...], flags: int, device: str
) -> torch.Tensor:
    """The tensor of a pickle that was on a device; `place` is the unpickler's."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        _bad(f"the torch of this process has no dtype torch.{name}")
    if dtype in _QUANTIZED:
        _bad(f"a tensor of {dtype} without its scale")
    itemsize = dtype.itemsize
    if type(data) is tuple:
        shared, offset, strides = data
        end = offset + span(shape, strides) * itemsize
        if min(shape, default=1) < 1 or min(strides, default=0) < 0 or offset % itemsize:
            _bad(f"a tensor of {dtype} and shape {shape} with strides {strides} at {offset}")
        if not 0 <= offset < end <= shared.nbytes:
            _bad(f"a tensor on bytes {offset} to {end} of a frame of {shared.nbytes}")
        flat = shared.flat
        if place is not None:
            flat = shared.placed.get(device)
            if flat is None:
                flat = shared.placed[device] = place(shared.flat, torch.device(device))
        tensor = view_in(flat, dtype, shape, strides, offset)
    else:
        size = _nbytes(data, shape, itemsize)
        if data is None:
            tensor = torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).view(shape)
        else:
            if data.nbytes != size:
                _bad(f"a frame has {data.nbytes} bytes where {size} are due")
            tensor = torch.frombuffer(_usable(data, itemsize), dtype=dtype)
            if len(shape) != 1:
                tensor = tensor.view(shape)
        if place is not None:
            tensor = place(tensor, torch.device(device))
    if not flags:
        return tensor
    return dressed(
        tensor,
        bool(flags & _CONJ),
        bool(flags & _NEG),
        bool(flags & _PARAMETER),
        bool(flags & _NEEDS_GRAD),
    )


def build_array(data: Any, name: str, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    """The array of a pickle, in its frame."""
    dtype = np.dtype(name)
    size = _nbytes(data, shape, dtype.itemsize)
    if data is None:
        return np.empty(shape, dtype, order)
    if data.nbytes != size:
        _bad(f"a frame has {data.nbytes} bytes where {size} are due")
    flat = np.frombuffer(_usable(data, dtype.alignment), dtype)
    return flat if len(shape) == 1 else flat.reshape(shape, order=order)


def build_scalar(name: str, data: bytes) -> Any:
    """A number of numpy's."""
    return np.frombuffer(data, np.dtype(name), 1)[0]


def torch_constant(name: str) -> Any:
    """A dtype, a layout or a memory format."""
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH_CONSTANTS):
        _bad(f"the torch of this process has no torch.{name[:80]}")
    return found


def _reduce_constant(pickler: Any, value: Any) -> Reduction:
    return torch_constant, (str(value).removeprefix("torch."),)


# -- types that are registered --------------------------------------------------------------------


def register_plain(
    cls: type, take_apart: Callable[[Any], tuple[Any, ...]], build: Callable[..., Any]
) -> None:
    """Let objects of a class of ours cross in messages: as ``build(*take_apart(value))``.

    `decode` calls `build` on receiving threads.
    """
    _REDUCERS[cls] = lambda pickler, value: (build, take_apart(value))
    _allow(build)


@dataclass(frozen=True, slots=True)
class UserType:
    """The three functions of a registered type."""

    cls: type
    name: str
    size: Callable[[Any], int]
    write: Callable[[Any, memoryview], object]
    read: Callable[[memoryview], Any]


USER_BY_CLASS: dict[type, UserType] = {}
USER_BY_NAME: dict[str, UserType] = {}


def register_type(
    cls: type,
    name: str,
    size: Callable[[Any], int],
    write: Callable[[Any, memoryview], object],
    read: Callable[[memoryview], Any],
) -> None:
    """Give objects of a class a form of their own in messages, without pickle.

    Must be done in the controller's process and in each worker's.

    Parameters
    ----------
    cls
        The class; objects of a subclass are not meant.
    name
        What it is called in messages, 1 to 200 bytes.
    size
        ``size(value)``: how many bytes the content has.
    write
        ``write(value, buffer)`` fills a buffer of that size.
    read
        ``read(buffer)`` makes the value of such a buffer; whatever it raises becomes a
        `ProtocolError`.

    Raises
    ------
    ArgumentError
        If the class has a type in messages already, or the name belongs to another class.

    Examples
    --------
    >>> import struct
    >>> class Point:
    ...     def __init__(self, x, y):
    ...         self.x, self.y = x, y
    >>> pack = struct.Struct("<dd")
    >>> register_type(
    ...     Point,
    ...     "demo.Point",
    ...     lambda p: pack.size,
    ...     lambda p, buffer: pack.pack_into(buffer, 0, p.x, p.y),
    ...     lambda buffer: Point(*pack.unpack(buffer)),
    ... )
    >>> decode(*encode(Point(1, 2))).y
    2.0
    """
    if not isinstance(cls, type):
        raise ArgumentError(f"register_type: a class is needed, got {cls!r}")
    if cls in _OWN_TYPES or cls in _REDUCERS:
        raise ArgumentError(f"register_type: {cls.__qualname__} has a type on the wire already")
    if not isinstance(name, str) or not name or len(name.encode("utf-8", "replace")) > 200:
        raise ArgumentError(f"register_type: a name of 1 to 200 bytes is needed, got {name!r}")
    for what, function in (("size", size), ("write", write), ("read", read)):
        if not callable(function):
            raise ArgumentError(f"register_type: {what} must be a function, got {function!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"register_type: {name!r} is no name in Unicode") from None
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
    USER_BY_NAME[name] = USER_BY_CLASS[cls] = UserType(cls, name, size, write, read)


def _reduce_registered(user: UserType, value: Any) -> Reduction:
    try:
        data = bytearray(index(user.size(value)))
        user.write(value, memoryview(data))
    except Exception as exc:
        raise ArgumentError(
            f"a {user.cls.__qualname__} can't be sent: the functions registered for the type "
            f"{user.name!r} raised {type(exc).__name__}: {first_line(exc)}"
        ) from exc
    return build_registered, (user.name, bytes(data))


def build_registered(name: str, data: bytes) -> Any:
    """An object of a registered type."""
    user = USER_BY_NAME.get(name)
    if user is None:
        raise ProtocolError(
            f"a value of the user type {name[:80]!r}, which is not registered in this process: "
            "call discolab.runtime.register_type here too"
        )
    try:
        return user.read(memoryview(data))
    except Exception as exc:
        raise ProtocolError(
            f"malformed message: the function that reads the user type {name!r} raised "
            f"{type(exc).__name__}: {first_line(exc)}"
        ) from exc


# -- the pickle of a message ----------------------------------------------------------------------


def build_register(number: int) -> Register:
    """A register of a message; in a pickle that is opened, what `lookup` gives for it."""
    return Register(number)


def _reduce_register(pickler: Any, value: Register) -> Reduction:
    return build_register, (int(value),)


def _reduce_lazily(pickler: Any, value: Any) -> Reduction:
    made = pickle_lazily(value)
    return LazyPickle, (made.what, made.data, *map(pickle.PickleBuffer, made.frames))


def _reduce_device(pickler: Any, value: torch.device) -> Reduction:
    return torch.device, (str(value),)


def _reduce_size(pickler: Any, value: torch.Size) -> Reduction:
    return torch.Size, (tuple(value),)


def _reduce_plain_tensor(pickler: Any, value: torch.Tensor) -> Reduction:
    return (_reduce_tensor if is_plain(value) else _reduce_lazily)(pickler, value)


def _reduce_plain_array(pickler: Any, value: np.ndarray[Any, Any]) -> Reduction:
    return (_reduce_array if _is_plain_array(value) else _reduce_lazily)(pickler, value)


def _is_plain_array(value: Any) -> bool:
    return value.dtype in _ARRAY_DTYPES and not value.dtype.metadata


def _reduce_scalar(pickler: Any, value: np.generic) -> Reduction:
    name = _ARRAY_DTYPES.get(value.dtype)
    if name is None:
        return _reduce_lazily(pickler, value)
    return build_scalar, (name, value.tobytes())


def _natively(pickler: Any, value: Any) -> Any:
    return NotImplemented


_REDUCERS: dict[type, Callable[[Any, Any], Any]] = {
    Register: _reduce_register,
    torch.Tensor: _reduce_plain_tensor,
    torch.nn.Parameter: _reduce_plain_tensor,
    np.ndarray: _reduce_plain_array,
    **dict.fromkeys((np.bool_, *np.sctypeDict.values()), _reduce_scalar),
    torch.Size: _reduce_size,
    torch.device: _reduce_device,
    **dict.fromkeys(_TORCH_CONSTANTS, _reduce_constant),
    **dict.fromkeys((complex, slice, range, EllipsisType), _natively),
}
_OWN_TYPES = frozenset(
    (*_REDUCERS, type(None), bool, int, float, str, bytes, bytearray, tuple, list, dict, set)
) | {frozenset, LazyPickle}


class _MessagePickler(pickle.Pickler):
    """Pickles plain values, and everything else by itself."""

    beside: list[Any]  # tensors, and the bytes of arrays and buffers

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a value; pickle asks about all but the commonest types."""
        kind = type(obj)
        reduce = _REDUCERS.get(kind)
        if reduce is not None:
            return reduce(self, obj)
        if id(obj) in _allowed_ids:
            return NotImplemented
        user = USER_BY_CLASS.get(kind)
        return _reduce_lazily(self, obj) if user is None else _reduce_registered(user, obj)


_ALLOWED: dict[tuple[str, str], Any] = {("builtins", "Ellipsis"): ...}
_allowed_ids: set[int] = set()


def _allow(build: Callable[..., Any]) -> None:
    """Let messages call a function, found by its name."""
    _ALLOWED[build.__module__, build.__name__] = build
    _allowed_ids.add(id(build))


for _build in (
    build_tensor,
    build_placed_tensor,
    build_array,
    build_scalar,
    build_register,
    build_registered,
    torch_constant,
    LazyPickle,
    torch.Size,
    torch.device,
    complex,
    slice,
    range,
):
    _allow(_build)


class _MessageUnpickler(pickle.Unpickler):
    """Calls only what builds plain values."""

    place: Place | None = None

    def find_class(self, module: str, name: str) -> Any:
        """Find what a pickle names."""
        found = _ALLOWED.get((module, name))
        if found is None:
            _bad(f"it asks for {module}.{name}"[:200])
        return partial(found, self.place) if found is build_placed_tensor else found


def _load(
    kind: Any, body: bytes, frames: Sequence[Any], place: Place | None, lookup: Any = None
) -> Any:
    """Unpickle a body with its frames."""
    shared: dict[int, tuple[Any, ...]] = {}
    if body[:1] == b"S":
        start = _SHARED.size
        end = start + _SHARED.unpack_from(body)[1]
        shared = _MessageUnpickler(io.BytesIO(body[start:end])).load()
        body = body[end:]
    items = _items(frames, shared) if shared else iter(frames)
    file = io.BytesIO(body)
    unpickler = kind(file, buffers=items)
    if place is not None:
        unpickler.place = place
    if lookup is not None:
        unpickler.lookup = lookup
    value = unpickler.load()
    if file.tell() != len(body):
        _bad(f"{len(body) - file.tell()} bytes behind its end")
    if next(items, _END) is not _END:
        _bad(f"{len(frames)} frames, of which it does not use all")
    return value


# -- the pickle of an object ----------------------------------------------------------------------


def unmarked(value: Any) -> Any:
    """Stands in a pickle for what was marked with `Pickled`, in a named tuple, say."""
    return value


def needing_grad(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a pickle that is to be differentiated by."""
    return tensor.requires_grad_()


def mkldnn_of(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    """A tensor of a pickle that lay as oneDNN wants it."""
    return tensor.to_mkldnn().requires_grad_(needs_grad)


def storage_of(data: torch.Tensor) -> torch.UntypedStorage:
    """A storage of exactly these bytes."""
    storage = data.untyped_storage()
    return storage if storage.nbytes() == data.numel() else data.clone().untyped_storage()


def typed_storage_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """What torch's own pickles of tensors ask for; its own pickle of that shares no memory."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def restore(tensor: torch.Tensor, state: tuple[Any, dict[str, Any]]) -> None:
    """Give a tensor of a pickle its gradient and the attributes that a program gave it."""
    grad, attributes = state
    tensor.__dict__.update(attributes)
    tensor.grad = grad


class _ObjectPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles any object, as cloudpickle does; tensors in it as in messages."""

    beside: list[Any]
    unmark: bool

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a value; NotImplemented leaves it to pickle."""
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not is_plain(obj):
                if kind is torch.Tensor and obj.layout is torch.sparse_coo and obj.requires_grad:
                    return needing_grad, (obj.detach(),)  # which torch's own pickles forget
                if obj.is_mkldnn:  # its memory is the library's own
                    return mkldnn_of, (obj.detach().to_dense(), obj.requires_grad)
                return NotImplemented
            grad = obj.grad if obj.is_leaf else None
            reduction = _reduce_tensor(self, obj)
            if grad is None and not obj.__dict__:
                return reduction
            return *reduction, (grad, obj.__dict__), None, None, restore
        if kind is torch.UntypedStorage:  # torch's own pickles of it can't be read
            return storage_of, (torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj),)
        if kind is torch.storage.TypedStorage:  # of a tensor of another kind, a quantized one
            return typed_storage_of, (obj._untyped_storage, obj.dtype)
        if kind is Register:
            return _reduce_register(self, obj)
        if kind is Pickled and self.unmark:
            return unmarked, (obj.value,)
        if kind is np.ndarray:
            return _reduce_array(self, obj) if _is_plain_array(obj) else NotImplemented
        if (named := reduce_module(obj)) is not None:
            return named
        return super().reducer_override(obj)


def reduce_module(obj: Any) -> tuple[Any, ...] | None:
    """Reduce a module of a class of its own to its name, which cloudpickle does for plain ones.

    Such is ``torch.backends.cudnn``, which a function of a notebook that sets seeds refers to. None
    for anything else.
    """
    if not isinstance(obj, ModuleType) or type(obj) is ModuleType:
        return None
    name = obj.__name__
    return (importlib.import_module, (name,)) if sys.modules.get(name) is obj else None


class _ObjectUnpickler(pickle.Unpickler):
    """Nothing here refers to itself, or large tensors would wait for the garbage collector."""

    place: Place | None = None
    lookup: Callable[[Register], Any]

    def find_class(self, module: str, name: str) -> Any:
        """Find what a pickle names."""
        if module == __name__:
            if name == "build_placed_tensor":
                return partial(build_placed_tensor, self.place)
            if name == "build_register":
                return partial(_looked_up, self.lookup)
        return super().find_class(module, name)


def _looked_up(lookup: Callable[[Register], Any], number: int) -> Any:
    return lookup(Register(number))
