"""Copying between tensors of several workers, and the events around it. No state.

On accelerators: a worker records events on its current streams when it joins (`posted`); the
thread that executes has its own streams wait for them (`enter`) and records events after the work
(`posted`); each member has its current streams wait for those (`adopt`). No thread waits for a
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..runtime.accelerators import current_stream, on_accelerator
from .reductions import MOVABLE, REDUCIBLE

Event = torch.Event
Move = tuple[torch.Tensor, torch.Tensor]  # destination, source


def move_all(moves: Sequence[Move]) -> None:
    """Copy each source to its destination as if all were read before any is written."""
    spans = [span(dst) for dst, _ in moves]
    safe: dict[int, torch.Tensor] = {}
    for _, src in moves:
        if id(src) not in safe:
            safe[id(src)] = src.clone() if _overwritten(src, moves, spans) else src
    for dst, src in moves:
        read = safe[id(src)]
        if not _same_place(dst, read):
            as_bytes(dst).copy_(as_bytes(read))


def rows(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Cut `tensor` in equal parts along its first dimension; the size must divide."""
    size = tensor.shape[0] // parts
    return [tensor.narrow(0, i * size, size) for i in range(parts)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Dtypes that torch has no arithmetic for are seen as bytes; others as they are."""
    if tensor.dtype in MOVABLE and tensor.dtype not in REDUCIBLE:
        return tensor.view(torch.uint8)
    return tensor


def _overwritten(
    src: torch.Tensor, moves: Sequence[Move], spans: Sequence[tuple[int, int]]
) -> bool:
    """Whether a destination covers a part of `src` (one that is `src` itself does no harm)."""
    low, high = span(src)
    for (dst, of), (first, last) in zip(moves, spans, strict=True):
        if first < high and low < last and dst.device == src.device:
            if of is src and _same_place(dst, src):
                continue
            return True
    return False


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a strided tensor and the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.dtype.itemsize


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def posted(*lists: Iterable[torch.Tensor]) -> list[Event]:
    """Events for all that the caller's current streams have been given for these tensors."""
    events = []
    for device in _devices(lists):
        event = Event(device)
        event.record(current_stream(device))
        events.append(event)
    return events


def enter(events: Iterable[Event], *lists: Iterable[torch.Tensor]) -> None:
    """Have the caller's current streams wait for the events before they touch the tensors."""
    devices = _devices(lists)
    if devices:
        events = list(events)
        for device in devices:
            stream = current_stream(device)
            for event in events:
                stream.wait_event(event)


adopt = enter


def _devices(lists: Iterable[Iterable[torch.Tensor]]) -> list[torch.device]:
    found = {
        t.device.index: t.device for tensors in lists for t in tensors if on_accelerator(t.device)
    }
    return [found[index] for index in sorted(found)]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, made on the caller's current stream."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch.inference_mode():
        as_bytes(copy).copy_(as_bytes(tensor))
    return copy


def keep(tensor: torch.Tensor) -> None:
    """Tell the allocator that the caller's stream still reads memory of another's stream."""
    if on_accelerator(tensor.device):
        tensor.record_stream(current_stream(tensor.device))
