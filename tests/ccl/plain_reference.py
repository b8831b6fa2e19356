"""One call of a collective as data, and what must come of it by other means than the library's.

What moves must be the same bits; integers are folded as Python's own, without a limit, and cut
to size at the end; floats are reduced in float64 and may differ by the roundings that are due.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "complex64", "complex128", "bool")
MOVED = (*DTYPES, "float8_e4m3fn", "float8_e5m2")
ARITHMETIC = ("sum", "prod", "min", "max", "avg")
BITWISE = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
REDUCING = ("all_reduce", "all_reduce_", "reduce", "reduce_scatter")
MOVING = (
    "all_gather", "all_gather_list", "gather", "broadcast", "broadcast_", "scatter", "all_to_all",
    "ring",
)  # fmt: skip
ROOTED = ("reduce", "gather", "broadcast", "broadcast_", "scatter")
CUT = ("reduce_scatter", "scatter", "all_to_all")  # n divides the first size
WITHOUT_OUT = ("all_reduce_", "broadcast_", "all_gather_list", "ring")
SAME_ON_ALL = ("all_reduce", "all_reduce_", "all_gather", "broadcast", "broadcast_")
FORMS = ("contiguous", "transposed", "strided", "expanded")
OUTS = ("new", "given", "strided", "alias", "overlap")


@dataclass(frozen=True)
class Case:
    """One call on all members of a group; `rest` is the shape, the first size per part."""

    op: str
    dtype: str = "float32"
    rest: tuple[int, ...] = (2, 3)
    form: str = "contiguous"
    out: str = "new"
    reduction: str = "sum"
    group: str = "own"
    root: int = 0
    seed: int = 0

    def shape(self, n: int) -> tuple[int, ...]:
        """Of the input, for n members."""
        if self.op not in CUT:
            return self.rest
        return (n * self.rest[0], *self.rest[1:]) if self.rest else (n,)

    def result_shape(self, n: int) -> tuple[int, ...]:
        shape = self.shape(n)
        if self.op in ("all_gather", "gather"):
            return (n * shape[0], *shape[1:]) if shape else (n,)
        if self.op in ("reduce_scatter", "scatter"):
            return (shape[0] // n, *shape[1:])
        return shape


def members(case: Case, rank: int, workers: int, groups: int) -> list[int]:
    """The ranks of a worker's group; "list": all with a rank as odd or even."""
    if case.group == "list":
        return list(range(rank % 2, workers, 2))
    size = workers if case.group == "world" else workers // groups
    return list(range(rank - rank % size, rank - rank % size + size))


@functools.lru_cache(maxsize=64)
def given(case: Case, rank: int, n: int) -> torch.Tensor:
    """The input of one worker: any integers, floats with some NaN and infinities."""
    dtype, shape = getattr(torch, case.dtype), case.shape(n)
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    if case.dtype == "bool":
        values = torch.randint(0, 2, shape, generator=generator).bool()
    elif case.dtype in INTEGERS:
        bits = torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=generator)
        values = bits.reshape(-1).view(dtype)[: bits.numel()].reshape(shape)
    else:
        reals = torch.randn((*shape, 2), generator=generator, dtype=torch.float64) * 4
        if case.seed % 4 == 0 and not dtype.is_complex:
            reals = torch.where(reals > 9, torch.nan, torch.where(reals < -9, -torch.inf, reals))
        values = (torch.view_as_complex(reals) if dtype.is_complex else reals[..., 0]).to(dtype)
    if case.form == "expanded" and values.numel():
        values = values[:1].expand(shape) if shape else values
    return values


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape and every bit."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def moved(case: Case, inputs: list[torch.Tensor], me: int) -> Any:
    """What one member gets of a collective that only moves; None for nothing."""
    n, root = len(inputs), case.root % len(inputs)
    if case.op in ("all_gather", "gather", "all_gather_list"):
        if case.op == "gather" and me != root:
            return None
        if case.op == "all_gather_list":
            return inputs
        return torch.cat(inputs) if inputs[0].dim() else torch.stack(inputs)
    if case.op in ("broadcast", "broadcast_"):
        return inputs[root]
    if case.op == "scatter":
        return rows(inputs[root], n)[me]
    if case.op == "ring":
        return inputs[me - 1]
    return torch.cat([rows(x, n)[me] for x in inputs])


def rows(tensor: torch.Tensor, n: int) -> list[torch.Tensor]:
    size = len(tensor) // n
    return [tensor[i * size : (i + 1) * size] for i in range(n)]


def check_reduced(case: Case, inputs: list[torch.Tensor], got: torch.Tensor) -> None:
    """Whether a tensor is the reduction of all inputs."""
    dtype = inputs[0].dtype
    assert got.dtype == dtype
    assert got.shape == inputs[0].shape
    if dtype.is_floating_point or dtype.is_complex:
        check_floats(case.reduction, inputs, got)
    else:
        columns = zip(*map(as_integers, inputs), strict=True)
        assert as_integers(got) == [folded(list(c), case.reduction, dtype) for c in columns]


def check_floats(word: str, inputs: list[torch.Tensor], got: torch.Tensor) -> None:
    """One rounding of the result, and one of float32 or wider at each step, are allowed."""
    dtype, n = got.dtype, len(inputs)
    wide = torch.stack([x.to(torch.complex128 if dtype.is_complex else float) for x in inputs])
    if word in ("min", "max"):
        want = (wide.amin(0) if word == "min" else wide.amax(0)).to(dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        return
    sizes = wide.abs()
    want, size = (x.prod(0) if word == "prod" else x.sum(0) for x in (wide, sizes))
    if word == "avg":
        want = want / n
    found, limits = got.to(want.dtype), torch.finfo(dtype)
    step = 2 * n * min(limits.eps, torch.finfo(torch.float32).eps)
    close = (found - want).abs() <= limits.eps * want.abs() + step * size + limits.tiny
    if not dtype.is_complex:
        beyond = want.isfinite() & (want.abs() > limits.max * (1 - limits.eps))
        close = close & want.isfinite() | beyond | (found == want) | found.isnan() & want.isnan()
    assert bool(close.all()), (word, got, want)


def as_integers(tensor: torch.Tensor) -> list[int]:
    return [int(x) for x in tensor.reshape(-1).tolist()]


def folded(numbers: list[int], word: str, dtype: torch.dtype) -> int:
    """A reduction as documented, in integers without a limit."""
    if dtype is torch.bool:
        word = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}.get(word, word)
    if word in BITWISE:
        return functools.reduce(BITWISE[word], numbers)
    if word in ("min", "max"):
        return min(numbers) if word == "min" else max(numbers)
    total = functools.reduce(operator.mul, numbers) if word == "prod" else sum(numbers)
    if word == "avg":
        total = wrapped(total, 64, dtype.is_signed or dtype.itemsize < 8)
        total = abs(total) // len(numbers) * (1 if total >= 0 else -1)
    return wrapped(total, 8 * dtype.itemsize, dtype.is_signed)


def wrapped(number: int, size: int, signed: bool) -> int:
    number %= 1 << size
    return number - (1 << size) if signed and number >> (size - 1) else number


def defined(word: str, dtype: str) -> bool:
    if word in BITWISE:
        return dtype in INTEGERS or dtype == "bool"
    return not (dtype == "bool" and word == "avg") and not (
        dtype in ("complex64", "complex128") and word in ("min", "max")
    )
