"""What an operation of torch was given and has made, and whether that is finite; see nan_hunt.py.

Pure but for the reading of tensors. Runs within a `TorchDispatchMode`, below autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..views.facts.guard import FAILURES

_COPIED = 2**20  # bytes of a tensor that is written in place, of which a copy is kept
_NO_MEMORY = ("empty", "new_empty", "resize", "_efficientzerotensor", "set_")
_OVERWRITING = (
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "_foreach_zero_", "_foreach_copy_",
)  # fmt: skip
_FIRST_ONLY = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_LOOKS = ("abs",)  # with which `isfinite` looks for a NaN, and which hands it on
_BETWEEN = ("_c10d_functional", "c10d", "_dtensor", "_c10d_functional_autograd")


class Kind(NamedTuple):
    """What is known of an operation.

    Attributes
    ----------
    skip
        There is nothing to check.
    writes, over
        Positions and names of arguments that it writes to, and those whose old content it ignores.
    first
        Only its first output is a result.
    between
        It brings values from other workers.
    looks
        To have a NaN handed on by it is no use of that yet.
    """

    skip: bool
    writes: frozenset[int | str]
    over: frozenset[int | str]
    first: bool
    between: bool
    looks: bool


# -- operations ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def kind_of(func: Any) -> Kind:
    """What an operation does, by its schema."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    between = func.namespace in _BETWEEN
    writes: set[int | str] = set()
    over: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            where: int | str = argument.name if argument.kwarg_only else place
            writes.add(where)
            if argument.is_out or name in _OVERWRITING or between:
                over.add(where)
    returns = [one for one in schema.returns if "Tensor" in str(one.type)]
    views = bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )
    skip = (
        name.startswith(_NO_MEMORY)
        or (views and not writes)
        or (not returns and not writes)
        or (between and name != "wait_tensor")
    )
    first = name.startswith(_FIRST_ONLY)
    return Kind(skip, frozenset(writes), frozenset(over), first, between, name in _LOOKS)


def unwraps(kind: type) -> bool:
    """Whether a class of tensors runs operations on tensors that it holds, as DTensor does.

    Those with which torch traces and infers shapes hold none.
    """
    own = getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
    return own and not kind.__module__.startswith("torch._subclasses")


def outputs(
    kind: Kind, out: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that an operation has made or written."""
    if isinstance(out, torch.Tensor):
        yield out
        return
    if isinstance(out, list | tuple):
        for one in out[:1] if kind.first else out:
            if isinstance(one, torch.Tensor):
                yield one
            elif isinstance(one, list | tuple):
                yield from (each for each in one if isinstance(each, torch.Tensor))
    for where in kind.writes:
        for leaf in tree_leaves(_at(where, args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _at(where: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(where, str):
        return kwargs.get(where)
    return args[where] if where < len(args) else None


def copies(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """What an operation is about to change, as it is now; of large tensors if they are finite."""
    found: dict[int | str, Any] = {}
    for where in kind.writes - kind.over:
        value = _at(where, args, kwargs)
        found[where] = (
            [_copy(one) for one in value] if isinstance(value, list | tuple) else _copy(value)
        )
    return found


class _Was(NamedTuple):
    """In place of a copy: whether there was a NaN, and whether there was an infinity."""

    nan: bool
    inf: bool


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not is_checked(value):
        return value
    if value.nbytes <= _COPIED:
        return value.clone()
    return _Was(has_nan(value), _has_inf(value)) if is_odd(value) else _Was(False, False)


class Inputs(NamedTuple):
    """What an operation was given; what it has overwritten, as it was before.

    Attributes
    ----------
    tensors
        By name.
    numbers
        Python's own, by name.
    nan, inf
        Whether there is a NaN, or an infinity, in a tensor.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]
    nan: bool
    inf: bool


def inputs_of(
    func: Any,
    kind: Kind,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    before: dict[int | str, Any],
) -> Inputs:
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float] = {}
    nan = inf = False
    names = [argument.name for argument in func._schema.arguments]
    given: list[tuple[str, int | str, Any]] = [
        (name, place, value) for place, (name, value) in enumerate(zip(names, args, strict=False))
    ]
    given += [(name, name, value) for name, value in kwargs.items()]
    for name, where, value in given:
        if where in kind.over:
            continue
        value = before.get(where, value)
        several = isinstance(value, list | tuple) and type(value) is not _Was
        for n, leaf in enumerate(value if several else [value]):
            label = f"{name}[{n}]" if several else name
            if isinstance(leaf, torch.Tensor):
                tensors[label] = leaf
                if is_odd(leaf):
                    nan, inf = nan or has_nan(leaf), inf or _has_inf(leaf)
            elif type(leaf) is _Was:
                nan, inf = nan or leaf.nan, inf or leaf.inf
            elif type(leaf) in (int, float):
                numbers[label] = leaf
    return Inputs(tensors, numbers, nan, inf)


# -- checks --------------------------------------------------------------------------------------


def first_odd(outputs: Iterator[torch.Tensor]) -> torch.Tensor | None:
    for out in outputs:
        if is_odd(out):
            return out
    return None


def is_checked(tensor: torch.Tensor) -> bool:
    """Whether it has numbers that may not be finite, and that can be read."""
    return (
        (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.layout is torch.strided
        and tensor.device.type not in ("meta", "xla")
        and not _is_fake(tensor)
        and tensor.numel() > 0
    )


def _is_fake(tensor: torch.Tensor) -> bool:
    return getattr(
        type(tensor), "__torch_dispatch__", None
    ) is not torch.Tensor.__torch_dispatch__ or (torch._is_functional_tensor(tensor))


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether an element is not finite.

    A sum is several times faster than to look at each, and cannot be finite if an element is not;
    where it is not, it may only have become too large.
    """
    try:
        if not is_checked(tensor):
            return False
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype in (torch.float32, torch.float64):
            total = tensor.sum().item()
        elif tensor.dtype in (torch.float16, torch.bfloat16):
            total = tensor.sum(dtype=torch.float32).item()
        else:  # float8: torch has no sum of it
            tensor = tensor.to(torch.float32)
            total = tensor.sum().item()
        return not math.isfinite(total) and not bool(tensor.isfinite().all())
    except FAILURES:  # of a kind of tensor that can't be read
        return False


def has_nan(tensor: torch.Tensor) -> bool:
    try:
        return is_odd(tensor) and bool(tensor.isnan().any())
    except FAILURES:
        return False


def _has_inf(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.isinf().any())
    except FAILURES:
        return False


def is_meant(odd: torch.Tensor, inputs: Inputs) -> bool:
    """Whether what is not finite was asked for, or comes from an infinity that was there."""
    numbers = inputs.numbers.values()
    if any(map(math.isnan, numbers)):
        return True
    return (inputs.inf or any(map(math.isinf, numbers))) and not has_nan(odd)
