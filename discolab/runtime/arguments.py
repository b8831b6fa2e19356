"""What a command may carry, checked on the controller and bound on the worker.

Values: None, bool, int, float, complex, str, bytes, slices, ranges, torch dtypes, devices,
sizes, layouts and memory formats, meshes, tensors, numpy arrays and scalars, DRefs, functions
and classes, and lists, tuples, sets and dicts of these; TVM's tensors, shapes and devices become
torch's. Anything else must be marked with `Pickled`, so that a program says itself where it leaves
the typed protocol.

A tensor, an array, a module or a `Pickled` object is private to each worker: each gets its
own copy, so that a program gives the same result whether workers share memory or not. Tensors
of one command that overlap do so in the copy too (regions.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch

from .errors import ArgumentError
from .regions import copies_of, copy_of, copy_simple
from .tvm_values import from_tvm, is_of_tvm

C = TypeVar("C", bound=type)

_ATOMS: set[type] = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    EllipsisType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    type,
}
_PRIVATE = (torch.Tensor, torch.nn.Module, np.ndarray)
_DEEPEST = 64

OPENERS: dict[type, Callable[[Any, Callable[[int], Any]], Any]] = {}
"""What a worker in another process receives shut, and how it is opened there with its registers."""


def plain(cls: C) -> C:
    """Declare a class of small values that never change: a command carries them as they are."""
    _ATOMS.add(cls)
    return cls


class Register(int):
    """A register id among arguments: stands for the value that each worker holds there."""

    __slots__ = ()


class Pickled:
    """Mark any Python object as an argument: ``sess.call_packed(f, Pickled(config))``.

    Each worker receives a copy of its own, by `copy.deepcopy` where workers share the
    controller's memory and by pickle elsewhere.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


_SEQUENCES = (list, tuple, set, frozenset)


class Copies:
    """The copies of the tensors in a value, made when the first one is asked for.

    `simple`: whether all are simple tensors, see `regions.copies_of`; None while that is unknown.
    Where the command says so beforehand, as on a worker, nothing is searched.
    """

    __slots__ = ("_made", "_whole", "simple")

    def __init__(self, whole: Any, simple: bool | None = None) -> None:
        self._whole = whole
        self._made: dict[int, torch.Tensor] = {}
        self.simple = simple

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one of them."""
        if self.simple is None:
            found: list[torch.Tensor] = []
            _collect(self._whole, found, 0)
            self.simple, self._made = copies_of(found)
        made = self._made.get(id(tensor))
        if made is None:
            made = self._made[id(tensor)] = copy_simple(tensor)
        return made


def _collect(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if type(value) in _ATOMS or depth > _DEEPEST + 2:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, _SEQUENCES):
        for item in value:
            if type(item) not in _ATOMS:
                _collect(item, found, depth + 1)
    elif isinstance(value, Mapping):
        for pair in value.items():
            for item in pair:
                if type(item) not in _ATOMS:
                    _collect(item, found, depth + 1)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found, depth)


def encode(
    value: Any,
    register_of: Callable[[Any], Register | None],
    depth: int = 0,
    copies: Copies | None = None,
) -> Any:
    """Check one argument and replace the DRefs in it by `Register`s.

    Parameters
    ----------
    value
        The argument as the user gave it.
    register_of
        Gives the `Register` of a DRef, None for anything else; raises for a DRef that does
        not belong here.
    copies
        Of the tensors of all arguments, if there are others.

    Raises
    ------
    ArgumentError
        If the value, or one inside it, is of a type that a command can't carry.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is Pickled or isinstance(value, _PRIVATE):
        return _snapshot(value, copies)
    if is_of_tvm(kind) and (known := from_tvm(value)) is not value:
        return encode(known, register_of, depth)
    if copies is None:
        copies = Copies(value)
    if depth > _DEEPEST:
        raise ArgumentError(
            f"an argument is nested more than {_DEEPEST} deep (does a list hold itself?)"
        )
    depth += 1
    if isinstance(value, _SEQUENCES):
        items = [
            item if type(item) in _ATOMS else encode(item, register_of, depth, copies)
            for item in value
        ]
        return rebuild(value, items)
    if isinstance(value, Mapping):
        return {
            k if type(k) in _ATOMS else encode(k, register_of, depth, copies): (
                v if type(v) in _ATOMS else encode(v, register_of, depth, copies)
            )
            for k, v in value.items()
        }
    register = register_of(value)
    if register is not None:
        return register
    if isinstance(value, slice):
        return slice(
            *(encode(v, register_of, depth, copies) for v in (value.start, value.stop, value.step))
        )
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int | float | str | bytes) or callable(value):
        return value
    raise ArgumentError(
        f"a {kind.__module__}.{kind.__qualname__} can't be an argument of a command; allowed are "
        "numbers, strings, bytes, None, dtypes, devices, shapes, tensors, numpy arrays, DRefs, "
        "functions, and lists, tuples and dicts of these. "
        "Wrap another object as discolab.Pickled(obj) to send each worker a copy of it"
    )


