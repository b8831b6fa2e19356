"""What a worker's registers hold, in a few words each: read beside the worker, while it computes.

`look_at_registers` is a probe (runtime/services.py): it takes microseconds a value. It calls no
`__repr__` or `__len__` of anybody's, and what it can't know without that it leaves out.
"""

from __future__ import annotations

import functools
import itertools
import time
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch

from ...runtime.failures import Failure
from ...runtime.restart import LOST
from ...runtime.services import probe
from ...runtime.worker import Worker
from ..facts.guard import FAILURES, carriable, type_name
from ..formats import cut, format_shape

Fact: TypeAlias = tuple[str, int, str]
"""A value in words, its bytes, and the headline of its failure, "" if it has none."""

_LONGEST = 0.02  # seconds that one look may take
_MOST_ITEMS = 300  # of a container or module, counted for its bytes
_DEEPEST = 3
_LIMIT = 80  # characters
_NUMBERS = (bool, int, float)
_SIZED: tuple[Any, ...] = (str, bytes, list, tuple, dict, set, frozenset)


@probe
def look_at_registers(worker: Worker, ids: list[int]) -> tuple[int, list[Fact | None]]:
    """How many calls have ended here, and a fact for each id; None where there is no value.

    Facts of calls up to that number are those of their own values. It stops when its time is over:
    the list is shorter then.
    """
    executed = worker.executed  # first: what is read after it is at least as new
    registers = worker.registers
    found: list[Fact | None] = []
    ends = time.monotonic() + _LONGEST
    for number, reg_id in enumerate(ids):
        if number % 64 == 63 and time.monotonic() > ends:
            break
        try:
            found.append(fact_of(registers[reg_id]))
        except KeyError:
            found.append(None)
    return executed, found


def fact_of(value: Any) -> Fact:
    """Say what a value is.

    Examples
    --------
    >>> fact_of(torch.zeros(2, 3))
    ('float32[2, 3]', 24, '')
    >>> fact_of([torch.zeros(4)] * 3), fact_of(7), fact_of(None)
    (('list of 3', 48, ''), ('int 7', 0, ''), ('None', 0, ''))
    """
    kind = type(value)
    if kind is Failure:
        return "", 0, carriable(cut(_failure_words(value), 200))
    try:
        return cut(_words(kind, value), _LIMIT), _bytes(value), ""
    except FAILURES:  # it changes at this moment, or is stranger than we think
        return type_name(value), 0, ""


def _failure_words(failure: Failure) -> str:
    if failure.type_name == LOST:
        return f"{LOST}: made by {failure.command}"
    return failure.headline


def _words(kind: type, value: Any) -> str:
    if kind is torch.Tensor or issubclass(kind, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            local = value if kind is torch.Tensor else getattr(value, "_local_tensor", value)
            plain = kind is torch.Tensor or kind is torch.nn.Parameter
            return _tensor_words(local.dtype, local.shape, "" if plain else type_name(value))
    if value is None:
        return "None"
    if kind in _NUMBERS:
        return f"{kind.__name__} {value!r:.40}"
    if issubclass(kind, _SIZED):
        return f"{type_name(value)} of {_length(value)}"
    if kind in (FunctionType, BuiltinFunctionType):
        return f"function {carriable(value.__name__)}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"ndarray {value.dtype.name}{format_shape(value.shape)}"
    return type_name(value)


@functools.lru_cache(maxsize=4096)
def _tensor_words(dtype: torch.dtype, shape: torch.Size, name: str) -> str:
    words = str(dtype).removeprefix("torch.") + format_shape(shape)
    return f"{name} {words}" if name else words


def _length(value: Any) -> int:
    """The length that the built-in type keeps, whatever a subclass says."""
    for base in _SIZED:
        if isinstance(value, base):
            return int(base.__len__(value))
    return 0


def _bytes(value: Any) -> int:
    """The bytes of the tensors in a value; of a large one, of as many as are looked at."""
    total = left = 0
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo and left < _MOST_ITEMS:
        one, depth = todo.pop()
        left += 1
        kind = type(one)
        if issubclass(kind, torch.Tensor):
            total += _size(one)
        elif issubclass(kind, torch.nn.Module):
            module = torch.nn.Module
            parts = itertools.chain(module.parameters(one), module.buffers(one))
            total += sum(map(_size, itertools.islice(parts, _MOST_ITEMS)))
        elif kind.__name__ == "ndarray" and kind.__module__ == "numpy":
            total += int(one.nbytes)
        elif depth < _DEEPEST and issubclass(kind, dict):
            todo += [(item, depth + 1) for item in tuple(dict.values(one))[:_MOST_ITEMS]]
        elif depth < _DEEPEST and issubclass(kind, list | tuple):
            base: Any = list if issubclass(kind, list) else tuple
            first = base.__getitem__(one, slice(_MOST_ITEMS))
            todo += [(item, depth + 1) for item in first]
    return min(total, 2**62)


def _size(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor) if type(tensor) is not torch.Tensor else tensor
    if local.device.type == "meta":
        return 0
    if local.layout is torch.strided:
        return int(local.numel() * local.element_size())
    return int(local._nnz() * local.element_size())
