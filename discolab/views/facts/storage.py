"""Whether a tensor has data to read: to read one whose storage was freed ends the process.

FSDP frees the storage of what it has gathered, and leaves the tensor with its shape.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from .guard import FAILURES

_NO_DATA = {
    "FakeTensor": "fake tensor: no data",
    "FunctionalTensor": "tensor under tracing: data not read",
}
_LAZY = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("offsets", "values"),
}


def why_no_data(tensor: torch.Tensor) -> str:
    """Say why a tensor can't be read, of a DTensor what lies here; empty if it can.

    Examples
    --------
    >>> x = torch.ones(3)
    >>> why_no_data(x), why_no_data(x.to("meta"))
    ('', 'meta tensor: no data')
    >>> _ = x.untyped_storage().resize_(0)
    >>> why_no_data(x)
    'storage freed: no data'
    """
    tensor = getattr(tensor, "_local_tensor", tensor)
    if is_lazy(tensor):
        return "lazy: no data yet"
    name = type(tensor).__name__
    if name in _NO_DATA:
        return _NO_DATA[name]
    if tensor.device.type == "meta":
        return "meta tensor: no data"
    with torch._C.DisableTorchFunctionSubclass():
        parts = [cast(Any, getattr(tensor, name))() for name in _PARTS.get(tensor.layout, ())]
        return "storage freed: no data" if any(map(_freed, parts or [tensor])) else ""


def is_lazy(tensor: object) -> bool:
    """Tell a parameter that gets its shape with the first input, as those of LazyLinear."""
    return isinstance(tensor, _LAZY)


def _freed(part: torch.Tensor) -> bool:
    """Whether the storage is shorter than shape and strides need it to be."""
    try:
        stored = part.untyped_storage().nbytes()
        if part.numel() and part.layout is torch.strided and not part.is_nested:
            steps = zip(part.shape, part.stride(), strict=True)
            end = part.storage_offset() + 1 + sum((size - 1) * step for size, step in steps)
            return bool(stored < end * part.element_size())
        return bool(stored < part.numel() * part.element_size())
    except FAILURES:  # a subclass without storage answers for its own data
        return False