def _snapshot(value: Any, copies: Copies | None) -> Any:
    """What a private object is at the time of the call: a worker comes to it later."""
    try:
        if isinstance(value, Pickled):
            return Pickled(copy.deepcopy(value.value))
        return private_copy(value, copies)
    except Exception as exc:
        inner = value.value if isinstance(value, Pickled) else value
        raise ArgumentError(
            f"a {type(inner).__qualname__} that can't be copied can't be an argument: {exc}"
        ) from exc


def kinds_to_encode(values: Iterable[object]) -> set[type]:
    """The types of those values that a worker can't use as they are."""
    return set(map(type, values)) - _ATOMS


def bind(value: Any, lookup: Callable[[int], Any], copies: Copies | None = None) -> Any:
    """Give an encoded argument its meaning on one worker.

    Registers are looked up, tensors and other private objects copied, what is shut is opened.
    `copies` is as for `encode`.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is Register:
        return lookup(value)
    if kind is Pickled:
        return copy.deepcopy(value.value)
    opener = OPENERS.get(kind)
    if opener is not None:
        return opener(value, lookup)
    if isinstance(value, _PRIVATE):
        return private_copy(value, copies)
    if copies is None:
        copies = Copies(value)
    if isinstance(value, _SEQUENCES):
        items = [item if type(item) in _ATOMS else bind(item, lookup, copies) for item in value]
        return rebuild(value, items)
    if kind is dict:
        return {
            k if type(k) in _ATOMS else bind(k, lookup, copies): (
                v if type(v) in _ATOMS else bind(v, lookup, copies)
            )
            for k, v in value.items()
        }
    if kind is slice:
        return slice(*(bind(v, lookup, copies) for v in (value.start, value.stop, value.step)))
    return value


class Shared:
    """A base of what nobody changes: workers that are threads get it itself, not a copy each.

    To copy it takes long where it names many tensors.
    """

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return self


def private_copy(value: Any, copies: Copies | None = None) -> Any:
    """Copy tensors, arrays and modules in `value`; other objects stay as they are.

    A tensor keeps its dtype, device, strides and `requires_grad`, and leaves its graph; tensors
    that overlap, or are one, do so or are so again.
    """
    if isinstance(value, torch.Tensor):
        return copy_of(value) if copies is None else copies.of(value)
    if copies is None:
        copies = Copies(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value)
    if isinstance(value, tuple) or type(value) is list:
        return rebuild(value, [private_copy(item, copies) for item in value])
    if isinstance(value, dict):
        other = copy.copy(value)  # an OrderedDict (a state_dict, say) stays one
        other.update((k, private_copy(v, copies)) for k, v in value.items())
        return other
    return value


def rebuild(like: Any, items: list[Any]) -> Any:
    """A list, tuple, named tuple or set like `like`, of other items."""
    if isinstance(like, torch.Size) or hasattr(like, "n_sequence_fields"):
        return type(like)(items)  # the latter is what torch.max and os.stat return
    if hasattr(like, "_fields"):
        return type(like)(*items)
    for base in (list, tuple, set, frozenset):
        if isinstance(like, base):
            return base(items)
    raise AssertionError(f"not a container: {type(like)}")


def as_tensor(array: Any, what: str) -> torch.Tensor:
    """A tensor that shares memory with a host array, unless that is read-only.

    Raises
    ------
    ArgumentError
        If `array` is neither a tensor nor a numpy array, or is of a dtype torch lacks.
    """
    array = from_tvm(array)
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray):
        try:
            # torch can't share memory that must not be written
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        except (TypeError, ValueError) as exc:
            raise ArgumentError(f"{what}: torch can't use this numpy array: {exc}") from None
    raise ArgumentError(
        f"{what} must be a torch tensor or a numpy array, got {type(array).__name__}"
    )


def parse_device(device: Any) -> torch.device | None:
    """A torch device from itself or its name; None stays None.

    Raises
    ------
    ArgumentError
        If torch has none of that name.
    """
    try:
        return None if device is None else torch.device(from_tvm(device))
    except (RuntimeError, TypeError) as exc:
        first_line = str(exc).splitlines()[0]
        raise ArgumentError(f"{device!r} is not a device: {first_line}") from None


def parse_dtype(dtype: Any) -> torch.dtype:
    """A torch dtype from itself, its name (``"float32"``, ``"bfloat16"``) or numpy's.

    Raises
    ------
    ArgumentError
        If there is none of that name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(
            f"unknown dtype {dtype!r}; use a torch dtype or its name, such as 'float32', "
            "'float16', 'bfloat16', 'int64' or 'bool'"
        )
    return found


def parse_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints; one int means one dimension.

    Raises
    ------
    ArgumentError
        If it is no sequence of non-negative integers.
    """
    sizes = (shape,) if isinstance(shape, int | np.integer) else shape
    try:
        result = tuple(size.__index__() for size in sizes)
    except (TypeError, AttributeError):
        raise ArgumentError(f"a shape is a tuple of integers, got {shape!r}") from None
    if any(size < 0 for size in result):
        raise ArgumentError(f"a shape has no negative sizes, got {shape!r}")
    return result
