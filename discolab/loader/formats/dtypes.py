"""Names of dtypes in the formats that write them out, and torch's dtypes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...runtime.arguments import parse_dtype
from ...runtime.errors import ArgumentError
from ..errors import CheckpointError
from .checks import short

TENSOR_CACHE: Final[Mapping[str, torch.dtype]] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    # as older TVMs wrote them
    "e4m3_float8": torch.float8_e4m3fn,
    "e5m2_float8": torch.float8_e5m2,
    "uint1": torch.bool,
}

SAFETENSORS: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}


def _names(table: Mapping[str, torch.dtype]) -> dict[torch.dtype, str]:
    found: dict[torch.dtype, str] = {}
    for name, dtype in table.items():
        found.setdefault(dtype, name)
    return found


# What writers call each dtype: the first of its names.
TENSOR_CACHE_NAMES: Final[Mapping[torch.dtype, str]] = _names(TENSOR_CACHE)
SAFETENSORS_NAMES: Final[Mapping[torch.dtype, str]] = _names(SAFETENSORS)

# What a tensor of torch itself may be to be read as plain bytes: no quantised or packed ones.
PLAIN: Final = frozenset(
    [*TENSOR_CACHE.values(), *SAFETENSORS.values(), torch.complex32, torch.complex128]
)


def dtype_of(
    names: Mapping[str, torch.dtype], value: Any, file: Path, parameter: str
) -> torch.dtype:
    """The dtype that a format calls so.

    Raises
    ------
    CheckpointError
        If it has no such name; the message lists the known ones.
    """
    found = names.get(value) if isinstance(value, str) else None
    if found is None:
        known = ", ".join(names)
        raise CheckpointError(
            file, f"dtype {short(value)} is not known; expected one of {known}", parameter
        )
    return found


def cast_dtype(dtype: Any) -> torch.dtype | None:
    """What floating-point parameters are to be cast to, from a dtype or its name; None stays None.

    Raises
    ------
    ArgumentError
        If it is none, or not a floating-point one.
    """
    found = None if dtype is None else parse_dtype(dtype)
    if found is not None and not found.is_floating_point:
        raise ArgumentError(
            f"dtype= is what floating-point parameters are cast to, such as bfloat16; got {found}"
        )
    return found
