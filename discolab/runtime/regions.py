"""Which tensors of one message look at the same memory, and copies of them that do so again.

What is sent to a worker, as a thread or in another process, is a copy. Tensors that overlap (a
weight and its transpose, slices of one buffer) are copied with what they cover together, once, so
that they overlap in the copy too; nothing else of their storage goes along. A tensor alone keeps
its strides, unless it skips most of what it spans: then it is copied without the gaps, in the same
order, as `torch.clone` does. Stateless.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

_CPU = (1, 0)  # DLPack's number of the device
_to_dlpack_versioned: Callable[[torch.Tensor], Any] = torch._C._to_dlpack_versioned
ALIGN = 16  # bytes; the largest element
_SMALL_SPAN = 1 << 16  # bytes that a tensor may span, gaps or not
_MOST_GAPS = 2  # times the bytes of its elements that a larger one may span


class Region:
    """A stretch of a storage, in bytes, that tensors cover.

    Attributes
    ----------
    first
        One of the tensors.
    alone
        If it covers the region alone: the tensor to copy, `first` or what it is without its gaps.
    """

    __slots__ = ("alone", "base", "first", "high", "low", "number")

    def __init__(self, low: int, high: int, first: torch.Tensor) -> None:
        self.low = low // ALIGN * ALIGN
        self.high = high
        self.first = first
        self.alone: torch.Tensor | None = None
        self.number: int | None = None  # of its frame, once it has one
        self.base: torch.Tensor | None = None  # its copy, once there is one

    def memory(self) -> torch.Tensor:
        """The memory itself, as a flat tensor of bytes."""
        owner = self.first if self.alone is None else self.alone
        flat = torch.empty(0, dtype=torch.uint8, device=owner.device)
        storage = owner.detach().untyped_storage()
        return flat.set_(storage, self.low, (self.high - self.low,), (1,))

    def place_of(self, tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Where a tensor begins in the region, in bytes, and its strides."""
        shown = tensor if self.alone is None else self.alone
        return int(shown.storage_offset()) * shown.itemsize - self.low, shown.stride()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its shape, its strides and its memory, and nothing else."""
    return (
        (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_nested
    )


def find_regions(tensors: Sequence[torch.Tensor]) -> dict[int, Region]:
    """The regions of these different tensors, by `id`; none for what is alone and contiguous."""
    by_storage: defaultdict[int, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    found: dict[int, Region] = {}
    plain = [tensor for tensor in tensors if is_plain(tensor) and tensor.numel()]
    if all(map(in_order, plain)) and _are_apart(plain):
        return found  # as nearly always, and five times as fast as what follows
    for tensor in plain:
        low, high = _extent(tensor)
        by_storage[tensor.untyped_storage()._cdata].append((low, high, tensor))
    for extents in by_storage.values():
        run: list[torch.Tensor] = []
        region: Region | None = None
        for low, high, tensor in sorted(extents, key=lambda extent: extent[:2]):
            if region is None or low >= region.high:
                _enter(run, region, found)
                run, region = [], Region(low, high, tensor)
            run.append(tensor)
            region.high = max(region.high, high)
        _enter(run, region, found)
    return found


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether none of these contiguous tensors overlaps another."""
    if len(tensors) < 2:
        return True
    extents = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    return all(one + size <= other for (one, size), (other, _) in pairwise(extents))


def _enter(run: list[torch.Tensor], region: Region | None, found: dict[int, Region]) -> None:
    if len(run) == 1:
        (tensor,) = run
        if in_order(tensor):
            return
        spans = _extent(tensor)[1] - _extent(tensor)[0]
        if spans > max(_SMALL_SPAN, _MOST_GAPS * tensor.numel() * tensor.itemsize):
            tensor = bare(tensor).clone()
        region = Region(*_extent(tensor), tensor)
        region.alone = tensor
        found[id(run[0])] = region
        return
    for tensor in run:
        assert region is not None
        found[id(tensor)] = region


