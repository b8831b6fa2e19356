"""Pickles read as data: nothing that a pickle names is ever imported or called.

What it would make by code becomes an `Opaque`; tensors of torch become `TensorRef`s, which say
where their bytes are. Memory stays within a small multiple of the pickle's own size: the opcodes
that take more on the pickle's word are refused. Stateless but for one `_Reader` a pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from ..errors import CheckpointError
from ..progress import Preparation
from .checks import said, short

_COUNT_EVERY = 1024  # reads


class Opaque:
    """What a pickle makes by code that is not run: the code's name, and what it was given."""

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}  # where it is a kind of dict

    def __repr__(self) -> str:
        return self.name[:120].encode("utf-8", "backslashreplace").decode()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, item: Any) -> None:
        """Of a kind of list: let go."""

    def extend(self, items: Any) -> None:
        """Of a kind of list: let go."""


# Compared by identity: they may be keys, and hold whatever the pickle put in.
@dataclass(frozen=True, eq=False)
class StorageRef:
    """A record of raw bytes; `dtype` None: none of its own, `numel` counts bytes."""

    key: str
    dtype: torch.dtype | None
    numel: Any


@dataclass(frozen=True, eq=False)
class TensorRef:
    """A tensor within a storage; `offset` and `strides` in elements. Not checked yet."""

    storage: StorageRef
    dtype: torch.dtype
    offset: Any
    shape: Any
    strides: Any


def load(data: bytes, file: Path, what: str = "its pickle") -> Any:
    """What a pickle holds.

    Raises
    ------
    CheckpointError
        If it can't be read.
    """
    try:
        return _Reader(data).load()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # whatever nonsense does to an unpickler
        raise CheckpointError(
            file, f"{what} can't be read: {type(error).__name__}: {said(error)}"
        ) from None


class _Global:
    """A class or function that a pickle names."""

    def __init__(self, name: str, call: Callable[..., Any] | None) -> None:
        self.name = name
        self.known = call

    def __repr__(self) -> str:
        return self.name[:120].encode("utf-8", "backslashreplace").decode()

    def __call__(self, *args: Any) -> Any:
        return Opaque(self.name, args) if self.known is None else self.known(*args)


class _Counted(io.BytesIO):
    """Says now and then how far the one who reads it is."""

    _reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.BytesIO`."""
        self._reads += 1
        if self._reads % _COUNT_EVERY == 0:
            Preparation.count("reading the pickle, item", _COUNT_EVERY)
        return super().read(size)


class _Reader(pickle._Unpickler):  # the one in Python: the other one's memo grows on a word
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(_Counted(data))
        self.copies_left = len(data)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            dtype = vars(torch).get(name)  # getattr would import what torch imports late
            if isinstance(dtype, torch.dtype):
                return dtype
        full = f"{module}.{name}"
        if full in _DICTS:
            return _Global(full, self._dict)
        if full == "_codecs.encode":
            return _Global(full, self._encode)
        return _Global(full, _KNOWN.get(full))

    def persistent_load(self, pid: Any) -> StorageRef:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"unknown persistent id {short(pid)}")
        _, kind, key, _, numel = pid
        name = kind.name if isinstance(kind, _Global) else short(kind)
        short_name = name.rpartition(".")[2]
        if not isinstance(key, str) or not name.startswith("torch."):
            raise pickle.UnpicklingError(f"unknown storage {short(pid)}")
        if short_name == "UntypedStorage":
            return StorageRef(key, None, numel)
        if short_name not in _STORAGES:
            raise pickle.UnpicklingError(f"a storage of kind {name} can't be read as plain bytes")
        return StorageRef(key, _STORAGES[short_name], numel)

    def _dict(self, *args: Any) -> dict[Any, Any]:
        pairs = args[0] if len(args) == 1 and isinstance(args[0], list) else []
        self._charge(len(pairs))
        return {_key(key): value for key, value in pairs}

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", "utf-8"):
            raise pickle.UnpicklingError(f"unknown encoding {short(encoding)}")
        self._charge(len(text))
        return text.encode(encoding)

    def _charge(self, count: int) -> None:
        self.copies_left -= count
        if self.copies_left < 0:
            raise pickle.UnpicklingError("it would copy more than it holds")

    # opcodes

    def _new(self) -> None:
        args = self.stack.pop()
        cls = self.stack.pop()
        self.stack.append(_called(cls, args))

    def _new_ex(self) -> None:
        self.stack.pop()
        self._new()

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = _called(self.stack[-1], args)

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Opaque):
            self.stack[-1].state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_key(key)] = value

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({_key(k): v for k, v in zip(items[::2], items[1::2], strict=True)})

    def _make_set(self) -> None:
        self.stack.append(Opaque("builtins.set", ()))

    def _make_frozenset(self) -> None:
        self.pop_mark()
        self._make_set()

    def _drop_items(self) -> None:
        self.pop_mark()

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has an opcode that no checkpoint needs")

    dispatch[pickle.NEWOBJ[0]] = _new
    dispatch[pickle.NEWOBJ_EX[0]] = _new_ex
    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.DICT[0]] = _make_dict
    dispatch[pickle.EMPTY_SET[0]] = _make_set
    dispatch[pickle.FROZENSET[0]] = _make_frozenset
    dispatch[pickle.ADDITEMS[0]] = _drop_items
    for _code in (
        pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4,
        pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    ):  # fmt: skip
        dispatch[_code[0]] = _refuse


def _called(function: Any, args: Any) -> Any:
    if not isinstance(function, _Global | Opaque) or not isinstance(args, tuple):
        raise pickle.UnpicklingError(f"it calls {short(function)} with {short(args)}")
    if isinstance(function, Opaque):  # as what getattr would have given
        return Opaque(function.name, args)
    return function(*args)


def _key(key: Any) -> Any:
    """A key of a dict: flat, since Python's hash of deeply nested tuples is not safe."""
    parts = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, tuple) for part in parts):
        raise pickle.UnpicklingError("a key of a dict is a nested tuple")
    return key


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
    """`_rebuild_tensor` and `_v2`; more: requires_grad, hooks, and bits like conj."""
    return _tensor_of(getattr(storage, "dtype", None), storage, offset, shape, strides, more[2:])


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any,
    *bits: Any,
) -> Any:  # fmt: skip
    return _tensor_of(dtype, storage, offset, shape, strides, bits)


def _tensor_of(
    dtype: Any, storage: Any, offset: Any, shape: Any, strides: Any, bits: tuple[Any, ...]
) -> Any:
    if not isinstance(storage, StorageRef) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"a tensor has storage {short(storage)}, dtype {short(dtype)}")
    if bits and bits[0]:
        return Opaque("torch._utils._rebuild_tensor of a lazy conj or neg view", ())
    return TensorRef(storage, dtype, offset, shape, strides)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _typed(function: Any, kind: Any, args: Any, *_: Any) -> Any:
    name = getattr(kind, "name", short(kind))
    if name in _PLAIN_TYPES:
        return _called(function, args)
    return Opaque(f"torch._tensor._rebuild_from_type of a {name}", ())


def _size(sizes: Any = ()) -> Any:
    return sizes


_DICTS: Final = ("collections.OrderedDict", "collections.defaultdict")
_PLAIN_TYPES: Final = (
    "torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)  # fmt: skip
_KNOWN: Final[dict[str, Callable[..., Any]]] = {
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type": _typed,
    "torch._tensor._rebuild_from_type_v2": _typed,
}
_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
