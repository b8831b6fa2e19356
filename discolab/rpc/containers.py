"""Tensors in nested containers: found, and put in the place of others.

Looked into are lists, tuples, dicts, their subclasses, and dataclasses; nothing else. The order of
the walk is fixed by the value, so that two nodes number the tensors of it alike. No state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor

_NO_CONTAINER = {type(None), bool, int, float, complex, str, bytes, bytearray, range, type}
_NO_CONTAINER |= {torch.dtype, torch.device}


def has_grad(value: Any) -> bool:
    """Whether a tensor in it requires grad; fast where there is not much in it."""
    return _has_grad(value, None)


def _has_grad(value: Any, around: tuple[Any, Any] | None) -> bool:
    kind = type(value)
    if kind in _NO_CONTAINER:
        return False
    if kind is Tensor or issubclass(kind, Tensor):
        return bool(value.requires_grad)
    items: Any
    if kind is tuple or kind is list:
        items = value
    elif kind is dict:
        items = value.values()
    else:
        items = _items(value)
    if not items or _NO_CONTAINER.issuperset(map(type, items)):
        return False
    outer = around
    while outer is not None:  # within itself
        if outer[0] is value:
            return False
        outer = outer[1]
    around = value, around
    for item in items:  # noqa: SIM110 - a generator costs more
        if _has_grad(item, around):
            return True
    return False


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in it, in the order of the walk."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    swap(value, note)
    return tensors


def swap(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with ``change(tensor)`` in the place of each tensor.

    What has no other tensor in it after that is the very object that it was; of the rest, the
    containers are copies.
    """
    return _swap(value, change, set())


def _swap(value: Any, change: Callable[[Tensor], Tensor], around: set[int]) -> Any:
    if type(value) in _NO_CONTAINER:
        return value
    if isinstance(value, Tensor):
        return change(value)
    items = _items(value)
    if not items or _NO_CONTAINER.issuperset(map(type, items)) or id(value) in around:
        return value
    around.add(id(value))  # a container within itself is not looked into again
    new = [_swap(item, change, around) for item in items]
    around.discard(id(value))
    if all(a is b for a, b in zip(items, new, strict=True)):
        return value
    return _rebuilt(value, new)


def _items(value: Any) -> list[Any]:
    """What is in a container, in its order; nothing if it is none that is looked into."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    kind = type(value)
    if hasattr(kind, "__dataclass_fields__") and not isinstance(value, torch.nn.Module):
        return [getattr(value, name, None) for name in kind.__dataclass_fields__]
    return []


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A container like `value` with other items."""
    kind = type(value)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if isinstance(value, tuple):
        make = getattr(kind, "_make", kind)  # else one of torch.return_types
        return make(items)
    made = copy.copy(value)
    if isinstance(value, list):
        made[:] = items
    elif isinstance(value, dict):
        for key, item in zip(value, items, strict=True):
            made[key] = item
    else:
        for name, item in zip(kind.__dataclass_fields__, items, strict=True):
            if item is not getattr(value, name, None):
                object.__setattr__(made, name, item)
    return made
