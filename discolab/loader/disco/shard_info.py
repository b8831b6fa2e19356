"""Disco's `shard_info`: by which functions each parameter is cut, and how they are called.

It is JSON, of one of two forms, which may be mixed:

    {"name": [["function", [[out sizes], "out dtype"], int, ...], ...]}     a pipeline
    {"name": 1}                                                             the older form: a dim

Each function is called ``f(input, *ints, out)`` and fills `out`; the `out` of one is the input of
the next, and the last one has a part for each worker along its first dimension. Nothing here has
state or meets other workers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.arguments import parse_dtype
from ...runtime.errors import ArgumentError
from ..catalog import Shape

_FORM = '{"name": [["function", [[2, 16, 128], "float16"], 2]]}'
_OLD_DTYPES = {"e4m3_float8": "float8_e4m3fn", "e5m2_float8": "float8_e5m2"}  # TVM's, once


@dataclass(frozen=True, slots=True)
class Step:
    """One function of a pipeline, and what it fills.

    Attributes
    ----------
    name
        Of the function.
    shape, dtype
        Of its output.
    args
        What it gets between its input and its output.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    args: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"shard function {self.name!r}"


Info = Mapping[str, tuple[Step, ...] | int]


def parse(text: Any) -> Info:
    """A shard_info from its JSON, or from what its JSON would give; "" and None mean none.

    Raises
    ------
    ArgumentError
        With the parameter whose value is not of either form.
    """
    given = _decode(text) if isinstance(text, str | bytes) else text or {}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"shard_info is {_short(given)}; it has the form {_FORM}")
    return {str(name): _parse_one(str(name), value) for name, value in given.items()}


def check_workers(name: str, steps: Sequence[Step], workers: int) -> None:
    """Whether the last function of a parameter makes one part for each worker.

    Raises
    ------
    ArgumentError
    """
    last = steps[-1]
    if not last.shape or last.shape[0] != workers:
        raise ArgumentError(
            f"shard_info: {name!r}: {last} makes {list(last.shape)}, and the first size must be "
            f"the number of workers, {workers}: one part for each"
        )


def old_form(name: str, shape: Shape, dtype: torch.dtype, dim: int, workers: int) -> Step:
    """What a dimension in the older form asks for: equal parts along it.

    Raises
    ------
    ArgumentError
        If the parameter has no such dimension, or it can't be split so.
    """
    if not 0 <= dim < len(shape):
        raise ArgumentError(
            f"shard_info: {name!r} is to be split along dimension {dim}, and its shape is "
            f"{list(shape)}"
        )
    if shape[dim] % workers:
        raise ArgumentError(
            f"shard_info: {name!r}: dimension {dim} of {list(shape)} can't be split into {workers} "
            "equal parts; a function or a plan (sess.load) can cut it unevenly"
        )
    local = [size // workers if i == dim else size for i, size in enumerate(shape)]
    return Step(f"slices along dimension {dim}", (workers, *local), dtype, (workers,))


def slices(source: torch.Tensor, dim: int, workers: int, out: torch.Tensor, func: Any) -> None:
    """Fill `out`, ``[workers, ...]``, with equal parts of `source` along `dim`.

    As in older Disco a function `func` does it, which sees the source with three dimensions and
    `out` with four; without one it is done here.
    """
    before, size = math.prod(source.shape[:dim]), source.shape[dim]
    after = math.prod(source.shape[dim + 1 :])
    parts = out.view(workers, before, size // workers, after)
    if func is None:
        parts.copy_(source.view(before, workers, size // workers, after).movedim(1, 0))
    else:
        func(source.view(before, size, after), workers, parts)


def apply(name: str, step: Step, source: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
    """What a function makes of `source`: a new tensor of the step's shape and dtype.

    Parameters
    ----------
    name
        Of the parameter, for messages.
    call
        Called with `source`, the step's arguments and the tensor that it is to fill.

    Raises
    ------
    ArgumentError
        If it does not fill what it was given.
    Exception
        Whatever it raises, with a note that says for which parameter it was called.
    """
    out = torch.empty(step.shape, dtype=step.dtype, device=source.device)
    before = _kind(source)
    memory = _memory(out)
    try:
        returned = call(source, *step.args, out)
    except Exception as exc:
        given = ", ".join([before, *map(str, step.args), _kind(out)])
        exc.add_note(f"in {step} of the parameter {name!r}, called with ({given})")
        raise
    if out.shape != step.shape or out.dtype != step.dtype or _memory(out) != memory:
        raise ArgumentError(
            f"shard_info: {name!r}: {step} has made its output {_kind(out)} of its own; it must "
            f"write into the {_kind(step)} that it is given last: out.copy_(…)"
        )
    mistaken = isinstance(returned, torch.Tensor) and returned.shape == step.shape
    if mistaken and out.numel() and _memory(returned) != memory:
        raise ArgumentError(
            f"shard_info: {name!r}: {step} returns a tensor, {_kind(returned)}; what counts is "
            "what it writes into its last argument: out.copy_(…)"
        )
    return out


def _decode(text: str | bytes) -> Any:
    if not text.strip():
        return {}
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        if isinstance(exc, ArgumentError):
            raise
        raise ArgumentError(
            f"shard_info is not JSON ({exc}): {_short(text)}; it has the form {_FORM}"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"shard_info has {twice!r} twice")
    return found


def _parse_one(name: str, value: Any) -> tuple[Step, ...] | int:
    if _is_int(value):
        return int(value)
    if not isinstance(value, list | tuple):
        raise ArgumentError(
            f"shard_info: {name!r} has {_short(value)}; it has a dimension or the form {_FORM}"
        )
    return tuple(_parse_step(name, step) for step in value)


def _parse_step(name: str, step: Any) -> Step:
    match step:
        case [str(function), [list() | tuple() as shape, str(dtype)], *args]:
            pass
        case _:
            raise ArgumentError(
                f"shard_info: {name!r}: a function is {_short(step)}; it has the form {_FORM}"
            )
    if not all(map(_is_int, [*shape, *args])) or any(size < 0 for size in shape):
        raise ArgumentError(
            f"shard_info: {name!r}: sizes and arguments of {function!r} are integers, and no size "
            f"is negative: {_short(step)}"
        )
    try:
        found = parse_dtype(_OLD_DTYPES.get(dtype, dtype))
    except ArgumentError as exc:
        raise ArgumentError(f"shard_info: {name!r}: {function!r}: {exc}") from None
    return Step(function, tuple(shape), found, tuple(args))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kind(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
