"""Describes a module on the worker that holds it: its layers, parameters and buffers.

Part of `describe`. A record stays under 100 KB: the first parameters are told in full, some
hundreds more in a line each, all others in one digest. Digests, by which workers are compared, are
taken unasked of modules up to 16 MiB.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, cast

import torch

from ..formats import cut, format_ranks, format_shape
from .guard import FAILURES, Record, carriable, error_text, type_name
from .storage import is_lazy, why_no_data
from .tensors import Stats, digest_of, dtype_name, is_dtensor, shape_of, sharding_of

#: Digests of parameters and items are taken unasked up to this many bytes in all.
SMALL_MODULE = 16 * 2**20

MOST_LISTED = 40  # parameters, or items of a container, told in full
MOST_BRIEF = 500  # parameters after those
_MOST_LAYERS = 8
_MOST_LAYOUTS = 16
_NAME_LIMIT = 120
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def describe_module(module: torch.nn.Module, stats: Stats) -> Record:
    """Describe a module.

    Returns
    -------
    dict
        Kind "module"; see `describe`. ``params`` has a row for each of the first parameters and
        buffers; ``brief`` has ``[name, words, digest]`` for those after them.
    """
    record: Record = {"kind": "module", "type": type_name(module)}
    rows: list[tuple[str, Any, bool]] = []
    try:
        rows += [(name, value, False) for name, value in module.named_parameters()]
        rows += [(name, value, True) for name, value in module.named_buffers()]
        record["layers"] = _layers(module)
    except FAILURES as error:
        record["error"] = f"parameters not listed: {error_text(error)}"
    counts = [0 if buffer else _count(value) for _, value, buffer in rows]
    nbytes = sum(_bytes(value) for _, value, _ in rows)
    small = stats is True or (stats == "auto" and nbytes <= SMALL_MODULE)
    digests = [_digest(value) if small else None for _, value, _ in rows]
    layouts = _Layouts()
    listed = [
        _row(*row, digest, layouts)
        for row, digest in zip(rows[:MOST_LISTED], digests[:MOST_LISTED], strict=True)
    ]
    record |= {"parameters": sum(counts), "nbytes": nbytes, "params": listed}
    if layouts.found:
        record["layouts"] = layouts.found
    if len(rows) > MOST_LISTED:
        record["more"] = len(rows) - MOST_LISTED
        pairs = zip(rows[MOST_LISTED:], digests[MOST_LISTED:], strict=True)
        record["brief"] = [
            [_name(name), cut(_words(value), 60), digest]
            for (name, value, _), digest in itertools.islice(pairs, MOST_BRIEF)
        ]
    if small and None not in digests:
        record["digest"] = text_digest(
            "\n".join(f"{row[0]} {digest}" for row, digest in zip(rows, digests, strict=True))
        )
    return record


def text_digest(text: str) -> str:
    """Hash a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class _Layouts:
    """How DTensors are laid out: each layout is told once, parameters have its number."""

    def __init__(self) -> None:
        self.found: list[object] = []

    def number(self, tensor: Any) -> int | None:
        """The number of a layout, None if there are too many."""
        sharding = sharding_of(tensor)
        if sharding not in self.found:
            if len(self.found) == _MOST_LAYOUTS:
                return None
            self.found.append(sharding)
        return self.found.index(sharding)


def _row(name: str, value: Any, buffer: bool, digest: str | None, layouts: _Layouts) -> Record:
    """One parameter or buffer; a sharded one counts with what lies here, shown by full shape."""
    row: Record = {"name": _name(name), "shape": None, "dtype": dtype_name(value.dtype)}
    if why := why_no_data(value):
        row["note"] = why
    if is_lazy(value):
        return row
    row |= {"shape": shape_of(value), "nbytes": _bytes(value)}
    if digest is not None:
        row["digest"] = digest
    if buffer:
        row["buffer"] = True
    elif not value.requires_grad:
        row["frozen"] = True
    if value.is_leaf and value.grad is not None:
        row["grad"] = True
    if is_dtensor(value):
        try:
            row["layout"] = layouts.number(value)
        except FAILURES as error:
            row["error"] = error_text(error)
    return row


def _words(value: Any) -> str:
    return f"{dtype_name(value.dtype)}{format_shape(None if is_lazy(value) else shape_of(value))}"


def _name(name: object) -> str:
    return carriable(cut(str(name), _NAME_LIMIT))


def _local(value: Any) -> Any:
    return value._local_tensor if is_dtensor(value) else value


def _count(value: Any) -> int:
    return 0 if is_lazy(value) else cast(int, _local(value).numel())


def _bytes(value: Any) -> int:
    local = _local(value)
    return 0 if is_lazy(value) else min(local.numel() * local.element_size(), 2**62)


def _digest(value: Any) -> str | None:
    try:
        return digest_of(value)
    except FAILURES:
        return None


def _layers(module: torch.nn.Module) -> list[str]:
    """Name the layers that a module has; those in a list or a sequence by their numbers.

    A stage of a pipeline thus says which layers of the whole model it has.
    """
    found = []
    for name, child in itertools.islice(module.named_children(), _MOST_LAYERS + 1):
        inner = [key for key, _ in itertools.islice(child.named_children(), 1000)]
        if inner and isinstance(child, _LISTS):
            found.append(f"{name}.{_numbers(inner)}")
        else:
            found.append(name)
    if found and all(name.isdecimal() for name in module._modules):
        return [_name(_numbers(list(module._modules)))]
    if len(found) > _MOST_LAYERS:
        found[-1] = "…"
    return [_name(words) for words in found]


def _numbers(names: list[str]) -> str:
    """``4-7`` for neighbouring numbers, ``a,b`` for names."""
    numbers = all(name.isdecimal() for name in names)
    return format_ranks(map(int, names)) if numbers else ",".join(names)
