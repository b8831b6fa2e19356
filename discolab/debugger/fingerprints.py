"""What the variables of cells were after each cell: the worker's record for `explain`.

Kept are short digests and whether a value has NaN in it, never the value itself. Only what may have
changed is read: a tensor is known by its identity, its version and a few of its elements, as torch
does not count what is written through ``.data`` or NumPy. Of large tensors some elements are read;
tensors on other devices than the CPU, and of classes of their own such as DTensors, are not. A cell
is given `_PATIENCE` seconds of the processor; what is not reached then is not known until it is
read. The worker's own thread writes, at the end of a cell; a probe reads. What variables are at
this moment a probe reads of workers that write to nothing (`prints_now`).
"""

from __future__ import annotations

import hashlib
import operator
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..runtime.interpreter_lock import copied
from ..runtime.regions import array_of
from ..runtime.services import probe
from ..runtime.worker import Worker
from ..views.facts.tensors import why_no_data
from .agent import STANDS
from .frames import GIVEN

RANDOM = "the state of torch's random numbers"
GONE = ""  # a digest: there is no such variable
UNREAD = "?"  # a digest: what the variable holds was not read

Print = tuple[str, bool]
"""A digest, and whether NaN is among the numbers that were read."""
Key = list[tuple[weakref.ref[Any], int, bytes]]
"""Objects, and of a tensor how often it was written to, and some elements."""
Entry = tuple[int, str, dict[str, Print]]
"""The ordinal of a cell, its file, and what it has changed."""

_BOOK = "discolab.debugger.fingerprints"
_WHOLE = 2**16  # bytes of a tensor that is read as a whole
_WHOLE_OF_MODULE = 2**12  # the same for the parameters and buffers of a module
_SAMPLE = 64  # elements that are read of others
_WHOLE_OF_KEY = 2**10  # bytes of a tensor that is read to see whether it was written past torch
_SAMPLE_OF_KEY = 4  # elements that are read of others for that
_TENSORS_OF_KEY = 8  # of a module, of which these elements are read
_MOST_ENTRIES = 256
_MOST_NAMES = 200
_MOST_ITEMS = 32  # of a container
_PATIENCE = 0.02  # seconds of the thread
_OF_NUMPY = (torch.float16, torch.float32, torch.float64)
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
        self._keys: dict[str, Key | None] = {}
        self._prints: dict[str, Print] = {}

    def note(self, worker: Worker, file: str) -> None:
        """Enter what a cell has changed."""
        until = time.thread_time() + _PATIENCE
        changed: dict[str, Print] = {}
        names = worker.namespace
        for name in [name for name in self._prints if name != RANDOM and name not in names]:
            changed[name] = (GONE, False)
            self._keys.pop(name, None)
        for name, value in list(names.items())[:_MOST_NAMES]:
            if name.startswith("_") or name in GIVEN:
                continue
            try:
                key = _key(value)
                if key is not None and _is_same(self._keys.get(name), key):
                    continue
            except Exception:  # a value that does not let itself be looked at
                key = None
            found = _print_of(value, until)
            self._keys[name] = key if found[0] != UNREAD else None
            if self._prints.get(name) != found:
                changed[name] = found
        found = _print_of_random(worker)
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
        book = worker.process_state.get(_BOOK)
        if book is None:
            book = worker.process_state[_BOOK] = Book()
        book.last = worker.executed
        with _disable_current_modes(), torch.no_grad():
            book.note(worker, file)
    except Exception:  # a value that does not let itself be looked at
        return


def record_of(worker: Worker) -> tuple[list[Entry], int]:
    """What is recorded of a worker, and its last cell's ordinal, or -1; from any thread."""
    book: Book | None = worker.process_state.get(_BOOK)
    return ([], -1) if book is None else (copied(book.entries), book.last)


@probe
def prints_now(worker: Worker, names: Sequence[str]) -> dict[str, Print] | None:
    """What some variables are at this moment; None of a worker that may be writing to them.

    One that is idle does not, nor one that stands in the debugger; it is looked again afterwards
    whether it still is so, for a probe runs beside it.
    """
    before = worker.executed, worker.current, worker.waiting_for
    if before[1] is not None and not f"for {before[2]}".startswith(STANDS):
        return None
    until = time.thread_time() + _PATIENCE
    found: dict[str, Print] = {}
    with _disable_current_modes(), torch.no_grad():
        for name in names:
            if name == RANDOM:
                found[name] = _print_of_random(worker)
            elif name not in worker.namespace:
                found[name] = GONE, False
            else:
                found[name] = _print_of(worker.namespace.get(name), until)
    now = worker.executed, worker.current, worker.waiting_for
    return found if all(map(operator.is_, before[1:], now[1:])) and before[0] == now[0] else None


