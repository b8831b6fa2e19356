"""Values of TVM as torch's and back. Tensors share their memory, nothing is copied. No state.

Only a program that has imported `tvm_ffi` can have such values: nothing imports it here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .errors import ArgumentError

_PACKAGES = ("tvm", "tvm_ffi")
_DISABLED: Any = torch.Tensor.__torch_dispatch__  # of a class whose memory is its elements


def is_of_tvm(kind: type) -> bool:
    """Whether a class is one of TVM's."""
    return "tvm_ffi" in sys.modules and str(kind.__module__).partition(".")[0] in _PACKAGES


def from_tvm(value: Any) -> Any:
    """A tensor, shape, device, string or container of TVM as what torch and Python have for it."""
    if not is_of_tvm(type(value)):
        return value
    ffi: Any = sys.modules["tvm_ffi"]
    if isinstance(value, ffi.Tensor):
        return from_dlpack(value)
    if isinstance(value, ffi.Shape):
        return torch.Size(value)
    if isinstance(value, ffi.Device):
        kind = "cuda" if value.type == "rocm" else value.type  # as torch calls it
        return torch.device(kind) if kind == "cpu" else torch.device(kind, value.index)
    if isinstance(value, str):
        return "".join([value])
    if isinstance(value, bytes):
        return b"".join([value])
    if isinstance(value, ffi.Array | ffi.List):
        return tuple(from_tvm(item) for item in value)
    if isinstance(value, ffi.Map | ffi.Dict):
        return {from_tvm(key): from_tvm(item) for key, item in value.items()}
    return value


def to_tvm(value: Any) -> Any:
    """An argument as TVM's functions take it.

    Raises
    ------
    ArgumentError
        If TVM would get other numbers than the tensor has, or lose its gradient.
    """
    if isinstance(value, torch.Tensor):
        return _checked(value)
    if isinstance(value, torch.Size | torch.device):
        ffi: Any = sys.modules["tvm_ffi"]
        if isinstance(value, torch.Size):
            return ffi.Shape(value)
        name = str(value)
        return ffi.device(name.replace("cuda", "rocm") if torch.version.hip else name)
    if type(value) in (list, tuple):
        return [to_tvm(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_tvm(item) for key, item in value.items()}
    return value


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not _DISABLED:
        raise ArgumentError(
            f"a function of TVM takes plain tensors, got a {kind.__name__}: give the tensor in it "
            "(of a DTensor to_local())"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentError(
            "a function of TVM reads memory, and this tensor's elements are not what is there: "
            "give it x.resolve_conj().resolve_neg()"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "a function of TVM has no gradient, and this tensor requires one: give it x.detach(), "
            "or call it within torch.no_grad()"
        )
    return tensor
