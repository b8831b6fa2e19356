"""Tensors as memory: their bytes, copies between those of several workers, and events. No state.

On accelerators: a worker records events on its current streams when it joins (`record`); the
thread that executes has its own streams wait for them (`wait_for`) and records events after the
work; each member has its current streams wait for those. No thread waits for a device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from ..runtime.accelerators import current_stream, on_accelerator
from ..runtime.regions import array_of
from .reductions import MOVABLE, REDUCIBLE

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
Event = torch.Event
Move = tuple[Tensor, Tensor]  # destination, source

_CPU = torch.device("cpu")

# -- where tensors lie -----------------------------------------------------------------------------


def rows(tensor: Tensor, parts: int) -> list[Tensor]:
    """Cut `tensor` in equal parts along its first dimension; the size must divide."""
    size = tensor.shape[0] // parts
    return [tensor.narrow(0, i * size, size) for i in range(parts)]


def span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a strided tensor and the one after its last."""
    size, start = tensor.nbytes, tensor.data_ptr()
    if not size:
        return 0, 0
    if not tensor.is_contiguous():
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (reach + 1) * tensor.dtype.itemsize
    return start, start + size


def is_plain(tensor: Tensor) -> bool:
    """Whether it is memory as it stands: contiguous, no lazy conjugate or negative."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _same_place(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements in the same order."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


# -- copies ----------------------------------------------------------------------------------------


def movable(tensor: Tensor) -> Tensor:
    """Dtypes that torch has no arithmetic for are seen as bytes; others as they are."""
    if tensor.dtype in MOVABLE and tensor.dtype not in REDUCIBLE:
        return tensor.view(torch.uint8)
    return tensor


def copy(dst: Tensor, src: Tensor) -> None:
    """Copy between tensors of one shape and dtype."""
    movable(dst).copy_(movable(src))


def copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy, made on the caller's current stream."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch.inference_mode():
        copy(made, tensor)
    return made


def move_all(moves: Sequence[Move]) -> None:
    """Copy each source to its destination as if all were read before any is written."""
    srcs = {id(src): src for _, src in moves}
    places = {key: place for place, key in enumerate(srcs)}
    own = {(places[id(src)], to) for to, (_, src) in enumerate(moves)}
    safe = unharmed(list(srcs.values()), [dst for dst, _ in moves], own)
    for dst, src in moves:
        read = safe[places[id(src)]]
        if not _same_place(dst, read):
            copy(dst, read)


def unharmed(srcs: Tensors, outs: Tensors, own: Collection[tuple[int, int]]) -> list[Tensor]:
    """The sources; copies of those that an output would overwrite while they are read.

    `own` are pairs of a source and an output, by their places, that may be the same elements.
    """
    spans = [span(out) for out in outs]
    safe = list(srcs)
    for place, src in enumerate(srcs):
        low, high = span(src)
        for to, (first, last) in enumerate(spans):
            if (
                first < high
                and low < last
                and outs[to].device == src.device
                and not ((place, to) in own and _same_place(outs[to], src))
            ):
                safe[place] = src.clone()
                break
    return safe


# -- bytes -----------------------------------------------------------------------------------------


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 of one dimension; no copy."""
    if tensor.numel() == 1:  # it may have any stride and count as contiguous
        tensor = tensor.as_strided((1,), (1,))
    return tensor.reshape(-1).view(torch.uint8)


def packed(tensors: Tensors, device: torch.device) -> Tensor:
    """The tensors as uint8 of one dimension; new memory, on `device` where there are none."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([_bytes_of(tensor) for tensor in tensors])


def unpack(whole: Tensor, outs: Tensors) -> None:
    """Write bytes to tensors like those that were packed."""
    for out, part in zip(outs, whole.split([out.nbytes for out in outs]), strict=True):
        copy(out, typed(part, out))


def joined(tensors: Tensors) -> Tensor:
    """Tensors as contiguous bytes on their device; a single contiguous one as it lies."""
    if len(tensors) == 1:
        (only,) = tensors
        if only.numel() > 1 and only.is_contiguous():
            return only.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    return packed(tensors, _CPU)


def data_of(tensors: Tensors) -> bytes:
    """The bytes of tensors, one after the other, on whatever device."""
    data: bytes = array_of(joined(tensors).cpu()).tobytes()
    return data


def typed(part: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of the dtype and shape of `like`; a copy if they lie badly for it."""
    if part.storage_offset() % like.dtype.itemsize:
        part = part.clone()
    return part.view(like.dtype).view(like.shape)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor as uint8 of one dimension; new memory, on its device."""
    if tensor.numel() == 0:  # may be "contiguous" with strides that have no view
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    plain = movable(tensor.resolve_conj().resolve_neg())
    flat = torch.empty(plain.numel(), dtype=plain.dtype, device=plain.device)
    flat.view(plain.shape).copy_(plain)  # one element may have any stride and count as contiguous
    return flat.view(torch.uint8)


# -- events of accelerators ------------------------------------------------------------------------


def record(*lists: Iterable[Tensor]) -> list[Event]:
    """Events for all that the caller's current streams have been given for these tensors."""
    events = []
    for device in _devices(lists):
        event = Event(device)
        event.record(current_stream(device))
        events.append(event)
    return events


def wait_for(events: Iterable[Event], *lists: Iterable[Tensor]) -> None:
    """Have the caller's current streams wait for the events before they touch the tensors."""
    devices = _devices(lists)
    if devices:
        events = list(events)
        for device in devices:
            stream = current_stream(device)
            for event in events:
                stream.wait_event(event)


def keep(tensor: Tensor) -> None:
    """Tell the allocator that the caller's stream still reads memory of another's stream."""
    if on_accelerator(tensor.device):
        tensor.record_stream(current_stream(tensor.device))


def _devices(lists: Iterable[Iterable[Tensor]]) -> list[torch.device]:
    found = {
        t.device.index: t.device for tensors in lists for t in tensors if on_accelerator(t.device)
    }
    return [found[index] for index in sorted(found)]
