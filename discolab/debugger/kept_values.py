"""What a recording keeps of a value: enough to tell whether it has changed, and what it was.

A mark tells whether a variable still holds what it held, without keeping that alive: of a tensor a
weak reference and torch's own count of the writes to it. A `Kept` is what the value was. Of a small
tensor it is a private copy, which takes some 3 us where its record takes some 300, and is described
when somebody asks; that may be on another thread.
"""

from __future__ import annotations

import itertools
import sys
import weakref
import zlib
from contextlib import ExitStack
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from ..runtime.regions import array_of
from ..views.facts.describe import describe
from ..views.facts.guard import FAILURES, Record
from ..views.facts.tensors import describe_tensor, why_no_data
from .frames import size_of

READ = 64 * 2**10  # bytes of a value whose data are kept
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOT_SHOWN = (ModuleType, FunctionType, BuiltinFunctionType, type)
_LONGEST = 1000  # characters of a string that is kept as it is
_ENDS = 32  # items at each end of a container that are looked at
_DEPTH = 2
_RECORD = 1000  # bytes, about, of a record
_GONE: Record = {"kind": "object", "type": "deleted", "repr": "deleted"}


class Mark(NamedTuple):
    """Of what is no number or short string: which object, and a number for its state."""

    which: Any
    state: Any


def mark_of(value: Any) -> Any:
    """What `is_same` needs to know of a value later; a number or short string is its own mark."""
    kind = type(value)
    if kind in _ATOMS:
        long = kind in (str, bytes) and len(value) > _LONGEST
        return Mark(kind, hash(value)) if long else value
    return Mark(_which(value), _state(value, 0))


def is_same(mark: Any, value: Any) -> bool:
    """Whether a value is what it was when it was marked, as far as that is looked at."""
    kind = type(value)
    if kind in _ATOMS:
        if type(mark) is not kind:
            return type(mark) is Mark and mark == mark_of(value)
        return mark is value or bool(mark == value) or bool(value != value and mark != mark)
    if type(mark) is not Mark:
        return False
    which = mark.which
    held = which() if type(which) is weakref.ref else None
    if held is not value and (held is not None or which != id(value)):
        return False
    return bool(mark.state == _state(value, 0))


def is_shown(value: Any) -> bool:
    """Whether it is something that a program computes; not isinstance, which asks the value."""
    return not issubclass(type(value), _NOT_SHOWN)


class Kept:
    """What a variable was.

    Attributes
    ----------
    size
        Bytes that it takes, about.
    """

    __slots__ = ("_copy", "_record", "size")

    def __init__(self, value: Any) -> None:
        self._copy: Any = None
        self._record: Record | None = None
        kind = type(value)
        if kind in _ATOMS and not (kind in (str, bytes) and len(value) > _LONGEST):
            self._copy = (value, kind, False)
            self.size = 100
        elif kind in _PLAIN and (copy := _copied(value)) is not None:
            self._copy = (copy, kind, value.requires_grad)
            self.size = copy.nbytes + _RECORD
        else:
            with ExitStack() as stack:
                if torch._C._len_torch_dispatch_stack():
                    stack.enter_context(torch._C._DisableTorchDispatch())
                self._record = describe(value, "auto" if size_of(value) <= READ else False)
            self.size = 2 * _RECORD

    def record(self) -> Record:
        """As `describe` tells it."""
        if self._record is None:
            value, kind, requires_grad = self._copy
            if isinstance(value, torch.Tensor):
                made = describe_tensor(value, True)
                made["type"] = kind.__name__
                if requires_grad:
                    made["requires_grad"] = True
                self._record = made
            else:
                self._record = describe(value)
        return self._record

    def differs(self, value: Any) -> bool:
        """Whether a tensor that counts as unchanged has been written to by others than torch."""
        copy = self._copy[0] if self._copy is not None else None
        if not isinstance(copy, torch.Tensor) or type(value) not in _PLAIN:
            return False
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
            value = value.detach()
            return bool((copy.ne(value) & (copy.eq(copy) | value.eq(value))).any())  # NaN is NaN


class Gone:
    """In place of a `Kept`: the variable was deleted."""

    size = 0

    def record(self) -> Record:
        """In words."""
        return _GONE


def _copied(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of a small tensor; None where there is none."""
    try:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return None
        if tensor.numel() * tensor.element_size() > READ or why_no_data(tensor):
            return None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
            return tensor.detach().clone()
    except FAILURES:
        return None


def _which(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)


def _state(value: Any, depth: int) -> Any:
    """A number that changes when the value is written to, within bounds."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return _tensor_state(getattr(value, "_local_tensor", value))
    if kind in (list, tuple, set, frozenset):
        return len(value), hash(tuple(_item(one, depth) for one in _ends(value)))
    if kind is dict:
        items = tuple((_item(k, depth), _item(v, depth)) for k, v in _ends(value.items()))
        return len(value), hash(items)
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        if value.dtype.hasobject:
            return None
        step = max(value.nbytes // READ, 1)
        return value.shape, zlib.crc32(value.reshape(-1)[::step].tobytes())
    return None


def _ends(value: Any) -> Any:
    """The items of a container; of a large one those at its ends, of a set nothing then."""
    if len(value) <= 2 * _ENDS:
        return value
    if isinstance(value, list | tuple):
        return [*value[:_ENDS], *value[-_ENDS:]]
    return list(itertools.islice(value, _ENDS))


def _item(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    return id(value), _state(value, depth + 1) if depth < _DEPTH else None


def _tensor_state(tensor: torch.Tensor) -> Any:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where torch does not count
        return _content_state(tensor)


def _content_state(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > READ:
        return None
    try:
        data: Any = array_of(tensor.contiguous().reshape(-1).view(torch.uint8))
        return zlib.crc32(data)
    except FAILURES:
        return None
