"""Sealed: what of a message is a pickle, kept shut until somebody asks for it.

Plain tensors, arrays and other large buffers in the object are records and frames of the message,
as tensors outside of pickles are, so the pickle holds none of their bytes. The pickles of
functions and classes that are found by name are kept; that table is the only state here, and
any thread may use it.
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

from .arguments import Pickled, Register
from .errors import ArgumentError
from .regions import find_regions
from .wire_alias import alias_record, read_alias
from .wire_tensors import (
    Frames,
    Place,
    array_record,
    buffer_record,
    read_array,
    read_buffer,
    read_tensor,
    tensor_head,
    tensor_record,
)
from .wire_types import (
    ALIAS,
    ARRAY,
    ARRAY_CODE,
    BUFFER,
    TENSOR,
    ProtocolError,
    bad,
    first_line,
    length,
    read_length,
    struct_error,
)

_LONGEST_WHAT = 120  # characters
_LONGEST_NAMES = 500  # bytes of a pickle that is a name and nothing else
_READ = {TENSOR: read_tensor, ARRAY: read_array, ALIAS: read_alias, BUFFER: read_buffer}


class Sealed:
    """A pickled part of a message.

    Attributes
    ----------
    what
        What was pickled, in words, for messages: ``function train``, ``my.Config``.
    data
        The pickle.
    table
        The records of the tensors, arrays and buffers in it.
    frames
        Their bytes.
    """

    __slots__ = ("__weakref__", "data", "frames", "table", "what")

    def __init__(self, what: str, data: bytes, table: bytes, frames: tuple[memoryview, ...]):
        self.what = what
        self.data = data
        self.table = table
        self.frames = frames

    def __repr__(self) -> str:
        return f"<sealed {self.what}: {len(self.data)} bytes, {len(self.frames)} frames>"

    def open(self, place: Place | None = None, lookup: Callable[[Register], Any] = Register) -> Any:
        """Unpickle; raises whatever that raises.

        Tensors and arrays live in the frames where those may be written: what is opened twice
        shares their memory.

        Parameters
        ----------
        place
            As for `protocol.decode`.
        lookup
            Gives what stands for a `Register` in it, as in ``Point(ref, 1)``, a named tuple.
        """
        found, buffers = read_table(self.table, Frames(self.frames, place))

        def carried(index: int) -> Any:
            if type(index) is not int or not 0 <= index < len(found):
                raise ProtocolError(
                    f"malformed message: a pickle asks for tensor {index} of {len(found)}"
                )
            return found[index]

        stand_ins = {"carried": carried, "referred": lambda number: lookup(Register(number))}
        return _Unpickler(self.data, buffers, stand_ins).load()


def read_table(table: bytes, frames: Frames) -> tuple[list[Any], list[Any]]:
    """The tensors and arrays of a table, and its buffers."""
    found: list[Any] = []
    buffers: list[Any] = []
    pos = 0
    try:
        count, pos = read_length(table, 0)
        for _ in range(count):
            kind = table[pos]
            read = _READ.get(kind)
            if read is None:
                bad(f"type index {kind} in the table of a pickle", pos)
            value, pos = read(table, pos + 1, frames)
            (buffers if kind == BUFFER else found).append(value)
    except (IndexError, struct_error):
        bad("the table of a pickle is torn", pos)
    if pos != len(table):
        bad(f"{len(table) - pos} bytes behind the table of a pickle", pos)
    if frames.next != len(frames.all):
        bad(f"a pickle with {len(frames.all)} frames, of which it uses {frames.next}", pos)
    return found, buffers


def carried(index: int) -> Any:
    """Stands in a pickle for the tensor or array of that index in the table beside it."""
    raise pickle.UnpicklingError(f"tensor {index} of a pickle that was taken out of its message")


def referred(number: int) -> Register:
    """Stands in a pickle for a register."""
    return Register(number)


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


class _Unpickler(pickle.Unpickler):
    """Nothing here refers to itself, or large tensors would wait for the garbage collector."""

    def __init__(self, data: bytes, buffers: list[Any], stand_ins: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._stand_ins:
            return self._stand_ins[name]
        return super().find_class(module, name)


# -- sealing ------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, unmark: bool) -> None:
        beside: list[Any] = []  # tensors, arrays, and the raw bytes of buffers

        def take(buffer: pickle.PickleBuffer) -> bool:  # no method: see _Unpickler
            try:
                beside.append(buffer.raw())
            except BufferError:  # not contiguous
                return True
            return False

        super().__init__(file, protocol=5, buffer_callback=take)
        self._beside = beside
        self._carried = 0
        self._unmark = unmark

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        state = None
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if tensor_head(TENSOR, obj) is None:
                if kind is torch.Tensor and obj.layout is torch.sparse_coo and obj.requires_grad:
                    return needing_grad, (obj.detach(),)  # which torch's own pickles forget
                if obj.is_mkldnn:  # its memory is the library's own
                    return mkldnn_of, (obj.detach().to_dense(), obj.requires_grad)
                return NotImplemented
            grad = obj.grad if obj.is_leaf else None
            if grad is not None or obj.__dict__:
                state = grad, obj.__dict__
        elif kind is torch.UntypedStorage:  # torch's own pickles of it can't be read
            return storage_of, (torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj),)
        elif kind is torch.storage.TypedStorage:  # of a tensor of another kind, a quantized one
            return typed_storage_of, (obj._untyped_storage, obj.dtype)
        elif kind is Register:
            return referred, (int(obj),)
        elif kind is Pickled and self._unmark:
            return unmarked, (obj.value,)
        elif kind is not np.ndarray:
            return super().reducer_override(obj)
        elif obj.dtype not in ARRAY_CODE or obj.dtype.metadata:
            return NotImplemented
        self._beside.append(obj)
        self._carried += 1
        if state is None:
            return carried, (self._carried - 1,)
        return carried, (self._carried - 1,), state, None, None, restore

    def records(self, frames: list[Any]) -> list[bytes]:
        """The table, known at the end only: then it is certain who shares memory."""
        regions = find_regions([o for o in self._beside if isinstance(o, torch.Tensor)])
        found: list[bytes] = []
        for obj in self._beside:
            region = regions.get(id(obj))
            if region is not None:
                record: bytes | None = alias_record(obj, region, frames)
            elif isinstance(obj, torch.Tensor):
                record = tensor_record(obj, frames)
            elif isinstance(obj, np.ndarray):
                record = array_record(obj, frames)
            else:
                record = buffer_record(obj, frames)
            assert record is not None, "only what is plain was put aside"
            found.append(record)
        return found


def seal(value: Any) -> Sealed:
    """Pickle a value; of a `Pickled` what is in it.

    Raises
    ------
    ArgumentError
        If it can't be pickled.
    """
    if type(value) is Sealed:
        return value
    unmark = isinstance(value, list | tuple | set | frozenset)  # of a class of its own, that is
    if type(value) is Pickled:
        value = value.value
    named = _is_named(value)
    if named and (known := _KNOWN.get(id(value))) and known[0]() is value:
        return known[1]
    file = io.BytesIO()
    frames: list[Any] = []
    try:
        pickler = _Pickler(file, unmark)
        pickler.dump(value)
        records = pickler.records(frames)
    except ArgumentError:  # it says itself what to do, as a DRef does
        raise
    except Exception as exc:
        raise ArgumentError(
            f"a {name_of(value)} can't be sent to another process: {first_line(exc)}. Send what "
            "it is made of (numbers, strings, tensors, lists, dicts), have a function on the "
            "worker make it, or teach its class to be pickled (__reduce__) or to travel "
            "(discolab.runtime.protocol.register_type)"
        ) from exc
    table = length(len(records)) + b"".join(records)
    sealed = Sealed(name_of(value), file.getvalue(), table, tuple(frames))
    if named and not records and len(sealed.data) < _LONGEST_NAMES:
        _keep(value, sealed)
    return sealed


def _keep(value: Any, sealed: Sealed) -> None:
    key, known = id(value), _KNOWN  # the module's own name is gone when the interpreter ends
    known[key] = (weakref.ref(value, lambda _: known.pop(key, None)), sealed)


_KNOWN: dict[int, tuple[weakref.ref[Any], Sealed]] = {}  # by id, since a class may redefine ==


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
    """What a value is, in words."""
    try:
        if type(value) in (FunctionType, BuiltinFunctionType):
            return f"function {value.__qualname__}"[:_LONGEST_WHAT]
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__}"[:_LONGEST_WHAT]
        kind = type(value)
        return f"{kind.__module__}.{kind.__qualname__}"[:_LONGEST_WHAT]
    except Exception:  # as above
        return "object"