def _print_of_random(worker: Worker) -> Print:
    return _digest(worker.generator.get_state().numpy().tobytes()), False


def _print_of(value: Any, until: float) -> Print:
    """The digest of a value, `UNREAD` if there is none."""
    try:
        found = None if issubclass(type(value), _LEFT_OUT) else _print(value, until)
    except Exception:  # a value that does not let itself be looked at
        found = None
    return (UNREAD, False) if found is None else found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module."""
    yield from value.parameters()
    yield from value.buffers()


def _key(value: Any) -> Key | None:
    """By what it is seen that a value is unchanged; None: it must be read."""
    tensors: Sequence[torch.Tensor] = ()
    found: Key = []
    if isinstance(value, torch.Tensor):
        tensors = (value,)
    elif isinstance(value, torch.nn.Module):
        found, tensors = [(weakref.ref(value), 0, b"")], list(_tensors(value))
    step = max(1, len(tensors) // _TENSORS_OF_KEY)
    for number, tensor in enumerate(tensors):
        if tensor.is_inference():  # torch does not count what is written to it
            return None
        values = None if number % step else _read(tensor, _WHOLE_OF_KEY, _SAMPLE_OF_KEY)
        some = b"" if values is None else values.tobytes()
        found.append((weakref.ref(tensor), tensor._version, some))
    return found or None


def _is_same(before: Key | None, now: Key) -> bool:
    """Whether two keys are of the same objects; references that are equal may be of equal ones."""
    return (
        before is not None
        and len(before) == len(now)
        and all(
            old[0] is new[0] and old[1:] == new[1:] for old, new in zip(before, now, strict=True)
        )
    )


def _print(value: Any, until: float) -> Print | None:
    """The digest of a value; None: it can't be compared, or there is no time to read it."""
    found: list[bytes] = []
    has_nan = _feed(value, found, until, 0)
    return None if has_nan is None else (_digest(*found), has_nan)


def _feed(value: Any, found: list[bytes], until: float, depth: int) -> bool | None:
    """Add the bytes of a value to `found`; whether it has NaN in it."""
    if time.thread_time() > until:
        return None
    kind = type(value)
    if kind in _ATOMS:
        found.append(repr(value).encode())
        return kind is float and value != value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _feed_tensor(value, found, _WHOLE)
    if isinstance(value, torch.nn.Module):
        states = []
        for tensor in _tensors(value):
            states.append(_feed_tensor(tensor, found, _WHOLE_OF_MODULE))
            if states[-1] is None or time.thread_time() > until:
                return None
        return any(states) if states else None
    if kind in (list, tuple, dict) and len(value) <= _MOST_ITEMS and depth < 2:
        items = [*value, *value.values()] if kind is dict else value
        found.append(kind.__name__.encode())
        states = [_feed(item, found, until, depth + 1) for item in items]
        return None if None in states else any(states)
    return None


def _feed_tensor(tensor: torch.Tensor, found: list[bytes], whole: int) -> bool | None:
    values = _read(tensor, whole, _SAMPLE)
    if values is None:
        return None
    found.append(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.append(values.tobytes())
    return values.dtype.kind == "f" and bool(np.isnan(values).any())


def _read(tensor: torch.Tensor, whole: int, sample: int) -> Any:
    """All elements, beyond `whole` bytes about `sample` of them; None if they can't be read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or why_no_data(tensor):
        return None
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    size = tensor.numel() * tensor.element_size()
    if size > _WHOLE and not tensor.is_contiguous():  # it would have to be copied
        return None
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.resolve_neg().reshape(-1)
    if size > whole:
        flat = flat[:: max(1, flat.numel() // sample)]
    if flat.is_floating_point() and flat.dtype not in _OF_NUMPY:
        flat = flat.float()
    return array_of(flat)


def _digest(*parts: bytes) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()
