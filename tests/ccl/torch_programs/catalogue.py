"""The catalogue: what a program is, and how one is run.

A program is a function that four ranks run, in the manner of torch's own tests. It returns, on each
rank, tensors, numbers and strings, which are then compared with what the same program returns under
Gloo in four processes.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

N = 4  # ranks


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes
    ----------
    rounding
        Sums of arbitrary floats depend on their order, which is Gloo's own there: what comes out is
        compared to seven digits and not bit by bit.
    """

    function: Callable[..., Any]
    choices: dict[str, Any] = field(default_factory=dict)
    rounding: bool = False


PROGRAMS: dict[str, Program] = {}


class Failed(NamedTuple):
    """What stands for the result of a program that did not end well."""

    text: str


def program(
    *, rounding: bool = False, **choices: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function, once for each combination of the choices."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        area = function.__module__.rpartition(".")[2]
        for values in itertools.product(*choices.values()):
            given = dict(zip(choices, values, strict=True))
            words = ",".join(map(_word, values))
            name = f"{area}/{function.__name__}" + (f"[{words}]" if words else "")
            assert name not in PROGRAMS, name
            PROGRAMS[name] = Program(function, given, rounding)
        return function

    return enter


def _word(value: Any) -> str:
    name = getattr(value, "__name__", None) or str(value)
    return name.removeprefix("torch.").replace(" ", "")


def run(name: str) -> Any:
    """Run one program on this rank; what it returns, as plain data."""
    from . import everything  # here, as it takes long and only these tests need it

    assert everything.AREAS
    found = PROGRAMS[name]
    torch.manual_seed(17)
    return plain(found.function(**found.choices))


def plain(value: Any) -> Any:
    """A result without DTensors, parameters and memory that goes on being used."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        spec = [str(placement) for placement in value.placements]
        return [plain(value.to_local()), spec, list(value.shape)]
    if isinstance(value, torch.Tensor):
        wait = getattr(value, "wait", None)  # of functional collectives
        return (value if wait is None else wait()).detach().clone()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


# -- what programs use -----------------------------------------------------------------------------


def data(*shape: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    """Small whole numbers, the same on all ranks unless `shift` is: sums of them are exact."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + shift * 3) % 11 - 4
    if dtype is torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    if not dtype.is_signed:
        numbers = numbers.abs()
    return numbers.to(dtype).reshape(shape)


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `data`, different on each rank."""
    return data(*shape, dtype=dtype, shift=dist.get_rank() + 1)


@contextmanager
def folder() -> Iterator[str]:
    """A new folder that all ranks see."""
    made = [tempfile.mkdtemp(prefix="torch_programs_")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(made, 0)
    try:
        yield made[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0], ignore_errors=True)
