"""Says a record in one line: for titles, table cells and the children of containers.

Pure; reads any record, also an incomplete or a foreign one, and never needs the value itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .formats import cut, format_bytes, format_number, format_shape

_LIMIT = 160
_MOST_ITEMS = 6
_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "dict": ("{", "}"), "dataclass": ("(", ")")}
_JOINTS = {"dict": ": ", "dataclass": "="}


def summarize(record: Mapping[str, Any], limit: int = _LIMIT) -> str:
    """Say what a record describes in at most `limit` characters.

    Examples
    --------
    >>> summarize({"kind": "tensor", "dtype": "float32", "shape": [2, 3]})
    'float32[2, 3]'
    >>> summarize({"kind": "list", "length": 9, "more": 8,
    ...            "items": [{"key": "0", "value": {"kind": "none"}}]})
    '[None, …] (9 items)'
    """
    kind = record.get("kind")
    if kind == "none":
        words = "None"
    elif kind == "tensor":
        words = format_tensor(record)
    elif kind == "module":
        words = format_module(record)
    elif kind in _BRACKETS:
        words = _container(record, limit)
    else:
        words = str(record.get("summary", record.get("repr", record.get("message", kind))))
    return cut(words, limit)


def format_tensor(record: Mapping[str, Any], shape: Sequence[int] | None = None) -> str:
    """Name type (unless Tensor), dtype and shape, with the layout if it is not strided."""
    kind = record.get("type", "Tensor")
    words = (
        f"{record.get('dtype', '?')}{format_shape(record.get('shape') if shape is None else shape)}"
    )
    if kind not in ("Tensor", "ndarray"):
        words = f"{kind} {words}"
    return f"{words} {record['layout']}" if "layout" in record else words


def format_module(record: Mapping[str, Any], with_size: bool = True) -> str:
    """Name a module with the number of its parameters and its size."""
    count = record.get("parameters")
    number = f"{count:,}" if isinstance(count, int) else "?"
    plural = "" if count == 1 else "s"
    size = f", {format_bytes(record.get('nbytes'))}" if with_size else ""
    return f"{record.get('type', 'Module')} ({number} parameter{plural}{size})"


def format_values(record: Mapping[str, Any]) -> str:
    """Write the values of a small tensor; nothing if the record does not hold them all."""
    head, shape = record.get("head"), record.get("shape")
    if not isinstance(head, list) or not isinstance(shape, list) or "layout" in record:
        return ""
    count = 1
    for size in shape:
        count *= size if isinstance(size, int) else 0
    if count != len(head) or not head:
        return ""
    values = ", ".join(format_number(value) for value in head)
    return values if not shape else f"[{values}]"


def _container(record: Mapping[str, Any], limit: int) -> str:
    kind, length, items = record["kind"], record.get("length"), record.get("items")
    if not isinstance(items, list) or (not items and length):
        return f"{record.get('type', kind)} of {length}"
    opening, closing = _BRACKETS[kind]
    shown = items[:_MOST_ITEMS]
    words = [summarize(item["value"], limit) for item in shown]
    if kind in _JOINTS:
        joint = _JOINTS[kind]
        words = [f"{item['key']}{joint}{word}" for item, word in zip(shown, words, strict=True)]
    if kind == "dataclass":
        opening = f"{record.get('type')}("
    if record.get("more") or len(items) > len(shown):
        return f"{opening}{', '.join(words)}, …{closing} ({length} items)"
    comma = "," if kind == "tuple" and len(words) == 1 else ""
    return f"{opening}{', '.join(words)}{comma}{closing}"