def in_order(tensor: torch.Tensor) -> bool:
    """Whether its strides are those that follow from its shape."""
    if not tensor.is_contiguous():
        return False
    if 1 not in tensor.shape:  # of one element a stride can be anything
        return True
    due = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != due:
            return False
        due *= size or 1
    return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + span(tensor.shape, tensor.stride()) * tensor.itemsize


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements it is from the first to the last one, both counted."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, as it lies in memory: not conjugated, not negated."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def array_of(tensor: torch.Tensor) -> Any:
    """The elements of a tensor on the CPU as an array of numpy, where they are.

    As they lie there: of a tensor that is neither conjugated nor negated.

    After ``tensor.numpy()`` torch refuses for good to resize the storage, as FSDP2 does
    with parameters; so whoever looks at a user's tensor takes this.
    """
    return np.from_dlpack(_Exported(tensor.detach()))


class _Exported:
    """A tensor as numpy takes it; torch's own ``__dlpack__`` checks for 4 us what it may be."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, max_version: object = None, **_: Any) -> Any:
        if max_version is None:  # numpy before 2.1
            return to_dlpack(self._tensor)
        return _to_dlpack_versioned(self._tensor)  # numpy may write there only with a version

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


def view_in(
    memory: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """A tensor that lies `offset` bytes from the beginning of flat, aligned bytes."""
    size = dtype.itemsize
    return (
        memory[: len(memory) // size * size].view(dtype).as_strided(shape, strides, offset // size)
    )


def dressed(
    tensor: torch.Tensor, conj: bool, neg: bool, parameter: bool, needs_grad: bool
) -> torch.Tensor:
    """A bare tensor with what another one has besides its memory."""
    if neg:
        tensor = torch._neg_view(tensor)
    if conj:
        tensor = tensor.conj()
    if parameter:
        return torch.nn.Parameter(tensor, needs_grad)
    return tensor.requires_grad_() if needs_grad else tensor


def copies_of(tensors: Iterable[torch.Tensor]) -> tuple[bool, dict[int, torch.Tensor]]:
    """Whether these are simple, and copies of them, by `id`, that overlap where these do.

    Simple: all are plain, in order, apart from each other, and neither conjugated nor negated.
    Copies keep dtype, device, strides and `requires_grad`, and leave their graphs.
    """
    different = {id(tensor): tensor for tensor in tensors}
    regions = find_regions(list(different.values()))
    simple = not regions
    made: dict[int, torch.Tensor] = {}
    for key, tensor in different.items():
        region = regions.get(key)
        conj, neg = tensor.is_conj(), tensor.is_neg()
        if region is not None:
            if region.base is None:
                region.base = region.memory().clone()
            offset, strides = region.place_of(tensor)
            fresh = view_in(region.base, tensor.dtype, tensor.shape, strides, offset)
            made[key] = _as_the_other(fresh, tensor, conj, neg)
        elif not is_plain(tensor):
            made[key] = _copy_of_its_kind(tensor)
            simple = False
        elif conj or neg:
            made[key] = _as_the_other(bare(tensor).clone(), tensor, conj, neg)
            simple = False
        else:
            made[key] = copy_simple(tensor)
    return simple, made


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """As `copies_of`, of one alone."""
    if is_plain(tensor) and in_order(tensor) and not tensor.is_conj() and not tensor.is_neg():
        return copy_simple(tensor)
    return copies_of([tensor])[1][id(tensor)]


def copy_simple(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a simple tensor, see `copies_of`."""
    fresh = tensor.detach().clone()
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(fresh, tensor.requires_grad)
    return fresh.requires_grad_() if tensor.requires_grad else fresh


def _as_the_other(fresh: torch.Tensor, tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    parameter, needs_grad = type(tensor) is torch.nn.Parameter, tensor.requires_grad
    if conj or neg or parameter or needs_grad:
        return dressed(fresh, conj, neg, parameter, needs_grad)
    return fresh


def _copy_of_its_kind(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return copy.deepcopy(tensor)
    if tensor.is_quantized:
        return copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)
    if tensor.is_meta and type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        fresh = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    else:
        fresh = tensor.detach().clone()
        own = getattr(tensor, "__dict__", None)
        if own and type(tensor) is not torch.Tensor and not fresh.__dict__:
            fresh.__dict__.update(copy.deepcopy(own))
    return fresh.requires_grad_() if tensor.requires_grad else fresh
