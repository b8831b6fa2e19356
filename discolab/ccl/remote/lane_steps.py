"""The steps of a collective over a lane, as programs yield them. Tensors are on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Give and take contiguous bytes: pairs of a member's place and a tensor.

    With `later` it is only begun; an `Await` follows.
    """

    gives: list[tuple[int, Tensor]]
    takes: list[tuple[int, Tensor]]
    later: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until an exchange is over that was begun before."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Spread:
    """Copy `data` of `root` to all."""

    data: Tensor
    root: int


@dataclass(frozen=True, slots=True)
class AddUp:
    """Reduce everybody's `data` in place with the library: for two members, in any order."""

    data: Tensor
    op: str


Step = Exchange | Await | Spread | AddUp
Finish = Callable[[], None]
Steps = Generator[Step, None, Finish]
Room = Callable[[int], Tensor]


def new_room(size: int) -> Tensor:
    """So many bytes."""
    return torch.empty(size, dtype=torch.uint8)
