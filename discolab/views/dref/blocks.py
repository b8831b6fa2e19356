"""Tells of a tensor block by block, on the worker that holds it: for `replicas`.

Worker functions: no collective, no copy of the whole; what can't be read is a string that says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ...runtime.worker import current_worker
from ..facts.guard import FAILURES, error_text, safe_repr
from ..facts.storage import why_no_data
from ..facts.tensors import digest_of, is_dtensor

Spans: TypeAlias = list[tuple[int, int]]  # (first element, one past the last)

BLOCKS = 256  # that a tensor is cut in at first
_LARGEST_COPY = 256 * 2**20  # bytes of a tensor that is not contiguous


def cut_in(first: int, last: int, count: int) -> Spans:
    """Cut a span in at most `count` equal ones, the last one maybe shorter.

    Examples
    --------
    >>> cut_in(0, 10, 4)
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    step = max(-(-(last - first) // count), 1)
    return [(start, min(start + step, last)) for start in range(first, last, step)]


def describe_blocks(
    value: Any, ranks: Sequence[int], spans: Spans | None, path: str | None = None
) -> Any:
    """Digest and range of each block (a worker function); None on workers not in `ranks`.

    Returns
    -------
    tuple
        Shape, dtype, and ``[digest, lowest, highest, sum]`` of each block; with `spans` None of
        about 256 equal ones. A string says why there is none.
    """
    if current_worker().worker_id not in ranks:
        return None
    try:
        value = _at(value, path)
        flat = _flat(value)
        if isinstance(flat, str):
            return flat
        local = value._local_tensor if is_dtensor(value) else value
        spans = spans or cut_in(0, flat.numel(), BLOCKS)
        blocks = [_block(flat[first:last]) for first, last in spans]
        return list(local.shape), str(local.dtype).removeprefix("torch."), blocks
    except FAILURES as error:  # it must not count as a failure of the user's program
        return error_text(error)


def values_of(value: Any, ranks: Sequence[int], spans: Spans, path: str | None = None) -> Any:
    """The values of some blocks in a row (a worker function); None on workers not in `ranks`."""
    if current_worker().worker_id not in ranks:
        return None
    try:
        flat = _flat(_at(value, path))
        if isinstance(flat, str):
            return flat
        found = torch.cat([flat[first:last] for first, last in spans]).cpu()
        return found.float() if found.is_floating_point() and found.itemsize < 4 else found
    except FAILURES as error:
        return error_text(error)


for _function in (describe_blocks, values_of):  # what status calls it
    _function.disco_command = "drawing a value"  # type: ignore[attr-defined]


def _at(value: Any, path: str | None) -> Any:
    """The parameter or item of that name."""
    if path is None:
        return value
    if isinstance(value, torch.nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
    elif isinstance(value, dict):
        named = tuple((safe_repr(key, 60)[0], item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        keys = getattr(value, "_fields", itertools.count())
        named = tuple(zip(map(str, keys), value, strict=False))
    else:
        return getattr(value, path, None)
    return dict(named).get(path)


def _flat(value: Any) -> torch.Tensor | str:
    """The elements in row-major order, copied only if they do not lie so; or why there are none."""
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    local: torch.Tensor = value._local_tensor if is_dtensor(value) else value  # type: ignore[attr-defined]
    local = local.detach()
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        return "of a layout that is not read in blocks"
    if why := why_no_data(local):
        return why
    if not local.is_contiguous() and local.numel() * local.itemsize > _LARGEST_COPY:
        return "too large to be put in order"
    return local.resolve_conj().resolve_neg().reshape(-1)


def _block(block: torch.Tensor) -> list[Any]:
    if not block.numel() or block.is_complex() or block.itemsize < 1:
        return [digest_of(block), 0.0, 0.0, 0.0]
    try:
        wide = block.to(torch.float64) if block.numel() <= 2**16 else block.float()
        low, high = torch.aminmax(wide)
        return [digest_of(block), float(low), float(high), float(wide.sum())]
    except FAILURES:  # a dtype without arithmetic
        return [digest_of(block), 0.0, 0.0, 0.0]
