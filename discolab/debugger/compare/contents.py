"""What is in a value: its tensors and the rest, by names as ``hidden.1``. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def leaves(value: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in a value; names like ``0`` and ``hidden.1``, empty if it is a tensor."""
    found: list[tuple[str, torch.Tensor]] = []

    def take(leaf: str, tensor: torch.Tensor) -> torch.Tensor:
        found.append((leaf, tensor))
        return tensor

    replaced(value, name, take, rebuild=False)
    return found


def plain_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """All in a value that is no tensor and no container; names as of `leaves`."""
    inner = f"{name}." if name else ""
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, Mapping):
        return [one for key, v in value.items() for one in plain_leaves(v, f"{inner}{key}")]
    if isinstance(value, list | tuple):
        return [one for i, v in enumerate(value) for one in plain_leaves(v, f"{inner}{i}")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            one
            for field_ in dataclasses.fields(value)
            for one in plain_leaves(getattr(value, field_.name, None), f"{inner}{field_.name}")
        ]
    return [(name, value)]


def is_huge(number: float) -> bool:
    """Whether a number is an integer that no tensor holds."""
    return isinstance(number, int) and abs(number) >= 2**63


def replaced(
    value: Any, name: str, change: Callable[[str, torch.Tensor], torch.Tensor], rebuild: bool = True
) -> Any:
    """A value with all its tensors changed; what is in a container of an unknown type is not."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        items = {key: replaced(v, f"{inner}{key}", change, rebuild) for key, v in value.items()}
        if not rebuild or all(items[key] is v for key, v in value.items()):
            return value
        return items if type(value) is dict else _like_mapping(value, items)
    if isinstance(value, list | tuple):
        parts = [replaced(v, f"{inner}{i}", change, rebuild) for i, v in enumerate(value)]
        if not rebuild or all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    if not rebuild and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            replaced(getattr(value, one.name, None), f"{inner}{one.name}", change, rebuild)
    return value


def _like_mapping(value: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except Exception:  # a mapping of its own kind: its tensors stay as they were
        return value
