"""What the variables of cells were after each cell: the worker's record for `explain`.

Kept are short digests and whether a value has NaN in it, never the value itself. Only what may have
changed is read: a tensor is known by its identity and its version. Of tensors beyond `_WHOLE` bytes
some elements are read; tensors on other devices than the CPU, and of classes of their own such as
DTensors, are not. The worker's own thread writes, at the end of a cell; a probe reads.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..runtime.worker import Worker
from ..views.facts.tensors import why_no_data
from .given import GIVEN

RANDOM = "the state of torch's random numbers"
GONE = ""

Print = tuple[str, bool]
"""A digest, and whether NaN is among the numbers that were read."""
Entry = tuple[int, str, dict[str, Print]]
"""The ordinal of a cell, its file, and what it has changed."""

_SHARED = "discolab.debugger.fingerprints"
_WHOLE = 2**16  # bytes of a tensor that is read as a whole
_SAMPLE = 256  # elements that are read of others
_MOST_ENTRIES = 256
_MOST_NAMES = 200
_MOST_ITEMS = 32  # of a container
_PATIENCE = 0.02  # seconds a cell; what is not reached is looked at after the next one
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_LEFT_OUT = (FunctionType, BuiltinFunctionType, ModuleType, type)


class Book:
    """The record of one worker.

    Attributes
    ----------
    entries
        The cells that have changed something, the oldest first.
    last
        The ordinal of the last cell that has ended.
    """

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=_MOST_ENTRIES)
        self.last = -1
        self._keys: dict[str, Any] = {}
        self._prints: dict[str, Print] = {}

    def note(self, worker: Worker, file: str) -> None:
        """Enter what a cell has changed."""
        until = time.monotonic() + _PATIENCE
        changed: dict[str, Print] = {}
        names = worker.namespace
        for name in [name for name in self._prints if name != RANDOM and name not in names]:
            changed[name] = (GONE, False)
            self._keys.pop(name, None)
        for name, value in list(names.items())[:_MOST_NAMES]:
            if name.startswith("_") or name in GIVEN or isinstance(value, _LEFT_OUT):
                continue
            if time.monotonic() > until:
                break
            key = _key(value)
            if key is not None and self._keys.get(name) == key:
                continue
            self._keys[name] = key
            found = _print(value)
            if found is not None and self._prints.get(name) != found:
                changed[name] = found
        state = torch.get_rng_state()
        found = _digest(state.numpy().tobytes()), False
        if self._prints.get(RANDOM) != found:
            changed[RANDOM] = found
        self._prints.update(changed)
        for name in [name for name, (digest, _) in changed.items() if digest == GONE]:
            del self._prints[name]
        if changed:
            self.entries.append((worker.executed, file, changed))


def note_cell(worker: Worker, file: str) -> None:
    """A cell has ended on this worker; never raises."""
    try:
        books = worker.shared.setdefault(_SHARED, {})
        book = books.get(worker.worker_id)
        if book is None:
            book = books[worker.worker_id] = Book()
        book.last = worker.executed
        with _disable_current_modes(), torch.no_grad():
            book.note(worker, file)
    except Exception:  # a value that does not let itself be looked at
        return


def record_of(worker: Worker) -> tuple[list[Entry], int]:
    """What is recorded of a worker, and its last cell's ordinal, or -1; from any thread."""
    book: Book | None = worker.shared.get(_SHARED, {}).get(worker.worker_id)
    return ([], -1) if book is None else (list(book.entries.copy()), book.last)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module."""
    yield from value.parameters()
    yield from value.buffers()


def _key(value: Any) -> Any:
    """By what it is seen that a value is unchanged; None: it must be read."""
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            return None
        return weakref.ref(value), value._version
    if isinstance(value, torch.nn.Module):
        return weakref.ref(value), tuple(map(_key, _tensors(value)))
    return None


def _print(value: Any) -> Print | None:
    """The digest of a value; None: it is not one that could be compared."""
    found: list[bytes] = []
    has_nan = _feed(value, found, 0)
    return None if has_nan is None else (_digest(*found), has_nan)


def _feed(value: Any, found: list[bytes], depth: int) -> bool | None:
    """Add the bytes of a value to `found`; whether it has NaN in it."""
    kind = type(value)
    if kind in _ATOMS:
        found.append(repr(value).encode())
        return kind is float and value != value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _feed_tensor(value, found)
    if isinstance(value, torch.nn.Module):
        states = [_feed_tensor(tensor, found) for tensor in _tensors(value)]
        return None if None in states or not states else any(states)
    if kind in (list, tuple, dict) and len(value) <= _MOST_ITEMS and depth < 2:
        items = [*value, *value.values()] if kind is dict else value
        found.append(kind.__name__.encode())
        states = [_feed(item, found, depth + 1) for item in items]
        return None if None in states else any(states)
    return None


def _feed_tensor(tensor: torch.Tensor, found: list[bytes]) -> bool | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or why_no_data(tensor):
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
        return None
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.numel() * flat.element_size() > _WHOLE:
        flat = flat.reshape(-1) if flat.is_contiguous() else flat.flatten()
        flat = flat[:: max(1, flat.numel() // _SAMPLE)]
    flat = flat.contiguous()
    found.append(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.append(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    whole = flat.is_floating_point() or flat.is_complex()
    return bool(torch.isnan(flat).any()) if whole else False


def _digest(*parts: bytes) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()
